"""Gemma 3, text only: mostly sliding layers, two rotary bases, four norms a layer. Hugging Face `Gemma3ForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionPrologue, AttentionSpec, AttentionStep, attend_projected
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields, soft_cap
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, SLIDING_ATTENTION, HfConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import GemmaRMSNorm, Residual
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """Five sliding layers to one full, unless `layer_types` says otherwise.

    Attributes:
        query_scalar: scores are divided by its square root (`query_pre_attn_scalar`).
        score_cap: bound of attention scores, None for none.
        logit_cap: bound of logits, None for none.
    """

    query_scalar: float
    score_cap: float | None
    logit_cap: float | None

    @property
    def attention_scale(self) -> float:
        return self.query_scalar**-0.5

    @property
    def attention_soft_cap(self) -> float | None:
        return self.score_cap

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_activation", "gelu_pytorch_tanh", "gelu_pytorch_tanh")
        config.refuse_unless("use_bidirectional_attention", False, False)
        fields = decoder_fields(config, kv_heads=4, head_dim=256, tie_word_embeddings=True)
        layers = fields["num_layers"]
        period = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
        kinds = config.layer_types(
            layers, tuple(SLIDING_ATTENTION if (i + 1) % period else FULL_ATTENTION for i in range(layers))
        )
        window = config.integer("sliding_window", 4096)
        head_dim = fields["head_dim"]
        ropes = {
            FULL_ATTENTION: Rope.from_hf(config, head_dim, kind=FULL_ATTENTION, default_theta=1_000_000.0),
            SLIDING_ATTENTION: Rope.from_hf(
                config, head_dim, kind=SLIDING_ATTENTION, theta_field="rope_local_base_freq", scaled=False
            ),
        }
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", False),
            windows=tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            query_scalar=config.number("query_pre_attn_scalar", 256),
            score_cap=config.optional_number("attn_logit_softcapping"),
            logit_cap=config.optional_number("final_logit_softcapping"),
        )


class Gemma3Attention(nnx.Module):
    """Grouped-query attention; each query and key head is normed before it is rotated."""

    def __init__(self, config: Gemma3Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, bias=config.attention_bias, dtype=dtype, rngs=rngs)
        self.q_norm = GemmaRMSNorm(spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = GemmaRMSNorm(spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.out = Linear(
            spec.num_heads * spec.head_dim, config.hidden_size, bias=config.attention_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        prologue = AttentionPrologue(rotate, self.q_norm.norm, self.k_norm.norm)
        mixed = attend_projected(self.qkv(x), prologue, self.spec, step)
        return self.out(mixed.reshape(x.shape[0], -1))


class Gemma3Layer(nnx.Module):
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x)))."""

    def __init__(self, config: Gemma3Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, epsilon = config.hidden_size, config.rms_norm_eps
        self.attention_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)
        self.attention = Gemma3Attention(config, spec, dtype=dtype, rngs=rngs)
        self.attention_out_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)
        self.mlp_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)
        self.mlp = GatedMLP(dim, config.intermediate_size, "gelu_tanh", dtype=dtype, rngs=rngs)
        self.mlp_out_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x, normed = self.attention_norm.after(stream)
        update = self.attention_out_norm(self.attention(normed, rotate, step))
        x, normed = self.mlp_norm.after(Residual(x, update))
        return Residual(x, self.mlp_out_norm(self.mlp(normed)))


class Gemma3(CausalDecoder):
    """The whole model."""

    config: Gemma3Config
    layer_type = Gemma3Layer
    norm_type = GemmaRMSNorm

    def embeddings(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        x = self.embed(token_ids)
        # The models were trained with the factor itself rounded to the weights' dtype.
        return x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)

    def capped(self, scores: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        return soft_cap(scores, self.config.logit_cap)

    @staticmethod
    def weight_map(config: Gemma3Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return decoder_rules(
            config,
            {
                "attention_norm": "input_layernorm",
                "attention.q_norm": "self_attn.q_norm",
                "attention.k_norm": "self_attn.k_norm",
                "attention_out_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "mlp_out_norm": "post_feedforward_layernorm",
            },
        )
