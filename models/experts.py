"""The mixture-of-experts block: a router, and experts of which each token takes a few."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionStep
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.linear import normal_weight
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, same, stacked
from tokenspeed_jax.pallas_kernels.experts import (
    Activation,
    RoutingRule,
    best_experts,
    expert_mlp,
    expert_scores,
    expert_weights,
)


class Router(nnx.Module):
    """x W^T (+ b) in float32: rounding must not change which experts are best."""

    def __init__(
        self, hidden_size: int, num_experts: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.weight = normal_weight((num_experts, hidden_size), dtype, rngs)  # [experts, hidden]
        self.bias = nnx.Param(jnp.zeros((num_experts,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens experts"]:
        logits = jnp.einsum(
            "th,eh->te", x, self.weight[...], precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)


class Experts(nnx.Module):
    """All experts of a layer, stacked; gate's rows come before up's."""

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        *,
        bias: bool,
        activation: Activation,
        alpha: float | None,
        limit: float | None,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation: Activation = activation
        self.alpha = alpha
        self.limit = limit
        self.gate_up = normal_weight((num_experts, 2 * expert_size, hidden_size), dtype, rngs)
        self.down = normal_weight((num_experts, hidden_size, expert_size), dtype, rngs)
        self.gate_up_bias = nnx.Param(jnp.zeros((num_experts, 2 * expert_size), dtype)) if bias else None
        self.down_bias = nnx.Param(jnp.zeros((num_experts, hidden_size), dtype)) if bias else None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        expert_ids: Int[Array, "tokens top_k"],
        weights: Float[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        return expert_mlp(
            x,
            self.gate_up[...],
            self.down[...],
            expert_ids,
            weights,
            activation=self.activation,
            gate_up_bias=None if self.gate_up_bias is None else self.gate_up_bias[...],
            down_bias=None if self.down_bias is None else self.down_bias[...],
            alpha=self.alpha,
            limit=self.limit,
        )


class SparseMLP(nnx.Module):
    """Each token through the experts that its router chooses.

    Args:
        expert_size: inner channels of one expert.
        layer_id: position of the layer in the model, from 0.
        selection_bias: a float32 bias per expert that shifts the selection alone.
        router_bias, expert_bias: biases of the router's and of the experts' products.
        activation, alpha, limit: see `GatedActivation`.
        router_dtype: of the router's parameters; None takes `dtype`. Products are float32 in any case.
    """

    def __init__(
        self,
        hidden_size: int,
        expert_size: int,
        num_experts: int,
        rule: RoutingRule,
        *,
        layer_id: int,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
        selection_bias: bool = False,
        router_bias: bool = False,
        expert_bias: bool = False,
        activation: Activation = "swiglu",
        alpha: float | None = None,
        limit: float | None = None,
        router_dtype: DTypeLike | None = None,
    ) -> None:
        rule.check_experts(num_experts)
        self.rule = rule
        self.layer_id = layer_id
        self.router = Router(
            hidden_size, num_experts, bias=router_bias, dtype=dtype if router_dtype is None else router_dtype, rngs=rngs
        )
        self.selection_bias = nnx.Param(jnp.zeros((num_experts,), jnp.float32)) if selection_bias else None
        self.experts = Experts(
            hidden_size,
            expert_size,
            num_experts,
            bias=expert_bias,
            activation=activation,
            alpha=alpha,
            limit=limit,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self, x: Float[Array, "tokens hidden"], step: AttentionStep | None = None
    ) -> Float[Array, "tokens hidden"]:
        """Of the router's experts, or of those that the step has instead; None has none instead."""
        bias = None if self.selection_bias is None else self.selection_bias[...]
        scores = expert_scores(self.router(x), self.rule)
        expert_ids = best_experts(scores, self.rule, bias)
        if step is not None:
            expert_ids = step.routed(expert_ids, self.layer_id)
        return self.experts(x, expert_ids, expert_weights(scores, expert_ids, self.rule))


def expert_layer_ids(model: Any) -> tuple[int, ...]:
    """Which layers of a module have experts, in order: what the axis of layers of routed-expert ids stands for."""
    return tuple(sorted(module.layer_id for _, module in nnx.iter_modules(model) if isinstance(module, SparseMLP)))


def routing_rule(num_experts: int, top_k: int, **fields: Any) -> RoutingRule:
    """The rule that a `config.json` describes; raises `UnsupportedConfig` where it cannot choose among its experts."""
    try:
        rule = RoutingRule(top_k, **fields)
        rule.check_experts(num_experts)
    except ValueError as error:
        raise UnsupportedConfig(f"config.json: num_experts_per_tok = {top_k} and what goes with it: {error}") from error
    return rule


def expert_rules(
    parameter: tuple[str | int, ...],
    *,
    router: str,
    experts: str,
    hidden_size: int,
    expert_size: int,
    num_experts: int,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    selection_bias: str | None = None,
    router_bias: bool = False,
) -> Iterator[WeightRule]:
    """The rules of a `SparseMLP` without expert biases whose checkpoint has one tensor per expert and projection.

    Args:
        parameter: path of the `SparseMLP`.
        router: tensor name of the router, without ".weight".
        experts: what stands before ".{expert}.{projection}.weight".
        projections: names of the gate, up and down projections.
        selection_bias: whole tensor name; None without one.
    """
    gate, up, down = projections
    yield from linear_rules((*parameter, "router"), router, bias=router_bias)
    if selection_bias is not None:
        yield same((*parameter, "selection_bias"), selection_bias)
    yield stacked(
        (*parameter, "experts", "gate_up"),
        [(f"{experts}.{e}.{gate}.weight", f"{experts}.{e}.{up}.weight") for e in range(num_experts)],
        [(expert_size, hidden_size)] * 2,
    )
    yield stacked(
        (*parameter, "experts", "down"),
        [(f"{experts}.{e}.{down}.weight",) for e in range(num_experts)],
        [(hidden_size, expert_size)],
    )
