"""OLMo 3: three sliding layers to one full, norms after the blocks. Hugging Face `Olmo3ForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep, attend
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HfConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import LateRoundingRMSNorm, Residual
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo3Config(DecoderConfig):
    """Only the full layers' rotary embedding is scaled (YaRN in the released models)."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        fields = decoder_fields(config, kv_heads=None, rms_norm_eps=1e-5)
        layers, head_dim = fields["num_layers"], fields["head_dim"]
        kinds = config.layer_types(
            layers, tuple(SLIDING_ATTENTION if (i + 1) % 4 else FULL_ATTENTION for i in range(layers))
        )
        window = config.optional_integer("sliding_window", default=4096)
        ropes = {
            FULL_ATTENTION: Rope.from_hf(config, head_dim, kind=FULL_ATTENTION),
            SLIDING_ATTENTION: Rope.from_hf(config, head_dim, kind=SLIDING_ATTENTION, scaled=False),
        }
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", False),
            windows=tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
        )


class Olmo3Attention(nnx.Module):
    """Grouped-query attention; queries and keys are normed over all their heads together, then rotated."""

    def __init__(self, config: Olmo3Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.q_norm = LateRoundingRMSNorm(spec.num_heads * spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = LateRoundingRMSNorm(spec.num_kv_heads * spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.out = Linear(
            spec.num_heads * spec.head_dim, config.hidden_size, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        q, k, v = self.qkv.flat(x)
        q, k = self.qkv.heads(self.q_norm(q)), self.qkv.heads(self.k_norm(k))
        mixed = attend(rotate(q), rotate(k), self.qkv.heads(v), self.spec, step)
        return self.out(mixed.reshape(x.shape[0], -1))


class Olmo3Layer(nnx.Module):
    """x += norm(attention(x)); x += norm(mlp(x))."""

    def __init__(self, config: Olmo3Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.attention = Olmo3Attention(config, spec, dtype=dtype, rngs=rngs)
        self.attention_out_norm = LateRoundingRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)
        self.mlp_out_norm = LateRoundingRMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x = stream.total
        x = x + self.attention_out_norm(self.attention(x, rotate, step))
        return Residual(x, self.mlp_out_norm(self.mlp(x)))


class Olmo3(CausalDecoder):
    """The whole model."""

    layer_type = Olmo3Layer
    norm_type = LateRoundingRMSNorm

    @staticmethod
    def weight_map(config: Olmo3Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return decoder_rules(
            config,
            {
                "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm",
                "attention_out_norm": "post_attention_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            },
        )
