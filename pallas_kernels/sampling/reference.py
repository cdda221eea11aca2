"""The truncation as its definition reads: every row is sorted."""

import jax.numpy as jnp
from jaxtyping import Array, Float32

from tokenspeed_jax.pallas_kernels.sampling.truncation import (
    Truncation,
    mass_scale,
    mass_target,
    mass_units,
    row_peak,
    scale_logits,
)


def truncation_cut_reference(logits: Float32[Array, "rows vocab"], truncation: Truncation) -> Float32[Array, " rows"]:
    """See `truncation_cut`."""
    vocab_size = logits.shape[1]
    falling = jnp.sort(logits, axis=-1, descending=True)
    k = jnp.where(truncation.top_k == 0, vocab_size, jnp.minimum(truncation.top_k, vocab_size))
    kept = falling >= jnp.take_along_axis(falling, k[:, None] - 1, axis=-1)
    scaled = scale_logits(falling, row_peak(logits), truncation.temperature)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)

    mass = jnp.cumsum(mass_units(weights, mass_scale(weights)), axis=-1)
    enough = mass >= mass_target(truncation.top_p, mass[:, -1])[:, None]
    last = jnp.where(enough.any(axis=-1), jnp.argmax(enough, axis=-1), vocab_size - 1)
    least = jnp.take_along_axis(weights, last[:, None], axis=-1)
    kept &= (weights >= least) | (truncation.top_p >= 1.0)[:, None]
    kept &= weights >= truncation.min_p[:, None]
    return jnp.min(jnp.where(kept, falling, jnp.inf), axis=-1)
