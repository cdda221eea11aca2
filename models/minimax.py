"""MiniMax-01 (arXiv 2501.08313): lightning attention, softmax attention every few layers, experts.

Hugging Face `MiniMaxForCausalLM`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep, LayerSpec, RecurrentSpec, recur
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields, silu
from tokenspeed_jax.models.experts import SparseMLP, expert_rules, routing_rule
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, LINEAR_ATTENTION, HfConfig
from tokenspeed_jax.models.linear import Linear
from tokenspeed_jax.models.llama import LlamaAttention
from tokenspeed_jax.models.norms import Residual, RMSNorm
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, fused_rules, linear_rules, reordered, same, vocabulary_rules
from tokenspeed_jax.pallas_kernels.experts import RoutingRule
from tokenspeed_jax.pallas_kernels.linear_attention import LinearAttentionInputs

_LIGHTNING_NORM_EPSILON = 1e-6  # the public model's, whatever rms_norm_eps says of its other norms


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualFactors:
    """Of a block: its normed input is multiplied by `alpha`, its output by `beta`, and their sum goes on."""

    alpha: float
    beta: float

    @classmethod
    def from_hf(cls, config: HfConfig, block: str) -> Self:
        """Reads the two factors of one kind of block."""
        return cls(
            alpha=config.number(f"{block}_alpha_factor", 1.0),
            beta=config.number(f"{block}_beta_factor", 1.0),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxConfig(DecoderConfig):
    """`intermediate_size` is that of one expert: no layer is dense.

    Attributes:
        kinds: per layer, "full_attention" or "linear_attention".
        mixer_factors: per layer, of its attention.
        mlp_factors: of every layer's experts.
    """

    kinds: tuple[str, ...]
    num_experts: int
    routing: RoutingRule
    mixer_factors: tuple[ResidualFactors, ...]
    mlp_factors: ResidualFactors

    @property
    def cache_family(self) -> str:
        return "hybrid"

    def attention_layers(self) -> tuple[LayerSpec, ...]:
        state = (self.num_heads, self.head_dim, self.head_dim)
        return tuple(
            spec if kind == FULL_ATTENTION else RecurrentSpec(spec.layer_id, None, state)
            for spec, kind in zip(super().attention_layers(), self.kinds, strict=True)
        )

    def decay_rates(self, layer_id: int) -> np.ndarray:
        """How fast each head of a lightning layer forgets, per token, float32 [heads].

        A geometric series over the heads, as ALiBi's slopes, that falls linearly to nearly 0 over the layers.
        """
        heads = np.arange(1, self.num_heads + 1)
        rates = 2.0 ** (-8.0 * heads / self.num_heads)
        return (rates * (1 - layer_id / (self.num_layers - 1 + 1e-5) + 1e-5)).astype(np.float32)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        config.refuse_unless("sliding_window", None, None)
        fields = decoder_fields(config, kv_heads=8, rms_norm_eps=1e-5)
        layers, head_dim = fields["num_layers"], fields["head_dim"]
        pattern = tuple((LINEAR_ATTENTION, FULL_ATTENTION)[(i + 1) % 2] for i in range(layers))
        kinds = config.layer_types(layers, pattern, served=(FULL_ATTENTION, LINEAR_ATTENTION))
        factors = {
            FULL_ATTENTION: ResidualFactors.from_hf(config, "full_attn"),
            LINEAR_ATTENTION: ResidualFactors.from_hf(config, "linear_attn"),
        }
        rope = Rope.from_hf(
            config,
            head_dim,
            default_theta=1_000_000.0,
            partial_rotary_factor=config.integer("rotary_dim", head_dim) / head_dim,
        )
        num_experts = config.integer("num_local_experts", 8)
        return cls(
            **fields,
            attention_bias=False,
            windows=(None,) * layers,
            ropes=(rope,) * layers,
            kinds=kinds,
            num_experts=num_experts,
            routing=routing_rule(num_experts, config.integer("num_experts_per_tok", 2), renormalize=True),
            mixer_factors=tuple(factors[kind] for kind in kinds),
            mlp_factors=ResidualFactors.from_hf(config, "mlp"),
        )


class LightningAttention(nnx.Module):
    """out(sigmoid(gate(x)) * norm(recurrence)): linear attention whose heads forget at constant rates (section 2.2)."""

    def __init__(self, config: MiniMaxConfig, spec: RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.head_dim = config.head_dim
        self.rates = tuple(config.decay_rates(spec.layer_id).tolist())
        dim, width = config.hidden_size, config.num_heads * config.head_dim
        self.proj = Linear(dim, 4 * width, dtype=dtype, rngs=rngs)  # rows of q, k, v, gate
        self.norm = RMSNorm(width, _LIGHTNING_NORM_EPSILON, dtype=dtype)
        self.out = Linear(width, dim, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        del rotate  # decay alone says how far apart tokens are
        tokens, heads = x.shape[0], len(self.rates)
        q, k, v, gate = jnp.split(self.proj(x), 4, axis=-1)
        q, k, v = (silu(part).reshape(tokens, heads, self.head_dim) for part in (q, k, v))
        log_decay = jnp.broadcast_to(-jnp.asarray(self.rates, jnp.float32), (tokens, heads))
        mixed = recur(LinearAttentionInputs(q, k, v, log_decay), self.spec, step)
        mixed = self.norm(mixed.reshape(tokens, -1))
        return self.out((jax.nn.sigmoid(gate.astype(jnp.float32)) * mixed).astype(x.dtype))


class MiniMaxLayer(nnx.Module):
    """x = norm(x); x = alpha x + beta mixer(x), and the same again with experts: what is added to is the normed."""

    def __init__(self, config: MiniMaxConfig, spec: LayerSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, epsilon = config.hidden_size, config.rms_norm_eps
        self.mixer_factors = config.mixer_factors[spec.layer_id]
        self.mlp_factors = config.mlp_factors
        self.mixer_norm = RMSNorm(dim, epsilon, dtype=dtype)
        if isinstance(spec, RecurrentSpec):
            self.mixer = LightningAttention(config, spec, dtype=dtype, rngs=rngs)
        else:
            assert isinstance(spec, AttentionSpec)
            self.mixer = LlamaAttention(config, spec, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(dim, epsilon, dtype=dtype)
        self.mlp = SparseMLP(
            dim,
            config.intermediate_size,
            config.num_experts,
            config.routing,
            layer_id=spec.layer_id,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        mixed, fed = self.mixer_factors, self.mlp_factors
        _, x = self.mixer_norm.after(stream)
        _, x = self.mlp_norm.after(Residual(mixed.alpha * x, mixed.beta * self.mixer(x, rotate, step)))
        return Residual(fed.alpha * x, fed.beta * self.mlp(x, step))


class MiniMax(CausalDecoder):
    """The whole model."""

    layer_type = MiniMaxLayer
    norm_type = RMSNorm

    @staticmethod
    def ignored_tensors(config: MiniMaxConfig) -> tuple[str, ...]:
        """The decay constants that some checkpoints store: they follow from the configuration."""
        return tuple(
            f"model.layers.{spec.layer_id}.self_attn.{name}"
            for spec in config.attention_layers()
            if isinstance(spec, RecurrentSpec)
            for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        )

    @staticmethod
    def weight_map(config: MiniMaxConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = list(vocabulary_rules(config))
        for spec in config.attention_layers():
            here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
            mixer, attention = (*here, "mixer"), f"{there}.self_attn"
            if isinstance(spec, AttentionSpec):
                q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
                qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
                rules += fused_rules((*mixer, "qkv", "proj"), qkv, (q, kv, kv))
                rules += linear_rules((*mixer, "out"), f"{attention}.o_proj", bias=False)
            else:
                rules.append(_lightning_projection(mixer, attention, config))
                rules += linear_rules((*mixer, "out"), f"{attention}.out_proj", bias=False)
                rules.append(same((*mixer, "norm", "weight"), f"{attention}.norm.weight"))
            block = f"{there}.block_sparse_moe"
            rules += expert_rules(
                (*here, "mlp"),
                router=f"{block}.gate",
                experts=f"{block}.experts",
                hidden_size=config.hidden_size,
                expert_size=config.intermediate_size,
                num_experts=config.num_experts,
                projections=("w1", "w3", "w2"),
            )
            rules.append(same((*here, "mixer_norm", "weight"), f"{there}.input_layernorm.weight"))
            rules.append(same((*here, "mlp_norm", "weight"), f"{there}.post_attention_layernorm.weight"))
        return tuple(rules)


def _lightning_projection(mixer: tuple[str | int, ...], attention: str, config: MiniMaxConfig) -> WeightRule:
    """`qkv_proj` holds each head's query, key and value in turn; the gate's rows are as they should be."""
    width = config.num_heads * config.head_dim
    by_head = np.arange(3 * width).reshape(config.num_heads, 3, config.head_dim)
    return reordered(
        (*mixer, "proj", "weight"),
        (f"{attention}.qkv_proj.weight", f"{attention}.output_gate.weight"),
        (3 * width, width),
        np.concatenate([by_head.swapaxes(0, 1).ravel(), np.arange(3 * width, 4 * width)]),
        (config.hidden_size,),
    )
