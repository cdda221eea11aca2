"""`ScoreRule`: what turns a product q.k into a masked score, shared by every attention kernel and its reference.

`softmax_with_sinks` is what the references then do with the scores.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int


@dataclasses.dataclass(frozen=True)
class ScoreRule:
    """Scale, soft cap and mask of one attention call; static, so each rule compiles its own program.

    Attributes:
        scale: factor on q.k.
        sliding_window: tokens a query sees, its own included; None sees every token before it.
        soft_cap: scaled scores become `soft_cap * tanh(score / soft_cap)`; None leaves them.

    Raises:
        ValueError: a window or soft cap that is not positive.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive or None, got {self.sliding_window}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"soft_cap must be positive or None, got {self.soft_cap}")

    def score(self, products: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Scaled and capped scores."""
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)

    def visible(self, query_positions: Int[Array, "*a"], key_positions: Int[Array, "*b"]) -> Bool[Array, "*c"]:
        """Which keys each query sees; the two shapes broadcast."""
        distance = query_positions - key_positions
        seen = distance >= 0
        return seen if self.sliding_window is None else seen & (distance < self.sliding_window)

    def first_visible(self, query_positions: Int[Array, "*a"]) -> Int[Array, "*a"]:
        """The lowest position that each query sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(query_positions)
        return jnp.maximum(query_positions - (self.sliding_window - 1), 0)


def softmax_with_sinks(
    scores: Float32[Array, "rows kv_heads group keys"], sinks: Float[Array, " heads"] | None
) -> Float32[Array, "rows kv_heads group keys"]:
    """Softmax over the keys; a query head's sink is one more logit in the denominator and has no weight of its own."""
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    column = sinks.astype(jnp.float32).reshape(*scores.shape[1:3], 1)
    column = jnp.broadcast_to(column, (*scores.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
