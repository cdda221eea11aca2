"""gpt-oss: attention with sinks, every other layer sliding, and experts behind it. Hugging Face `GptOssForCausalLM`."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from tokenspeed_jax.models import mxfp4
from tokenspeed_jax.models.attention import AttentionPrologue, AttentionSpec, AttentionStep, attend_projected
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.experts import SparseMLP
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HfConfig, UnsupportedConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.norms import LateRoundingRMSNorm, Residual
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules, linear_rules, same
from tokenspeed_jax.pallas_kernels.experts import RoutingRule

MXFP4 = "mxfp4"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """Sliding and full layers in turn, sliding first, unless `layer_types` says otherwise; all turn alike.

    Attributes:
        intermediate_size: inner channels of one expert.
        swiglu_alpha, swiglu_limit: of the experts' activation, see `GatedActivation`.
        mxfp4_experts: the checkpoint's expert weights are packed, see `models.mxfp4`.
    """

    num_experts: int
    experts_per_token: int
    swiglu_alpha: float
    swiglu_limit: float
    mxfp4_experts: bool

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        fields = decoder_fields(config, kv_heads=8, head_dim=64, rms_norm_eps=1e-5)
        layers = fields["num_layers"]
        kinds = config.layer_types(layers, tuple((SLIDING_ATTENTION, FULL_ATTENTION)[i % 2] for i in range(layers)))
        window = config.integer("sliding_window", 128)
        if not {"rope_parameters", "rope_scaling"} & hf.keys():
            raise UnsupportedConfig("config.json has neither rope_parameters nor rope_scaling")
        experts, per_token = config.integer("num_local_experts"), config.integer("num_experts_per_tok", 4)
        if per_token > experts:
            raise UnsupportedConfig(f"config.json: num_experts_per_tok {per_token} exceeds num_local_experts {experts}")
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", True),
            windows=tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds),
            ropes=(Rope.from_hf(config, fields["head_dim"], default_theta=150_000.0),) * layers,
            num_experts=experts,
            experts_per_token=per_token,
            swiglu_alpha=config.number("swiglu_alpha", 1.702),
            swiglu_limit=config.number("swiglu_limit", 7.0),
            mxfp4_experts=_packs_experts(config, fields),
        )


def _packs_experts(config: HfConfig, fields: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is MXFP4; raises where its rows are no whole blocks."""
    if (config.fields.get("quantization_config") or {}).get("quant_method") != MXFP4:
        return False
    for field in ("hidden_size", "intermediate_size"):
        if fields[field] % mxfp4.BLOCK:
            raise UnsupportedConfig(f"config.json: {field} {fields[field]} is no multiple of MXFP4's {mxfp4.BLOCK}")
    return True


class GptOssAttention(nnx.Module):
    """Grouped-query attention in which each query head may leave part of its weight on a sink."""

    def __init__(self, config: GptOssConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.sinks = nnx.Param(jnp.zeros((spec.num_heads,), dtype))
        self.out = Linear(
            spec.num_heads * spec.head_dim, config.hidden_size, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        mixed = attend_projected(self.qkv(x), AttentionPrologue(rotate), self.spec, step, self.sinks[...])
        return self.out(mixed.reshape(x.shape[0], -1))


class GptOssLayer(nnx.Module):
    """x += attention(norm(x)); x += experts(norm(x))."""

    def __init__(self, config: GptOssConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention_norm = LateRoundingRMSNorm(dim, epsilon, dtype=dtype)
        self.attention = GptOssAttention(config, spec, dtype=dtype, rngs=rngs)
        self.mlp_norm = LateRoundingRMSNorm(dim, epsilon, dtype=dtype)
        self.mlp = SparseMLP(
            dim,
            config.intermediate_size,
            config.num_experts,
            RoutingRule(config.experts_per_token, scores="softmax_topk"),
            layer_id=spec.layer_id,
            router_bias=True,
            expert_bias=True,
            activation="swiglu_oai",
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x, normed = self.attention_norm.after(stream)
        x, normed = self.mlp_norm.after(Residual(x, self.attention(normed, rotate, step)))
        return Residual(x, self.mlp(normed, step))


class GptOss(CausalDecoder):
    """The whole model."""

    layer_type = GptOssLayer
    norm_type = LateRoundingRMSNorm

    @staticmethod
    def weight_map(config: GptOssConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        sinks = (
            same(("layers", i, "attention", "sinks"), f"model.layers.{i}.self_attn.sinks")
            for i in range(config.num_layers)
        )
        norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
        return (*decoder_rules(config, norms, functools.partial(_mlp_rules, config)), *sinks)


def _mlp_rules(config: GptOssConfig, layer_id: int) -> Iterator[WeightRule]:
    """A layer's router and experts; the checkpoint has all experts of a layer in one tensor."""
    here, there = ("layers", layer_id, "mlp"), f"model.layers.{layer_id}.mlp"
    yield from linear_rules((*here, "router"), f"{there}.router", bias=True)
    expert, packed = (*here, "experts"), f"{there}.experts"
    experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
    yield WeightRule(
        (*expert, "gate_up_bias"),
        (f"{packed}.gate_up_proj_bias",),
        join=_gate_up_bias,
        tensor_shapes=((experts, 2 * inner),),
    )
    yield same((*expert, "down_bias"), f"{packed}.down_proj_bias")
    for name, rows, columns, join, unpack in (
        ("gate_up", 2 * inner, hidden, _gate_up, _packed_gate_up),
        ("down", hidden, inner, _down, _packed_down),
    ):
        tensor, parameter = f"{packed}.{name}_proj", (*expert, name)
        if config.mxfp4_experts:
            shape = (experts, rows, columns // mxfp4.BLOCK)
            yield WeightRule(
                parameter,
                (f"{tensor}_blocks", f"{tensor}_scales"),
                join=unpack,
                tensor_shapes=((*shape, mxfp4.BLOCK_BYTES), shape),
                tensor_dtype="uint8",
            )
        else:
            yield WeightRule(parameter, (tensor,), join=join, tensor_shapes=((experts, columns, rows),))


def _gate_first(rows: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Rows g0, u0, g1, u1, ... as g0, g1, ..., u0, u1, ..., the order of `Experts`."""
    return jnp.concatenate([lax.slice_in_dim(rows, first, None, 2, axis) for first in (0, 1)], axis)


@jax.jit
def _gate_up_bias(parts: Sequence[Array]) -> Float[Array, "experts 2*inner"]:
    return _gate_first(parts[0], axis=1)


@jax.jit
def _gate_up(parts: Sequence[Array]) -> Float[Array, "experts 2*inner hidden"]:
    return _gate_first(parts[0].swapaxes(1, 2), axis=1)


@jax.jit
def _down(parts: Sequence[Array]) -> Float[Array, "experts hidden inner"]:
    return parts[0].swapaxes(1, 2)


@jax.jit
def _packed_gate_up(parts: Sequence[Array]) -> Float[Array, "experts 2*inner hidden"]:
    """Expert by expert, so that nothing between bytes and values is there for more than one."""

    def expert(packed: tuple[Array, Array]) -> Float[Array, "2*inner hidden"]:
        blocks, scales = (_gate_first(x, axis=0) for x in packed)
        return mxfp4.dequantize(blocks, scales, jnp.bfloat16)

    return lax.map(expert, (parts[0], parts[1]))


@jax.jit
def _packed_down(parts: Sequence[Array]) -> Float[Array, "experts hidden inner"]:
    return lax.map(lambda packed: mxfp4.dequantize(packed[0], packed[1], jnp.bfloat16), (parts[0], parts[1]))
