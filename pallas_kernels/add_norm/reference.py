"""The residual sum and the norm after it, as the definition reads."""

from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.norm_rules import Norm


def add_norm_reference(
    x: Float[Array, "tokens dim"], update: Float[Array, "tokens dim"], norm: Norm
) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens dim"]]:
    """See `add_norm`."""
    total = x + update
    return total, norm(total)
