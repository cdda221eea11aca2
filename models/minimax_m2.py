"""MiniMax-M2: every layer full attention with partial rotation, and experts. Hugging Face `MiniMaxM2ForCausalLM`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep, attend
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.experts import SparseMLP, expert_rules, routing_rule
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Linear, QKVLinear
from tokenspeed_jax.models.llama import LlamaLayer
from tokenspeed_jax.models.norms import RMSNorm
from tokenspeed_jax.models.qwen3 import QWEN3_NORMS
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules
from tokenspeed_jax.pallas_kernels.experts import RoutingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """`intermediate_size` is that of one expert: no layer is dense."""

    num_experts: int
    routing: RoutingRule

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        config.refuse_unless("scoring_func", "sigmoid", "sigmoid")
        config.refuse_unless("use_routing_bias", True, True)
        config.refuse_unless("use_qk_norm", True, True)
        config.refuse_unless("qk_norm_type", "per_layer", "per_layer")
        config.refuse_unless("shared_intermediate_size", 0, 0)
        fields = decoder_fields(config, kv_heads=8, head_dim=128)
        layers, head_dim = fields["num_layers"], fields["head_dim"]
        config.refuse_unless("attn_type_list", [1] * layers, [1] * layers)
        rope = Rope.from_hf(
            config,
            head_dim,
            default_theta=5_000_000.0,
            partial_rotary_factor=config.integer("rotary_dim", head_dim) / head_dim,
        )
        num_experts = config.integer("num_local_experts", 256)
        return cls(
            **fields,
            attention_bias=False,
            windows=(None,) * layers,
            ropes=(rope,) * layers,
            num_experts=num_experts,
            routing=routing_rule(num_experts, config.integer("num_experts_per_tok", 8), scores="sigmoid"),
        )


class MiniMaxM2Attention(nnx.Module):
    """Grouped-query attention; queries and keys are normed over all their heads together, then rotated in part."""

    def __init__(self, config: MiniMaxM2Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.qkv = QKVLinear(config.hidden_size, spec, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, config.rms_norm_eps, dtype=dtype)
        self.out = Linear(spec.num_heads * spec.head_dim, config.hidden_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        q, k, v = self.qkv.flat(x)
        q, k = self.qkv.heads(self.q_norm(q)), self.qkv.heads(self.k_norm(k))
        mixed = attend(rotate(q), rotate(k), self.qkv.heads(v), self.spec, step)
        return self.out(mixed.reshape(x.shape[0], -1))


def sparse_mlp(config: MiniMaxM2Config, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> SparseMLP:
    """The same block in every layer; its router is float32 in the checkpoint."""
    return SparseMLP(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts,
        config.routing,
        layer_id=spec.layer_id,
        dtype=dtype,
        rngs=rngs,
        selection_bias=True,
        router_dtype=jnp.float32,
    )


class MiniMaxM2Layer(LlamaLayer):
    """Llama's layer around other attention, and experts."""

    attention_type = MiniMaxM2Attention
    mlp_type = sparse_mlp


class MiniMaxM2(CausalDecoder):
    """The whole model."""

    layer_type = MiniMaxM2Layer
    norm_type = RMSNorm

    @staticmethod
    def weight_map(config: MiniMaxM2Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""

        def mlp_rules(layer_id: int) -> Iterator[WeightRule]:
            block = f"model.layers.{layer_id}.block_sparse_moe"
            return expert_rules(
                ("layers", layer_id, "mlp"),
                router=f"{block}.gate",
                experts=f"{block}.experts",
                hidden_size=config.hidden_size,
                expert_size=config.intermediate_size,
                num_experts=config.num_experts,
                projections=("w1", "w3", "w2"),
                selection_bias=f"{block}.e_score_correction_bias",
            )

        return decoder_rules(config, QWEN3_NORMS, mlp_rules)
