"""The truncation without sorting, for every device.

The k-th largest logit, and the weight at which a nucleus reaches its mass, are found digit by digit: a float's bits,
made order-preserving, are a 32-bit number, and counting how many values of the next digit still have enough of the row
at or above them, from the highest digit down, yields the exact threshold in 16 sweeps over the row.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from tokenspeed_jax.pallas_kernels.sampling.noise import gumbel_noise
from tokenspeed_jax.pallas_kernels.sampling.truncation import (
    Truncation,
    kept_logprob,
    mass_scale,
    mass_target,
    mass_units,
    row_peak,
    scale_logits,
)

_DIGIT_BITS = 2  # a sweep reads the row once for the three comparisons of a digit


def truncation_cut_xla(logits: Float32[Array, "rows vocab"], truncation: Truncation) -> Float32[Array, " rows"]:
    """See `truncation_cut`."""
    # Ranks are taken before the temperature, which keeps the order but may round neighbours together.
    kept = in_top_k(logits, truncation.top_k)
    scaled = scale_logits(logits, row_peak(logits), truncation.temperature)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    kept &= in_top_p(weights, truncation.top_p) & (weights >= truncation.min_p[:, None])
    return jnp.min(jnp.where(kept, logits, jnp.inf), axis=-1)


def draw_above(
    cut: Float32[Array, " rows"],
    logits: Float32[Array, "rows vocab"],
    truncation: Truncation,
    is_greedy: Bool[Array, " rows"],
    seed: UInt32[Array, "rows 2"],
    output_index: Int32[Array, " rows"],
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """`draw` among the logits that are no less than a cut."""
    peak = row_peak(logits)
    scaled = scale_logits(logits, peak, truncation.temperature)
    kept = logits >= cut[:, None]
    noise = gumbel_noise(seed, output_index, logits.shape[1])
    drawn = jnp.argmax(jnp.where(kept, scaled + noise, -jnp.inf), axis=-1)
    token = jnp.where(is_greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)
    mass = jnp.sum(jnp.where(kept, jnp.exp(scaled), 0.0), axis=-1)
    return token, kept_logprob(logits, token, peak, truncation, mass)


def in_top_k(values: Float32[Array, "rows vocab"], top_k: Int32[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    """Which values are no less than the row's k-th largest; all for k = 0."""
    vocab_size = values.shape[1]
    k = jnp.where(top_k == 0, vocab_size, jnp.minimum(top_k, vocab_size)).astype(jnp.uint32)
    keys = _ordered_bits(values)
    kth = _highest_key(lambda key: jnp.sum(keys >= key[:, None], axis=-1, dtype=jnp.uint32) >= k, top_k.shape)
    return keys >= kth[:, None]


def in_top_p(weights: Float32[Array, "rows vocab"], top_p: Float32[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    """Which weights (in [0, 1]) are no less than the one at which the row's largest reach the share p of all.

    Weights are summed as integers, in units of which a row's total is between 2**30 and 2**31.
    """
    keys = lax.bitcast_convert_type(weights, jnp.uint32)  # the bits of floats >= 0 are in order as they are
    scale = mass_scale(weights)

    def mass(key: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        units = mass_units(weights, scale)
        return jnp.sum(jnp.where(keys >= key[:, None], units, 0), axis=-1, dtype=jnp.uint32)

    target = mass_target(top_p, mass(jnp.zeros(top_p.shape, jnp.uint32)))
    least = _highest_key(lambda key: mass(key) >= target, top_p.shape)
    return (keys >= least[:, None]) | (top_p >= 1.0)[:, None]


def _ordered_bits(values: Float32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned numbers in the order of the floats; the two zeros are one number."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign > 0, ~bits, bits | sign)


def _highest_key(
    reaches: Callable[[UInt32[Array, " rows"]], Bool[Array, " rows"]], shape: tuple[int, ...]
) -> UInt32[Array, " rows"]:
    """The highest number that `reaches`, which must hold at 0 and fail above where it first fails.

    Found digit by digit from the highest. As all digits below the right one reach too, their number is the digit.
    """

    def set_digit(step: Int32[Array, ""], key: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        shift = (32 - _DIGIT_BITS * (step + 1)).astype(jnp.uint32)
        candidates = [key | (jnp.uint32(digit) << shift) for digit in range(1, 1 << _DIGIT_BITS)]
        digit = sum((reaches(candidate).astype(jnp.uint32) for candidate in candidates), jnp.uint32(0))
        return key | (digit << shift)

    # Fixed bounds: a loop whose length the device decides would make the host wait for every sweep.
    return lax.fori_loop(0, 32 // _DIGIT_BITS, set_digit, jnp.zeros(shape, jnp.uint32))
