"""The linear layer as XLA's products: any platform, any number of tokens."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.linear.activations import gate_function


def linear_xla(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], bias: Float[Array, " out"] | None, gate: str | None
) -> Float[Array, "tokens outputs"]:
    """See `linear`."""
    y = jnp.einsum("ti,oi->to", x, weight)
    if bias is not None:
        y = y + bias
    if gate is not None:
        left, right = jnp.split(y, 2, axis=-1)
        y = gate_function(gate)(left) * right
    return y
