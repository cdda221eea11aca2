"""LFM2: gated short convolutions, and attention every few layers. Hugging Face `Lfm2ForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep, LayerSpec, RecurrentSpec, convolve
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, HfConfig, UnsupportedConfig
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import Residual, RMSNorm
from tokenspeed_jax.models.qwen3 import Qwen3Attention
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, fused_rules, linear_rules, reshaped, same

CONVOLUTION = "conv"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """A decoder whose layers are attention where `kinds` says so, and short convolutions elsewhere.

    Attributes:
        kinds: per layer, "full_attention" or "conv".
        convolution_width: tokens that a filter spans, the current one included.
        convolution_bias: whether the convolution and its projections have biases.
    """

    kinds: tuple[str, ...]
    convolution_width: int
    convolution_bias: bool

    @property
    def cache_family(self) -> str:
        return "hybrid"

    def attention_layers(self) -> tuple[LayerSpec, ...]:
        windows = (self.hidden_size, self.convolution_width)
        return tuple(
            spec if kind == FULL_ATTENTION else RecurrentSpec(spec.layer_id, windows, None)
            for spec, kind in zip(super().attention_layers(), self.kinds, strict=True)
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        # The first releases spell three fields their own way.
        tied, theta = config.flag("tie_embedding", True), config.number("theta", 1_000_000.0)
        size = config.integer("block_ff_dim", 12288)
        fields = decoder_fields(config, kv_heads=8, intermediate_size=size, tie_word_embeddings=tied)
        fields["rms_norm_eps"] = config.number("norm_eps", 1e-5)
        fields["intermediate_size"] = _feed_forward_size(config, fields["intermediate_size"])
        layers = fields["num_layers"]
        kinds = hf.get("layer_types")
        if kinds is None:
            attending = hf.get("full_attn_idxs") or range(layers)
            kinds = [FULL_ATTENTION if index in attending else CONVOLUTION for index in range(layers)]
        if len(kinds) != layers or not set(kinds) <= {FULL_ATTENTION, CONVOLUTION}:
            raise UnsupportedConfig(
                f"config.json: layer_types must hold {layers} of {FULL_ATTENTION} and {CONVOLUTION}, got {kinds}"
            )
        return cls(
            **fields,
            attention_bias=False,
            windows=(None,) * layers,
            ropes=(Rope.from_hf(config, fields["head_dim"], default_theta=theta),) * layers,
            kinds=tuple(kinds),
            convolution_width=config.integer("conv_L_cache", 3),
            convolution_bias=config.flag("conv_bias", False),
        )


def _feed_forward_size(config: HfConfig, size: int) -> int:
    """Two thirds of what the config says, times its multiplier, rounded up, if it says so."""
    if not config.flag("block_auto_adjust_ff_dim", True):
        return size
    adjusted = int(int(2 * size / 3) * config.number("block_ffn_dim_multiplier", 1.0))
    multiple = config.integer("block_multiple_of", 256)
    return multiple * -(-adjusted // multiple)


class ShortConvolution(nnx.Module):
    """out(C * convolution(B * x)), with B, C and x projected from the hidden state."""

    def __init__(self, config: Lfm2Config, spec: RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, bias = config.hidden_size, config.convolution_bias
        self.spec = spec
        self.gates = Linear(dim, 3 * dim, bias=bias, dtype=dtype, rngs=rngs)  # rows of B, C, x
        self.filters = normal_weight((dim, config.convolution_width), dtype, rngs)
        self.filter_bias = nnx.Param(jnp.zeros((dim,), dtype)) if bias else None
        self.out = Linear(dim, dim, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        del rotate
        before, after, x = jnp.split(self.gates(x), 3, axis=-1)
        bias = None if self.filter_bias is None else self.filter_bias[...]
        return self.out(after * convolve(before * x, self.filters[...], self.spec, step, bias=bias))


class Lfm2Layer(nnx.Module):
    """x += operator(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: Lfm2Config, spec: LayerSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, epsilon = config.hidden_size, config.rms_norm_eps
        self.operator_norm = RMSNorm(dim, epsilon, dtype=dtype)
        # Attention is Qwen3's: a norm on each query and key head.
        self.operator = (
            Qwen3Attention(config, spec, dtype=dtype, rngs=rngs)
            if isinstance(spec, AttentionSpec)
            else ShortConvolution(config, spec, dtype=dtype, rngs=rngs)  # type: ignore[arg-type]
        )
        self.mlp_norm = RMSNorm(dim, epsilon, dtype=dtype)
        self.mlp = GatedMLP(dim, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x, normed = self.operator_norm.after(stream)
        x, normed = self.mlp_norm.after(Residual(x, self.operator(normed, rotate, step)))
        return Residual(x, self.mlp(normed))


class Lfm2(CausalDecoder):
    """The whole model."""

    config: Lfm2Config
    layer_type = Lfm2Layer
    norm_type = RMSNorm

    @staticmethod
    def weight_map(config: Lfm2Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = [
            same(("embed", "weight"), "model.embed_tokens.weight"),
            same(("norm", "weight"), "model.embedding_norm.weight"),
        ]
        if not config.tie_word_embeddings:
            rules.append(same(("head", "weight"), "lm_head.weight"))
        for spec in config.attention_layers():
            here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
            rules += _attention_rules(here, there, spec) if isinstance(spec, AttentionSpec) else []
            rules += _convolution_rules(here, there, config) if isinstance(spec, RecurrentSpec) else []
            gate_up = (f"{there}.feed_forward.w1", f"{there}.feed_forward.w3")
            rules += fused_rules((*here, "mlp", "gate_up"), gate_up, (config.intermediate_size,) * 2)
            rules += linear_rules((*here, "mlp", "down"), f"{there}.feed_forward.w2", bias=False)
            rules.append(same((*here, "operator_norm", "weight"), f"{there}.operator_norm.weight"))
            rules.append(same((*here, "mlp_norm", "weight"), f"{there}.ffn_norm.weight"))
        return tuple(rules)


def _attention_rules(here: tuple[str | int, ...], there: str, spec: AttentionSpec) -> list[WeightRule]:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    qkv = tuple(f"{there}.self_attn.{x}_proj" for x in "qkv")
    return [
        *fused_rules((*here, "operator", "qkv", "proj"), qkv, (q, kv, kv)),
        *linear_rules((*here, "operator", "out"), f"{there}.self_attn.out_proj", bias=False),
        same((*here, "operator", "q_norm", "weight"), f"{there}.self_attn.q_layernorm.weight"),
        same((*here, "operator", "k_norm", "weight"), f"{there}.self_attn.k_layernorm.weight"),
    ]


def _convolution_rules(here: tuple[str | int, ...], there: str, config: Lfm2Config) -> list[WeightRule]:
    dim, width, bias = config.hidden_size, config.convolution_width, config.convolution_bias
    filters = reshaped((*here, "operator", "filters"), f"{there}.conv.conv.weight", (dim, 1, width), (dim, width))
    return [
        *linear_rules((*here, "operator", "gates"), f"{there}.conv.in_proj", bias=bias),
        *linear_rules((*here, "operator", "out"), f"{there}.conv.out_proj", bias=bias),
        filters,
        *([same((*here, "operator", "filter_bias"), f"{there}.conv.conv.bias")] if bias else []),
    ]
