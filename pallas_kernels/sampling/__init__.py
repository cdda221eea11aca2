"""What drawing a token takes of the whole vocabulary: which tokens may be drawn, and every token's noise."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.sampling.mosaic import MOST_VOCAB, SPAN, truncation_cut_mosaic
from tokenspeed_jax.pallas_kernels.sampling.noise import gumbel_noise
from tokenspeed_jax.pallas_kernels.sampling.reference import truncation_cut_reference
from tokenspeed_jax.pallas_kernels.sampling.truncation import MAX_VOCAB, Truncation, row_peak, scale_logits
from tokenspeed_jax.pallas_kernels.sampling.xla import truncation_cut_xla

__all__ = [
    "MAX_VOCAB",
    "Truncation",
    "gumbel_noise",
    "mosaic_refusal",
    "row_peak",
    "scale_logits",
    "truncation_cut",
]


def mosaic_refusal(vocab_size: int) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve a vocabulary on the default device; None when it can."""
    if vocab_size % SPAN or not 0 < vocab_size <= MOST_VOCAB:
        return f"a vocabulary of {vocab_size} is no multiple of {SPAN} up to {MOST_VOCAB}"
    return hopper_refusal()


def truncation_cut(
    logits: Float32[Array, "rows vocab"], truncation: Truncation, *, implementation: Implementation | None = None
) -> Float32[Array, " rows"]:
    """What top-k, top-p and min-p leave of each row, in this order: the logits that are no less than the row's cut.

    - top-k leaves the logits that are no less than the k-th largest.
    - A token's weight is exp((logit - peak) / temperature), 0 where top-k dropped it. top-p leaves the weights that are
      no less than the one at which the largest, added up, reach the share p. They are added as integers, in units of
      which a row's total is between 2**30 and 2**31, so that no order of summation changes the result.
    - min-p leaves the weights that are no less than min_p; the highest weighs 1.

    The implementations agree where their exponentials do. What they say of a row whose every token is -inf means
    nothing; no logit may be NaN or infinity.

    Args:
        implementation: None takes the fastest that serves the call.

    Returns:
        The least logit that stays in each row, or -inf where all do; infinity where none does.

    Raises:
        ValueError: shapes or dtypes that do not fit, a vocabulary above `MAX_VOCAB`; an implementation that is unknown
            or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be a float32 matrix, got {logits.dtype}{list(logits.shape)}")
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"the sampler takes vocabularies up to {MAX_VOCAB}, got {logits.shape[1]}")
    for limit in jax.tree.leaves(truncation):
        if limit.shape != logits.shape[:1]:
            raise ValueError(f"limits of shape {limit.shape} do not fit {logits.shape[0]} rows")
    refusal = mosaic_refusal(logits.shape[1]) if logits.size else "there are no rows"
    implementation = choose_implementation(implementation, refusal)
    function = {"mosaic": truncation_cut_mosaic, "reference": truncation_cut_reference}.get(
        implementation, truncation_cut_xla
    )
    with jax.named_scope("truncation_cut"):
        return function(logits, truncation)
