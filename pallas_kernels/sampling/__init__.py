"""What drawing a token takes of the whole vocabulary: which tokens may be drawn, and every token's noise."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.sampling.draw_mosaic import GROUP, draw_mosaic
from tokenspeed_jax.pallas_kernels.sampling.mosaic import MOST_VOCAB, SPAN, truncation_cut_mosaic
from tokenspeed_jax.pallas_kernels.sampling.noise import gumbel_noise
from tokenspeed_jax.pallas_kernels.sampling.reference import truncation_cut_reference
from tokenspeed_jax.pallas_kernels.sampling.truncation import MAX_VOCAB, Truncation
from tokenspeed_jax.pallas_kernels.sampling.xla import draw_above, truncation_cut_xla

ORDER: tuple[Implementation, ...] = ("xla", "mosaic")
"""The kernels are taken where a call names them: on a GPU they have been timed, but their draws not yet compared."""

__all__ = [
    "MAX_VOCAB",
    "Truncation",
    "draw",
    "gumbel_noise",
    "mosaic_refusal",
    "truncation_cut",
]


def mosaic_refusal(vocab_size: int) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve a vocabulary on the default device; None when it can."""
    if vocab_size % SPAN or not GROUP <= vocab_size <= MOST_VOCAB:
        return f"a vocabulary of {vocab_size} is no multiple of {SPAN} from {GROUP} to {MOST_VOCAB}"
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
        implementation: None takes the first of `ORDER` that serves the call.

    Returns:
        The least logit that stays in each row, or -inf where all do; infinity where none does.

    Raises:
        ValueError: shapes or dtypes that do not fit, a vocabulary above `MAX_VOCAB`; an implementation that is unknown
            or, with the reason, cannot serve.
    """
    function = {"reference": truncation_cut_reference, "xla": truncation_cut_xla, "mosaic": truncation_cut_mosaic}[
        _choose(implementation, logits, truncation)
    ]
    with jax.named_scope("truncation_cut"):
        return function(logits, truncation)


def draw(
    logits: Float32[Array, "rows vocab"],
    truncation: Truncation,
    is_greedy: Bool[Array, " rows"],
    seed: UInt32[Array, "rows 2"],
    output_index: Int32[Array, " rows"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """One token of each row, of those that `truncation_cut` leaves: the highest sum of logit / temperature and noise.

    Noise is standard Gumbel noise, a function of seed, output index and token alone, of the bits of `jax.random`; the
    implementations may differ in its last bits. Greedy rows draw their highest logit. Of equals the lowest id is
    drawn, and id 0 from a row whose every token is -inf.

    Args:
        is_greedy: rows without noise, whose limits say nothing; their temperature must be positive all the same.
        seed: high and low word of each row's 63-bit seed.
        output_index: tokens that the row's sample generated before.

    Returns:
        The tokens, and their log-probabilities among the tokens that are left (no meaning for greedy rows).

    Raises:
        ValueError: see `truncation_cut`.
    """
    rows = (logits, truncation, is_greedy, seed, output_index)
    with jax.named_scope("draw"):
        if _choose(implementation, logits, truncation) == "mosaic":
            return draw_mosaic(*rows)
        return draw_above(truncation_cut(logits, truncation, implementation=implementation), *rows)


def _choose(implementation: Implementation | None, logits: jax.Array, truncation: Truncation) -> Implementation:
    """The implementation that serves; raises ValueError where arguments do not fit."""
    check_implementation(implementation)
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be a float32 matrix, got {logits.dtype}{list(logits.shape)}")
    if not 0 < logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"the sampler takes vocabularies up to {MAX_VOCAB}, got {logits.shape[1]}")
    for limit in jax.tree.leaves(truncation):
        if limit.shape != logits.shape[:1]:
            raise ValueError(f"limits of shape {limit.shape} do not fit {logits.shape[0]} rows")
    refusal = mosaic_refusal(logits.shape[1]) if logits.size else "there are no rows"
    return choose_implementation(implementation, refusal, order=ORDER)
