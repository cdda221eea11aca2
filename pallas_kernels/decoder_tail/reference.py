"""A decoder layer after its attention, as the definition reads."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.linear.reference import linear_reference
from tokenspeed_jax.pallas_kernels.norm_rules import Norm


def decoder_tail_reference(
    x: Float[Array, "tokens hidden"],
    mixed: Float[Array, "tokens mixed"],
    out_weight: Float[Array, "hidden mixed"],
    norm: Norm,
    gate_up: Float[Array, "gates hidden"],
    down: Float[Array, "hidden inner"],
    activation: str,
) -> Float[Array, "tokens hidden"]:
    """See `decoder_tail`; in float32 from end to end, rounded once."""
    x, mixed, out_weight, gate_up, down = (a.astype(jnp.float32) for a in (x, mixed, out_weight, gate_up, down))
    total = x + linear_reference(mixed, out_weight, None, None)
    normed = Norm(norm.weight.astype(jnp.float32), norm.rule)(total)
    return total + linear_reference(linear_reference(normed, gate_up, None, activation), down, None, None)
