"""Llama 2 and 3, and the models built like them (SmolLM2, TinyLlama). Hugging Face `LlamaForCausalLM`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionPrologue, AttentionSpec, AttentionStep, attend_projected
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import Residual, RMSNorm
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Every layer sees everything and turns alike."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        config.refuse_unless("mlp_bias", False, False)
        fields = decoder_fields(config, kv_heads=None)
        layers = fields["num_layers"]
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", False),
            windows=(None,) * layers,
            ropes=(Rope.from_hf(config, fields["head_dim"]),) * layers,
        )


class LlamaAttention(nnx.Module):
    """Grouped-query attention over rotated queries and keys."""

    def __init__(self, config: DecoderConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.out = Linear(
            spec.num_heads * spec.head_dim, config.hidden_size, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )

    def mix(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens heads*dim"]:
        """What the heads see, before the output projection."""
        mixed = attend_projected(self.qkv(x), AttentionPrologue(rotate), self.spec, step)
        return mixed.reshape(x.shape[0], -1)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        return self.out(self.mix(x, rotate, step))


def dense_mlp(config: DecoderConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> GatedMLP:
    """The same block in every layer."""
    del spec
    return GatedMLP(config.hidden_size, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)


class LlamaLayer(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x)); a family gives its own attention and feed-forward block."""

    attention_type: ClassVar[Callable[..., Any]] = LlamaAttention
    mlp_type: ClassVar[Callable[..., Any]] = dense_mlp

    def __init__(self, config: DecoderConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = type(self).attention_type(config, spec, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = type(self).mlp_type(config, spec, dtype=dtype, rngs=rngs)

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x, normed = self.attention_norm.after(stream)
        if isinstance(self.mlp, GatedMLP) and self.attention.out.bias is None:
            mixed = self.attention.mix(normed, rotate, step)
            return self.mlp.after_attention(x, mixed, self.attention.out, self.mlp_norm)
        x, normed = self.mlp_norm.after(Residual(x, self.attention(normed, rotate, step)))
        return Residual(x, self.mlp(normed))


class Llama(CausalDecoder):
    """The whole model."""

    layer_type = LlamaLayer
    norm_type = RMSNorm

    @staticmethod
    def weight_map(config: DecoderConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return decoder_rules(config, {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
