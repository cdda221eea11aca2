"""Kimi Linear (arXiv 2510.26692): Kimi Delta Attention, latent attention without positions, experts.

Hugging Face `KimiLinearForCausalLM`. Layers are numbered from 0 here and from 1 in `linear_attn_config`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from tokenspeed_jax.models.attention import (
    AttentionStep,
    LatentAttentionSpec,
    LayerSpec,
    RecurrentSpec,
    convolve,
    recur,
)
from tokenspeed_jax.models.decoder import CausalDecoder, silu
from tokenspeed_jax.models.deepseek_v3 import SharedAndRouted, SharedAndRoutedMLP, shared_and_routed_rules
from tokenspeed_jax.models.experts import routing_rule
from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig
from tokenspeed_jax.models.latent_attention import LatentAttention, latent_dimensions, latent_rules
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import Residual, RMSNorm, unit_vectors
from tokenspeed_jax.models.rematerialisation import layer_call
from tokenspeed_jax.models.weight_map import (
    WeightRule,
    fused_rules,
    gated_mlp_rules,
    reshaped,
    same,
    vocabulary_rules,
)
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """The fields of `config.json` that the model reads, under this project's names.

    Attributes:
        q_lora_rank: channels of the latent layers' query latent; None projects queries directly.
        delta_heads, delta_dim: heads of a delta attention layer, and channels of each one's query, key and value.
        decay_floor: lowest log-decay of a channel per token, below 0; None leaves it unbounded.
        dense_layers: how many leading layers have a dense MLP of `intermediate_size`.
        experts: of the layers behind those.
    """

    cache_family = "kda_hybrid"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    q_lora_rank: int | None
    delta_heads: int
    delta_dim: int
    convolution_width: int
    decay_floor: float | None
    layers: tuple[LatentAttentionSpec | RecurrentSpec, ...]
    dense_layers: int
    experts: SharedAndRouted

    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """What each layer's attention, or recurrence, computes."""
        return self.layers

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        for field, served in (
            ("hidden_act", "silu"),
            ("mla_use_nope", True),
            ("mla_use_output_gate", False),
            ("attn_res_block_size", None),
            ("routed_expert_hidden_size", None),
            ("moe_layer_freq", 1),
            ("moe_router_activation_func", "sigmoid"),
        ):
            config.refuse_unless(field, served, served)
        delta = _delta_config(config)
        delta.refuse_unless("use_full_rank_gate", False, False)
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            max_position_embeddings=config.integer("model_max_length"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-5),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            q_lora_rank=config.optional_integer("q_lora_rank"),
            delta_heads=delta.integer("num_heads"),
            delta_dim=delta.integer("head_dim"),
            convolution_width=delta.integer("short_conv_kernel_size", 4),
            decay_floor=_decay_floor(delta),
            layers=_layers(config, delta),
            dense_layers=config.count("first_k_dense_replace", 1),
            experts=_experts(config),
        )


def _experts(config: HfConfig) -> SharedAndRouted:
    num_experts, expert_size = config.integer("num_experts"), config.integer("moe_intermediate_size")
    return SharedAndRouted(
        num_experts=num_experts,
        expert_size=expert_size,
        shared_size=expert_size * config.integer("num_shared_experts"),
        routing=routing_rule(
            num_experts,
            config.integer("num_experts_per_token"),
            scores="sigmoid",
            renormalize=config.flag("moe_renormalize", True),
            scale=config.number("routed_scaling_factor", 2.446),
            num_groups=config.integer("num_expert_group", 1),
            top_groups=config.integer("topk_group", 1),
        ),
    )


def _delta_config(config: HfConfig) -> HfConfig:
    fields = config.fields.get("linear_attn_config")
    if not isinstance(fields, Mapping):
        raise UnsupportedConfig(f"config.json: linear_attn_config must be an object, got {fields!r}")
    return HfConfig(fields)


def _decay_floor(delta: HfConfig) -> float | None:
    floor = delta.fields.get("gate_lower_bound")
    if floor is not None and not (isinstance(floor, int | float) and floor < 0):
        raise UnsupportedConfig(f"config.json: linear_attn_config.gate_lower_bound must be negative, got {floor!r}")
    return floor


