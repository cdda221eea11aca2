"""The definition of the linear layer, in float32 and one rounding."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.linear.activations import gate_function


@functools.partial(jax.jit, static_argnames=("gate",))
def linear_reference(
    x: Float[Array, "tokens in"], weight: Float[Array, "out in"], bias: Float[Array, " out"] | None, gate: str | None
) -> Float[Array, "tokens outputs"]:
    """See `linear`."""
    y = jnp.dot(x.astype(jnp.float32), weight.astype(jnp.float32).T, precision=lax.Precision.HIGHEST)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if gate is not None:
        half = weight.shape[0] // 2
        y = gate_function(gate)(y[:, :half]) * y[:, half:]
    return y.astype(x.dtype)
