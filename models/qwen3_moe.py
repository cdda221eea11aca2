"""Qwen3-MoE: Qwen3 whose feed-forward blocks are mixtures of experts. Hugging Face `Qwen3MoeForCausalLM`."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike

from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.models.decoder import CausalDecoder, decoder_fields
from tokenspeed_jax.models.experts import SparseMLP, expert_rules, routing_rule
from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig
from tokenspeed_jax.models.llama import dense_mlp
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import RMSNorm
from tokenspeed_jax.models.qwen3 import QWEN3_NORMS, Qwen3Config, Qwen3Layer
from tokenspeed_jax.models.rope import Rope
from tokenspeed_jax.models.weight_map import WeightRule, decoder_rules, gated_mlp_rules
from tokenspeed_jax.pallas_kernels.experts import RoutingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoEConfig(Qwen3Config):
    """Some layers are dense.

    Attributes:
        intermediate_size: inner channels of the dense layers.
        expert_size: inner channels of one expert.
        sparse: per layer, whether its block is a mixture of experts.
    """

    num_experts: int
    expert_size: int
    routing: RoutingRule
    sparse: tuple[bool, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        fields = decoder_fields(config, kv_heads=4)
        layers = fields["num_layers"]
        windowed = config.flag("use_sliding_window", False)
        num_experts = expert_count(config, default=128)
        return cls(
            **fields,
            attention_bias=config.flag("attention_bias", False),
            windows=(config.optional_integer("sliding_window", default=4096) if windowed else None,) * layers,
            ropes=(Rope.from_hf(config, fields["head_dim"]),) * layers,
            num_experts=num_experts,
            expert_size=config.integer("moe_intermediate_size", 768),
            routing=routing_rule(
                num_experts,
                top_k=config.integer("num_experts_per_tok", 8),
                renormalize=config.flag("norm_topk_prob", False),
            ),
            sparse=sparse_layers(config, layers),
        )


def expert_count(config: HfConfig, default: int) -> int:
    """`num_experts`, which newer configs spell `num_local_experts`."""
    return config.integer("num_experts", config.integer("num_local_experts", default))


def sparse_layers(config: HfConfig, num_layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`th layer has experts, unless `mlp_only_layers` names it."""
    step = config.integer("decoder_sparse_step", 1)
    dense = config.fields.get("mlp_only_layers") or []
    if not all(isinstance(layer, int) and 0 <= layer < num_layers for layer in dense):
        raise UnsupportedConfig(f"config.json: mlp_only_layers = {dense!r} must list layers below {num_layers}")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def sparse_or_dense_mlp(
    config: Qwen3MoEConfig, spec: AttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> SparseMLP | GatedMLP:
    """A layer's feed-forward block."""
    if not config.sparse[spec.layer_id]:
        return dense_mlp(config, spec, dtype=dtype, rngs=rngs)
    return SparseMLP(
        config.hidden_size,
        config.expert_size,
        config.num_experts,
        config.routing,
        layer_id=spec.layer_id,
        dtype=dtype,
        rngs=rngs,
    )


class Qwen3MoELayer(Qwen3Layer):
    """Qwen3's layer around experts."""

    mlp_type = sparse_or_dense_mlp


class Qwen3MoE(CausalDecoder):
    """The whole model."""

    layer_type = Qwen3MoELayer
    norm_type = RMSNorm

    @staticmethod
    def weight_map(config: Qwen3MoEConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""

        def mlp_rules(layer_id: int) -> Iterator[WeightRule]:
            here, there = ("layers", layer_id, "mlp"), f"model.layers.{layer_id}.mlp"
            if not config.sparse[layer_id]:
                return gated_mlp_rules(here, there, config.intermediate_size)
            return expert_rules(
                here,
                router=f"{there}.gate",
                experts=f"{there}.experts",
                hidden_size=config.hidden_size,
                expert_size=config.expert_size,
                num_experts=config.num_experts,
            )

        return decoder_rules(config, QWEN3_NORMS, mlp_rules)