def _layers(config: HfConfig, delta: HfConfig) -> tuple[LatentAttentionSpec | RecurrentSpec, ...]:
    count, dimensions = config.integer("num_hidden_layers"), latent_dimensions(config)
    scale = (dimensions["nope_dim"] + dimensions["rope_dim"]) ** -0.5
    heads, dim = delta.integer("num_heads"), delta.integer("head_dim")
    convolution = (3 * heads * dim, delta.integer("short_conv_kernel_size", 4))
    kda, full = (list(delta.fields.get(field) or ()) for field in ("kda_layers", "full_attn_layers"))
    if sorted(kda + full) != list(range(1, count + 1)):
        raise UnsupportedConfig(
            f"config.json: linear_attn_config.kda_layers {kda} and full_attn_layers {full} do not name each of the "
            f"layers 1 to {count} once"
        )
    return tuple(
        RecurrentSpec(i, convolution, (heads, dim, dim), channel_gates=True)
        if i + 1 in kda
        else LatentAttentionSpec(i, **dimensions, scale=scale)
        for i in range(count)
    )


class KimiDeltaAttention(nnx.Module):
    """The gated delta rule with a decay for every channel of a key (section 3; model-families.md 1.7)."""

    def __init__(self, config: KimiLinearConfig, spec: RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.heads, self.dim, self.floor = config.delta_heads, config.delta_dim, config.decay_floor
        width = self.heads * self.dim
        self.rows = delta_rows(config)
        self.first = Linear(config.hidden_size, sum(self.rows), dtype=dtype, rngs=rngs)
        assert spec.convolution is not None
        self.convolution = normal_weight(spec.convolution, dtype, rngs)
        self.decay_up = Linear(self.dim, width, dtype=dtype, rngs=rngs)
        self.decay_rate = nnx.Param(jnp.zeros((self.heads,), jnp.float32))  # natural log of it
        self.decay_bias = nnx.Param(jnp.zeros((self.heads, self.dim), jnp.float32))
        self.gate_up = Linear(self.dim, width, dtype=dtype, rngs=rngs)
        self.norm = RMSNorm(self.dim, config.rms_norm_eps, dtype=dtype)
        self.out = Linear(width, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens hidden"], step: AttentionStep) -> Float[Array, "tokens hidden"]:
        tokens = x.shape[0]
        ends = (sum(self.rows[:3]), sum(self.rows[:4]), sum(self.rows[:5]))
        qkv, beta, decay, gate = jnp.split(self.first(x), ends, axis=-1)
        qkv = silu(convolve(qkv, self.convolution[...], self.spec, step))
        q, k, v = (part.reshape(tokens, self.heads, self.dim) for part in jnp.split(qkv, 3, axis=-1))
        inputs = DeltaRuleInputs(
            unit_vectors(q) * self.dim**-0.5,
            unit_vectors(k),
            v,
            self.log_decay(self.decay_up(decay)),
            jax.nn.sigmoid(beta.astype(jnp.float32)),
        )
        mixed = self.norm(recur(inputs, self.spec, step))
        gate = self.gate_up(gate).reshape(mixed.shape).astype(jnp.float32)
        return self.out((mixed * jax.nn.sigmoid(gate)).astype(x.dtype).reshape(tokens, -1))

    def log_decay(self, raw: Float[Array, "tokens width"]) -> Float32[Array, "tokens heads dim"]:
        """Natural log of each channel's decay: below 0, and above the floor where there is one."""
        raw = raw.reshape(-1, self.heads, self.dim).astype(jnp.float32) + self.decay_bias[...]
        rate = jnp.exp(self.decay_rate[...])[:, None]
        if self.floor is not None:
            return self.floor * jax.nn.sigmoid(rate * raw)
        return -rate * jax.nn.softplus(raw)


def delta_rows(config: KimiLinearConfig) -> tuple[int, ...]:
    """Rows of the first projection: queries, keys, values, beta, and what decay and output gate are expanded from."""
    width = config.delta_heads * config.delta_dim
    return width, width, width, config.delta_heads, config.delta_dim, config.delta_dim


class KimiLinearLayer(nnx.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)), the mixer being delta or latent attention."""

    def __init__(
        self, config: KimiLinearConfig, spec: LatentAttentionSpec | RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if isinstance(spec, RecurrentSpec):
            self.delta = KimiDeltaAttention(config, spec, dtype=dtype, rngs=rngs)
        else:
            self.attention = LatentAttention(config.hidden_size, spec, config.q_lora_rank, dtype=dtype, rngs=rngs)
        self.recurrent = isinstance(spec, RecurrentSpec)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)
            if spec.layer_id < config.dense_layers
            else SharedAndRoutedMLP(config.hidden_size, config.experts, spec.layer_id, dtype=dtype, rngs=rngs)
        )

    def __call__(self, stream: Residual, step: AttentionStep) -> Residual:
        x, normed = self.mixer_norm.after(stream)
        mixed = self.delta(normed, step) if self.recurrent else self.attention(normed, None, step)
        x, normed = self.mlp_norm.after(Residual(x, mixed))
        return Residual(x, self.mlp(normed, step))


class KimiLinear(CausalDecoder):
    """The whole model; no layer knows a token's position."""

    layer_type = KimiLinearLayer
    norm_type = RMSNorm

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        step: AttentionStep,
        *,
        remat: bool = False,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states after the final norm, of sequences packed one after another; `positions` are not used."""
        del positions
        stream = Residual(self.embeddings(token_ids))
        for layer in self.layers:
            stream = layer_call(layer, step, remat=remat)(stream)
        return self.norm.after(stream)[1]

    @staticmethod
    def ignored_tensors(config: KimiLinearConfig) -> tuple[str, ...]:
        """Beginnings of tensor names that the checkpoint may have and the model does not compute with."""
        return (f"model.layers.{config.num_layers}.",)

    @staticmethod
    def weight_map(config: KimiLinearConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = list(vocabulary_rules(config))
        for spec in config.layers:
            here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
            rules.append(same((*here, "mixer_norm", "weight"), f"{there}.input_layernorm.weight"))
            if isinstance(spec, RecurrentSpec):
                rules += _delta_rules((*here, "delta"), f"{there}.self_attn", config)
            elif isinstance(spec, LatentAttentionSpec):
                rules += latent_rules((*here, "attention"), f"{there}.self_attn", spec, config.q_lora_rank)
            rules.append(same((*here, "mlp_norm", "weight"), f"{there}.post_attention_layernorm.weight"))
            if spec.layer_id < config.dense_layers:
                rules += gated_mlp_rules((*here, "mlp"), f"{there}.mlp", config.intermediate_size)
            else:
                rules += shared_and_routed_rules(
                    (*here, "mlp"),
                    f"{there}.block_sparse_moe",
                    config.hidden_size,
                    config.experts,
                    projections=("w1", "w3", "w2"),
                )
        return tuple(rules)


def _delta_rules(here: tuple[str | int, ...], there: str, config: KimiLinearConfig) -> Iterator[WeightRule]:
    first = tuple(f"{there}.{name}_proj" for name in ("q", "k", "v", "b", "f_a", "g_a"))
    yield from fused_rules((*here, "first"), first, delta_rows(config))
    channels, width = config.delta_heads * config.delta_dim, config.convolution_width

    def filters(parts: Sequence[Array]) -> Array:
        return jnp.concatenate(parts, axis=0)[:, 0]

    convolutions = tuple(f"{there}.{name}_conv1d.weight" for name in "qkv")
    yield WeightRule((*here, "convolution"), convolutions, join=filters, tensor_shapes=((channels, 1, width),) * 3)
    heads = config.delta_heads
    yield reshaped((*here, "decay_rate"), f"{there}.A_log", (1, 1, heads, 1), (heads,))
    yield reshaped((*here, "decay_bias"), f"{there}.dt_bias", (channels,), (heads, config.delta_dim))
    for parameter, tensor in (("decay_up", "f_b_proj"), ("gate_up", "g_b_proj"), ("out", "o_proj"), ("norm", "o_norm")):
        yield same((*here, parameter, "weight"), f"{there}.{tensor}.weight")
