"""`Truncation`, which tokens of a row may be drawn, and the weights that its rules speak of."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

MAX_VOCAB = 2**19 - 1
"""Largest vocabulary whose masses fit the integer sums."""

LIMB = 13  # bits; (2**LIMB) * MAX_VOCAB must stay below 2**32
MASS_BITS = 30  # a row's mass is between 2**MASS_BITS and twice that


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Truncation:
    """The limits of each row, as `SamplingParams` names them.

    Attributes:
        temperature: positive.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.
    """

    temperature: Float32[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float32[Array, " rows"]
    min_p: Float32[Array, " rows"]


def row_peak(logits: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """The highest logit of each row; 0 where it is infinite, as in a row whose every token is masked."""
    peak = jnp.max(logits, axis=-1)
    return jnp.where(jnp.isfinite(peak), peak, 0.0)


def scale_logits(
    logits: Float32[Array, "rows vocab"], peak: Float32[Array, " rows"], temperature: Float32[Array, " rows"]
) -> Float32[Array, "rows vocab"]:
    """Logits under the temperature, the highest at 0.

    The peak is taken off first: a division by a tiny temperature may then only underflow.
    """
    return (logits - peak[:, None]) / temperature[:, None]


def kept_logprob(
    logits: Float32[Array, "rows vocab"],
    token: Int32[Array, " rows"],
    peak: Float32[Array, " rows"],
    truncation: Truncation,
    mass: Float32[Array, " rows"],
) -> Float32[Array, " rows"]:
    """A token's log-probability where the kept tokens' weights add up to `mass`."""
    scaled = scale_logits(jnp.take_along_axis(logits, token[:, None], axis=-1), peak, truncation.temperature)[:, 0]
    return scaled - jnp.log(jnp.maximum(mass, jnp.finfo(jnp.float32).tiny))


def mass_scale(weights: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """A power of two that brings each row's total to [2**30, 2**31), the same for every order of summation."""
    unit = float(1 << LIMB)
    rest = weights * unit
    high = jnp.floor(rest)
    low = jnp.floor((rest - high) * unit)
    high_sum = jnp.sum(high.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    low_sum = jnp.sum(low.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    total = high_sum + (low_sum >> LIMB)  # in units of 1 / unit, rounded down
    exponent = 31 - lax.clz(jnp.maximum(total, 1)).astype(jnp.int32)
    return jnp.ldexp(jnp.float32(1.0), MASS_BITS + LIMB - exponent)


def mass_units(weights: Float32[Array, "rows vocab"], scale: Float32[Array, " rows"]) -> UInt32[Array, "rows vocab"]:
    """Weights as integers, whose sums depend on no order."""
    return jnp.round(weights * scale[:, None]).astype(jnp.uint32)


def mass_target(top_p: Float32[Array, " rows"], total: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
    """The mass that a nucleus has to reach, of a row's total."""
    return jnp.ceil(top_p * total.astype(jnp.float32)).astype(jnp.uint32)
