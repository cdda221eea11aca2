"""Which experts a token goes to, and with which weights: the router recipes of model-families.md, section 1.4."""

import dataclasses
import functools
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.experts.selection import select_mosaic, selection_refusal
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)

ExpertScores = Literal["softmax", "softmax_topk", "sigmoid"]

_TINY = 1e-20  # keeps the division finite where every selected score is 0


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """How a token's logits choose its experts.

    Attributes:
        top_k: experts per token.
        scores: `softmax` over all experts (R1), `softmax_topk` over the selected ones (R2, always renormalised), or
            `sigmoid` of each, whose selection a bias may shift (R3).
        renormalize: divide the selected scores by their sum.
        scale: factor on the weights, after that.
        num_groups: the experts form this many groups of neighbours, and only those in the best `top_groups` can be
            selected; a group's score is the sum of its two best experts' scores.
    """

    top_k: int
    scores: ExpertScores = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.scores not in get_args(ExpertScores):
            raise ValueError(f"scores must be one of {get_args(ExpertScores)}, got {self.scores!r}")
        if self.scores == "softmax_topk" and not self.renormalize:
            raise ValueError("a softmax over the selected experts is normalised; renormalize=False contradicts it")
        if self.top_k <= 0:
            raise ValueError(f"top_k must be positive, got {self.top_k}")
        if not 0 < self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups {self.top_groups} must lie in 1..num_groups {self.num_groups}")

    def check_experts(self, num_experts: int) -> None:
        """Raises ValueError where the rule cannot choose among `num_experts`."""
        if num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts do not form {self.num_groups} equal groups")
        group = num_experts // self.num_groups
        if self.num_groups > 1 and group < 2:
            raise ValueError(f"groups of {group} expert have no two best scores")
        if self.top_k > self.top_groups * group:
            raise ValueError(f"top_k {self.top_k} exceeds the {self.top_groups * group} experts that can be selected")


def route(
    logits: Float[Array, "tokens experts"],
    rule: RoutingRule,
    bias: Float[Array, " experts"] | None = None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Each token's experts, best first and ties to the lower index, and their weights, in float32.

    Args:
        logits: float32, or exact enough that rounding does not change the choice.
        bias: added to the scores for the selection alone; with `sigmoid` only.
        implementation: None takes the fastest that serves the call; `reference` is `xla`.

    Returns:
        Expert ids, int32 `[tokens, top_k]`, distinct within a row, and weights, float32 `[tokens, top_k]`.

    Raises:
        ValueError: a rule that cannot choose among so many experts, or a bias that does not fit; an implementation that
            is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    rule.check_experts(logits.shape[-1])
    if bias is not None and (rule.scores != "sigmoid" or bias.shape != logits.shape[-1:]):
        raise ValueError(f"a selection bias goes with sigmoid scores, one per expert; got {rule.scores}, {bias.shape}")
    logits = logits.astype(jnp.float32)
    if choose_implementation(implementation, routing_refusal(rule, logits.shape[-1])) == "mosaic":
        return route_mosaic(logits, rule)
    ranked = jax.nn.sigmoid(logits) if rule.scores == "sigmoid" else logits  # a softmax keeps the order
    if bias is not None:
        ranked = ranked + bias.astype(jnp.float32)
    _, expert_ids = lax.top_k(_in_best_groups(ranked, rule), rule.top_k)
    return expert_ids.astype(jnp.int32), _weights(logits, expert_ids, rule)


def routing_refusal(rule: RoutingRule, num_experts: int) -> str | None:
    """Why the kernel for Hopper GPUs cannot follow this rule on the default device; None when it can."""
    if rule.scores == "sigmoid":
        return "sigmoid scores are left to XLA"
    if rule.num_groups != rule.top_groups:
        return "the choice of groups is left to XLA"
    return hopper_refusal() or selection_refusal(num_experts)


def route_mosaic(
    logits: Float[Array, "tokens experts"], rule: RoutingRule, *, interpret: Any = None
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """See `route`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU. Gradients are those of the portable form."""
    return _route_mosaic(rule, interpret, logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _route_mosaic(rule: RoutingRule, interpret: Any, logits: Float[Array, "tokens experts"]) -> tuple[Array, Array]:
    ids, weights = select_mosaic(
        logits, rule.top_k, over_all=rule.scores == "softmax", renormalize=rule.renormalize, interpret=interpret
    )
    return ids, weights if rule.scale == 1 else weights * rule.scale


def _forward(rule: RoutingRule, interpret: Any, logits: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    ids, weights = _route_mosaic(rule, interpret, logits)
    return (ids, weights), (logits, ids)


def _backward(rule: RoutingRule, interpret: Any, saved: tuple[Array, Array], gradients: Any) -> tuple[Array]:
    del interpret
    logits, ids = saved
    _, pull = jax.vjp(lambda logits: _weights(logits, ids, rule), logits)
    return pull(gradients[1])


_route_mosaic.defvjp(_forward, _backward)


def _weights(
    logits: Float[Array, "tokens experts"], expert_ids: Int[Array, "tokens top_k"], rule: RoutingRule
) -> Float[Array, "tokens top_k"]:
    """Of experts that were chosen."""
    match rule.scores:
        case "softmax":
            scores = jax.nn.softmax(logits, axis=-1)
        case "softmax_topk":
            scores = logits
        case "sigmoid":
            scores = jax.nn.sigmoid(logits)
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    if rule.scores == "softmax_topk":
        weights = jax.nn.softmax(weights, axis=-1)
    elif rule.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + _TINY)
    return weights * rule.scale


def _in_best_groups(ranked: Float[Array, "tokens experts"], rule: RoutingRule) -> Float[Array, "tokens experts"]:
    """The scores, with -inf outside each token's best groups."""
    if rule.num_groups == rule.top_groups:
        return ranked
    grouped = ranked.reshape(ranked.shape[0], rule.num_groups, -1)
    group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, kept = lax.top_k(group_scores, rule.top_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(rule.num_groups), axis=1)
    return jnp.where(is_kept[:, :, None], grouped, -jnp.inf).reshape(ranked.shape)
