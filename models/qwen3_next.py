"""Qwen3-Next: Qwen3.5's layers around experts, one of which every token takes. Hugging Face `Qwen3NextForCausalLM`."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep, LayerSpec
from tokenspeed_jax.models.decoder import CausalDecoder
from tokenspeed_jax.models.experts import SparseMLP, expert_rules, routing_rule
from tokenspeed_jax.models.gated_delta_net import DeltaNetShape
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Linear
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import GemmaRMSNorm
from tokenspeed_jax.models.qwen3_5 import (
    Qwen3_5Config,
    Qwen3_5Layer,
    delta_net_hybrid_fields,
    delta_net_hybrid_rules,
    ignored_qwen_tensors,
)
from tokenspeed_jax.models.qwen3_moe import expert_count, sparse_layers
from tokenspeed_jax.models.weight_map import WeightRule, gated_mlp_rules, linear_rules, reordered
from tokenspeed_jax.pallas_kernels.experts import RoutingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen3_5Config):
    """Some layers may be dense.

    Attributes:
        intermediate_size: inner channels of the dense layers.
        expert_size: inner channels of one expert.
        shared_size: inner channels of the expert that every token takes.
        sparse: per layer, whether its block is a mixture of experts.
    """

    num_experts: int
    expert_size: int
    shared_size: int
    routing: RoutingRule
    sparse: tuple[bool, ...]

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        fields = delta_net_hybrid_fields(config, kv_heads=2, intermediate_size=5632)
        num_experts = expert_count(config, default=512)
        return cls(
            **fields,
            num_experts=num_experts,
            expert_size=config.integer("moe_intermediate_size", 512),
            shared_size=config.integer("shared_expert_intermediate_size", 512),
            routing=routing_rule(
                num_experts,
                config.integer("num_experts_per_tok", 10),
                renormalize=config.flag("norm_topk_prob", True),
            ),
            sparse=sparse_layers(config, fields["num_layers"]),
        )


class GatedSharedMLP(nnx.Module):
    """The experts that the router picks for a token, plus one that every token takes as far as its gate opens."""

    def __init__(self, config: Qwen3NextConfig, layer_id: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim = config.hidden_size
        self.routed = SparseMLP(
            dim,
            config.expert_size,
            config.num_experts,
            config.routing,
            layer_id=layer_id,
            dtype=dtype,
            rngs=rngs,
        )
        self.shared = GatedMLP(dim, config.shared_size, "silu", dtype=dtype, rngs=rngs)
        self.shared_gate = Linear(dim, 1, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], step: AttentionStep | None = None
    ) -> Float[Array, "tokens hidden"]:
        gate = jax.nn.sigmoid(self.shared_gate(x).astype(jnp.float32))
        return self.routed(x, step) + (gate * self.shared(x)).astype(x.dtype)


def shared_or_dense_mlp(
    config: Qwen3NextConfig, spec: LayerSpec, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> GatedSharedMLP | GatedMLP:
    """A layer's feed-forward block."""
    if config.sparse[spec.layer_id]:
        return GatedSharedMLP(config, spec.layer_id, dtype=dtype, rngs=rngs)
    return GatedMLP(config.hidden_size, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)


class Qwen3NextLayer(Qwen3_5Layer):
    """Qwen3.5's layer around experts."""

    mlp_type = shared_or_dense_mlp


class Qwen3Next(CausalDecoder):
    """The whole model."""

    layer_type = Qwen3NextLayer
    norm_type = GemmaRMSNorm
    ignored_tensors = staticmethod(ignored_qwen_tensors)

    @staticmethod
    def weight_map(config: Qwen3NextConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return delta_net_hybrid_rules(
            config, grouped_projection_rules, gated_shared_rules(config, expert_tensor_rules(config))
        )


def expert_tensor_rules(config: Qwen3NextConfig) -> Callable[[tuple[str | int, ...], str], Iterator[WeightRule]]:
    """The rules of a `SparseMLP` with one tensor per expert and projection."""

    def rules(here: tuple[str | int, ...], there: str) -> Iterator[WeightRule]:
        return expert_rules(
            here,
            router=f"{there}.gate",
            experts=f"{there}.experts",
            hidden_size=config.hidden_size,
            expert_size=config.expert_size,
            num_experts=config.num_experts,
        )

    return rules


def gated_shared_rules(
    config: Qwen3NextConfig, routed_rules: Callable[[tuple[str | int, ...], str], Iterable[WeightRule]]
) -> Callable[[int], Iterator[WeightRule]]:
    """Rules of a layer's feed-forward block by layer id; `routed_rules` are those of its `SparseMLP`."""

    def rules(layer_id: int) -> Iterator[WeightRule]:
        here, there = ("layers", layer_id, "mlp"), f"model.layers.{layer_id}.mlp"
        if not config.sparse[layer_id]:
            yield from gated_mlp_rules(here, there, config.intermediate_size)
            return
        yield from routed_rules((*here, "routed"), there)
        yield from gated_mlp_rules((*here, "shared"), f"{there}.shared_expert", config.shared_size)
        yield from linear_rules((*here, "shared_gate"), f"{there}.shared_expert_gate", bias=False)

    return rules


def grouped_projection_rules(
    here: tuple[str | int, ...], there: str, hidden_size: int, shape: DeltaNetShape
) -> Iterator[WeightRule]:
    """`GatedDeltaNet.proj` of two tensors with rows by key head: q, k, v, z of each in one, b, a in the other."""
    group, key, value = shape.key_heads, shape.key_dim, shape.value_rows // shape.key_heads
    heads = shape.value_heads // group
    qkvz, ba = group * (2 * key + 2 * value), group * 2 * heads
    sides = np.split(np.arange(qkvz).reshape(group, -1), np.cumsum([key, key, value]), axis=1)
    sides += np.split(np.arange(qkvz, qkvz + ba).reshape(group, -1), 2, axis=1)
    yield reordered(
        (*here, "proj", "weight"),
        (f"{there}.in_proj_qkvz.weight", f"{there}.in_proj_ba.weight"),
        (qkvz, ba),
        np.concatenate([side.ravel() for side in sides]),
        (hidden_size,),
    )
