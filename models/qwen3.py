"""Qwen3, dense: Llama with a norm on each query and key head. Hugging Face `Qwen3ForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionPrologue, AttentionSpec, AttentionStep, attend_projected
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HfConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.llama import LlamaLayer
from tokenspeed_jax.models.norms import RMSNorm
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules

QWEN3_NORMS = {
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The head dimension is its own field and need not divide the hidden size."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        fields = decoder_fields(config, kv_heads=32, head_dim=128)
        layers = fields["num_layers"]
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", False),
            windows=_windows(config, layers),
            ropes=(Rope.from_hf(config, fields["head_dim"]),) * layers,
        )


def _windows(config: HfConfig, layers: int) -> tuple[int | None, ...]:
    """Windows are off unless `use_sliding_window`; then the layers from `max_window_layers` on have them."""
    if not config.flag("use_sliding_window", False):
        return (None,) * layers
    window = config.optional_integer("sliding_window", default=4096)
    first = config.fields.get("max_window_layers", 28)
    kinds = config.layer_types(
        layers, tuple(SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(layers))
    )
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


class Qwen3Attention(nnx.Module):
    """Grouped-query attention; each query and key head is normed before it is rotated."""

    def __init__(self, config: DecoderConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.out = Linear(
            spec.num_heads * spec.head_dim, config.hidden_size, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )

    def mix(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens heads*dim"]:
        """What the heads see, before the output projection."""
        prologue = AttentionPrologue(rotate, self.q_norm.norm, self.k_norm.norm)
        mixed = attend_projected(self.qkv(x), prologue, self.spec, step)
        return mixed.reshape(x.shape[0], -1)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        return self.out(self.mix(x, rotate, step))


class Qwen3Layer(LlamaLayer):
    """Llama's layer around Qwen3's attention."""

    attention_type = Qwen3Attention


class Qwen3(CausalDecoder):
    """The whole model."""

    layer_type = Qwen3Layer
    norm_type = RMSNorm

    @staticmethod
    def weight_map(config: Qwen3Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return decoder_rules(config, QWEN3_NORMS)
