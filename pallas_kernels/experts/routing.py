"""Which experts a token goes to, and with which weights: the router recipes of model-families.md, section 1.4."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

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
    logits: Float[Array, "tokens experts"], rule: RoutingRule, bias: Float[Array, " experts"] | None = None
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """Each token's experts, best first and ties to the lower index, and their weights, in float32.

    Args:
        logits: float32, or exact enough that rounding does not change the choice.
        bias: added to the scores for the selection alone; with `sigmoid` only.

    Returns:
        Expert ids, int32 `[tokens, top_k]`, distinct within a row, and weights, float32 `[tokens, top_k]`.

    Raises:
        ValueError: a rule that cannot choose among so many experts, or a bias that does not fit.
    """
    scores = expert_scores(logits, rule)
    expert_ids = best_experts(scores, rule, bias)
    return expert_ids, expert_weights(scores, expert_ids, rule)


def expert_scores(logits: Float[Array, "tokens experts"], rule: RoutingRule) -> Float[Array, "tokens experts"]:
    """What experts are ranked by and weighted with, in float32."""
    logits = logits.astype(jnp.float32)
    match rule.scores:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "softmax_topk":
            return logits
        case "sigmoid":
            return jax.nn.sigmoid(logits)


def best_experts(
    scores: Float[Array, "tokens experts"], rule: RoutingRule, bias: Float[Array, " experts"] | None = None
) -> Int[Array, "tokens top_k"]:
    """The experts that `route` chooses; raises as it does."""
    rule.check_experts(scores.shape[-1])
    if bias is not None and (rule.scores != "sigmoid" or bias.shape != scores.shape[-1:]):
        raise ValueError(f"a selection bias goes with sigmoid scores, one per expert; got {rule.scores}, {bias.shape}")
    ranked = scores if bias is None else scores + bias.astype(jnp.float32)
    return lax.top_k(_in_best_groups(ranked, rule), rule.top_k)[1].astype(jnp.int32)


def expert_weights(
    scores: Float[Array, "tokens experts"], expert_ids: Int[Array, "tokens top_k"], rule: RoutingRule
) -> Float[Array, "tokens top_k"]:
    """The weights that `route` gives to a token's experts, whoever chose them."""
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
