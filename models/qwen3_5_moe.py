"""Qwen3.5 with experts: Qwen3-Next's blocks, stored otherwise. Hugging Face `Qwen3_5MoeForCausalLM`.

Released checkpoints are `Qwen3_5MoeForConditionalGeneration`, see `models.qwen3_5`; they have the experts of a layer
in two tensors, where checkpoints of text alone have three for each expert.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Self

from tokenspeed_jax.models.decoder import CausalDecoder
from tokenspeed_jax.models.experts import routing_rule
from tokenspeed_jax.models.norms import GemmaRMSNorm
from tokenspeed_jax.models.qwen3_5 import (
    delta_net_hybrid_fields,
    delta_net_hybrid_rules,
    ignored_qwen_tensors,
    split_projection_rules,
    text_config,
)
from tokenspeed_jax.models.qwen3_moe import expert_count
from tokenspeed_jax.models.qwen3_next import (
    Qwen3NextConfig,
    Qwen3NextLayer,
    expert_tensor_rules,
    gated_shared_rules,
)
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, same


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5MoEConfig(Qwen3NextConfig):
    """No layer is dense."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config, multimodal = text_config(hf)
        config.refuse_unless("norm_topk_prob", True, True)
        config.refuse_unless("decoder_sparse_step", 1, 1)
        config.refuse_unless("mlp_only_layers", [], [])
        expert_size = config.integer("moe_intermediate_size", 512)
        fields = delta_net_hybrid_fields(config, kv_heads=2, intermediate_size=expert_size)
        num_experts = expert_count(config, default=256)
        return cls(
            **fields,
            multimodal=multimodal,
            num_experts=num_experts,
            expert_size=expert_size,
            shared_size=config.integer("shared_expert_intermediate_size", 512),
            routing=routing_rule(num_experts, config.integer("num_experts_per_tok", 8), renormalize=True),
            sparse=(True,) * fields["num_layers"],
        )


class Qwen3_5MoE(CausalDecoder):
    """The whole model."""

    layer_type = Qwen3NextLayer
    norm_type = GemmaRMSNorm
    ignored_tensors = staticmethod(ignored_qwen_tensors)

    @staticmethod
    def weight_map(config: Qwen3_5MoEConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        routed_rules = _stacked_expert_rules if config.multimodal else expert_tensor_rules(config)
        return delta_net_hybrid_rules(config, split_projection_rules, gated_shared_rules(config, routed_rules))


def _stacked_expert_rules(here: tuple[str | int, ...], there: str) -> Iterator[WeightRule]:
    """The rules of a `SparseMLP` whose experts stand in the checkpoint as they do in the model."""
    yield from linear_rules((*here, "router"), f"{there}.gate", bias=False)
    yield same((*here, "experts", "gate_up"), f"{there}.experts.gate_up_proj")
    yield same((*here, "experts", "down"), f"{there}.experts.down_proj")
