"""The gated activations between an expert's two products (model-families.md 1.5)."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Activation = Literal["swiglu", "swiglu_oai"]


@dataclasses.dataclass(frozen=True)
class GatedActivation:
    """f(gate, up), elementwise, in float32.

    `swiglu` is silu(gate) * up; `swiglu_oai`, gpt-oss's, is gate * sigmoid(alpha * gate) * (up + 1).

    Attributes:
        alpha: of `swiglu_oai`, which needs it.
        limit: bounds gate from above and up on both sides, before anything else; None leaves them.
    """

    kind: Activation
    alpha: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Activation):
            raise ValueError(f"activation must be one of {get_args(Activation)}, got {self.kind!r}")
        if (self.kind == "swiglu_oai") != (self.alpha is not None):
            raise ValueError(f"alpha goes with swiglu_oai; got {self.kind} with alpha={self.alpha}")
        if self.limit is not None and self.limit <= 0:
            raise ValueError(f"limit must be positive, got {self.limit}")

    def __call__(self, gate: Float[Array, "..."], up: Float[Array, "..."]) -> Float[Array, "..."]:
        """Applies it; both arguments are float32."""
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        if self.alpha is None:
            return gate * jax.nn.sigmoid(gate) * up
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1.0)
