"""The gated feed-forward block of dense models."""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.linear import Linear


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product, gate's rows first."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: Callable[[Array], Array],
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation = activation
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(self.activation(gate) * up)
