"""Drawing the next token of every row, inside the compiled step.

Two modes. `sample_greedy` is the argmax of the raw logits. `sample` serves everything in `SamplingParams`:

    logits -> bias -> repetition -> presence, frequency -> min_tokens mask, grammar's mask  ("penalised")
           -> temperature -> top-k -> top-p -> min-p                              (the distribution drawn from)
           -> argmax(scaled logit + Gumbel noise)

The vocabulary is never sorted. The k-th largest logit, and the weight at which a nucleus reaches its mass, are found
digit by digit: a float's bits, made order-preserving, are a 32-bit number, and counting how many values of the next
digit still have enough of the row at or above them, from the highest digit down, yields the exact threshold in 16
sweeps over the row. Tokens equal to the threshold are all kept.

A row's draw depends on nothing but that row: its noise is a function of its seed and of how many tokens it has
generated, and masses are summed as integers, whose sums do not depend on the order that a compiler chooses.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from tokenspeed_jax.engine.sampling_params import MAX_TOP_LOGPROBS
from tokenspeed_jax.engine.sampling_state import BLOCKED_AT_FIRST, IN_PROMPT, SamplingState

MAX_VOCAB = 2**19 - 1
"""Largest vocabulary whose masses fit the integer sums."""

_LIMB = 13  # bits; (2**_LIMB) * MAX_VOCAB must stay below 2**32
_DIGIT_BITS = 2  # a sweep reads the row once for the three comparisons of a digit
_SPAN = 128
_SEED_BITS = 63
_WORD = 0xFFFFFFFF


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowSampling:
    """How each row of a step is sampled; the fields of `SamplingParams`, one value per row.

    Attributes:
        slot: the row's request-pool slot, which is its row of `SamplingState`; 0 for padding.
        seed: high and low 32 bits of the sample's seed, `seed_words(sample_seed(...))`.
        output_index: tokens that this sample generated before the one to be drawn.
        samples: whether the row draws a token; the results of other rows mean nothing.
        uses_history: whether the row reads and counts in its row of the state (`SamplingParams.uses_history`).
            Without it bias, penalties and min_tokens of the row are ignored.
    """

    slot: Int32[Array, " rows"]
    temperature: Float32[Array, " rows"]
    top_k: Int32[Array, " rows"]
    top_p: Float32[Array, " rows"]
    min_p: Float32[Array, " rows"]
    presence: Float32[Array, " rows"]
    frequency: Float32[Array, " rows"]
    repetition: Float32[Array, " rows"]
    seed: UInt32[Array, "rows 2"]
    output_index: Int32[Array, " rows"]
    min_tokens: Int32[Array, " rows"]
    samples: Bool[Array, " rows"]
    uses_history: Bool[Array, " rows"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleResult:
    """What one step drew.

    Attributes:
        token: the drawn id.
        logprob: its log-probability under the raw logits.
        sampling_logprob: its log-probability under the distribution it was drawn from; 0 at temperature 0.
        top_ids, top_logprobs: the most probable ids under the raw logits, most probable first, lowest id first among
            equals. min(MAX_TOP_LOGPROBS, vocabulary) of them, none from `sample_greedy`.
    """

    token: Int32[Array, " rows"]
    logprob: Float32[Array, " rows"]
    sampling_logprob: Float32[Array, " rows"]
    top_ids: Int32[Array, "rows top"]
    top_logprobs: Float32[Array, "rows top"]


def sample_seed(seed: int, sample_index: int) -> int:
    """The seed of sample `sample_index` of a request with `seed`: a 63-bit number.

    SplitMix64 (Steele, Lea, Flood 2014): its output number `sample_index` from the state `seed`, without the top
    bit. Equal arguments give equal seeds on every machine, and different indices of one request different streams.
    """
    mask = 2**64 - 1
    mixed = (seed + (sample_index + 1) * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) & (2**_SEED_BITS - 1)


def seed_words(seed: int) -> tuple[int, int]:
    """High and low 32 bits of a 63-bit seed, as `RowSampling.seed` holds them."""
    return seed >> 32, seed & _WORD


def sample_greedy(logits: Float32[Array, "rows vocab"]) -> SampleResult:
    """The most probable token of each row, the lowest id among equals, with its raw log-probability."""
    rows = logits.shape[0]
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return SampleResult(
        token=token,
        logprob=_at(logits, token) - jax.nn.logsumexp(logits, axis=-1),
        sampling_logprob=jnp.zeros(rows, jnp.float32),
        top_ids=jnp.zeros((rows, 0), jnp.int32),
        top_logprobs=jnp.zeros((rows, 0), jnp.float32),
    )


def sample(
    logits: Float32[Array, "rows vocab"],
    rows: RowSampling,
    state: SamplingState,
    allowed: Bool[Array, "rows vocab"] | None = None,
) -> tuple[SampleResult, SamplingState]:
    """One token per row under the row's own parameters; the state counts the tokens of rows that sample.

    No two rows with `samples` may share a slot. A row whose every token is masked draws id 0.
    Raises ValueError for a vocabulary above `MAX_VOCAB`.

    Args:
        allowed: ids that each row may draw; None allows all. Log-probabilities under the raw logits do not heed it.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"the sampler takes vocabularies up to {MAX_VOCAB}, got {logits.shape[1]}")
    penalised = _penalised(logits, rows, state)
    if allowed is not None:
        penalised = jnp.where(allowed, penalised, -jnp.inf)
    peak = jnp.max(penalised, axis=-1)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    is_greedy = rows.temperature <= 0.0
    temperature = jnp.where(is_greedy, 1.0, rows.temperature)
    # The peak is taken off first: a division by a tiny temperature may then only underflow.
    scaled = (penalised - peak[:, None]) / temperature[:, None]
    kept, weights = _truncated(penalised, scaled, rows)

    drawn = jnp.argmax(jnp.where(kept, scaled + _gumbel(rows, logits.shape[1]), -jnp.inf), axis=-1)
    token = jnp.where(is_greedy, jnp.argmax(penalised, axis=-1), drawn).astype(jnp.int32)
    log_mass = jnp.log(jnp.maximum(jnp.sum(weights, axis=-1), jnp.finfo(jnp.float32).tiny))
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    top_logits, top_ids = highest_logits(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    result = SampleResult(
        token=token,
        logprob=_at(logits, token) - normaliser,
        sampling_logprob=jnp.where(is_greedy, 0.0, _at(scaled, token) - log_mass),
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser[:, None],
    )
    return result, _counted(state, rows, token)


def _at(values: Float32[Array, "rows vocab"], token: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


def _penalised(
    logits: Float32[Array, "rows vocab"], rows: RowSampling, state: SamplingState
) -> Float32[Array, "rows vocab"]:
    counts = state.output_counts[rows.slot]
    flags = state.token_flags[rows.slot]
    biased = logits + state.logit_bias[rows.slot]
    seen = (counts > 0) | (flags & IN_PROMPT > 0)
    factor = rows.repetition[:, None]
    repeated = jnp.where(seen, jnp.where(biased > 0, biased / factor, biased * factor), biased)
    # A tiny factor may have divided beyond the range of float32, and infinity minus itself is no number.
    repeated = jnp.minimum(repeated, jnp.finfo(jnp.float32).max)
    penalty = rows.presence[:, None] * (counts > 0) + rows.frequency[:, None] * counts
    is_blocked = (flags & BLOCKED_AT_FIRST > 0) & (rows.output_index < rows.min_tokens)[:, None]
    penalised = jnp.where(is_blocked, -jnp.inf, repeated - penalty)
    return jnp.where(rows.uses_history[:, None], penalised, logits)


def _truncated(
    penalised: Float32[Array, "rows vocab"], scaled: Float32[Array, "rows vocab"], rows: RowSampling
) -> tuple[Bool[Array, "rows vocab"], Float32[Array, "rows vocab"]]:
    """The tokens that may be drawn, and the weight exp(scaled) of each of them (0 of the others; 1 of the peak)."""
    # Ranks are taken before the temperature, which keeps the order but may round neighbours together.
    kept = _in_top_k(penalised, rows.top_k)
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    kept &= _in_top_p(weights, rows.top_p) & (weights >= rows.min_p[:, None])
    return kept, jnp.where(kept, weights, 0.0)


def _in_top_k(values: Float32[Array, "rows vocab"], top_k: Int32[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    """Which values are no less than the row's k-th largest; all for k = 0."""
    vocab_size = values.shape[1]
    k = jnp.where(top_k == 0, vocab_size, jnp.minimum(top_k, vocab_size)).astype(jnp.uint32)
    keys = _ordered_bits(values)
    kth = _highest_key(lambda key: jnp.sum(keys >= key[:, None], axis=-1, dtype=jnp.uint32) >= k, top_k.shape)
    return keys >= kth[:, None]


def _in_top_p(weights: Float32[Array, "rows vocab"], top_p: Float32[Array, " rows"]) -> Bool[Array, "rows vocab"]:
    """Which weights (in [0, 1]) are no less than the one at which the row's largest reach the share p of all.

    Weights are summed as integers, in units of which a row's total is between 2**30 and 2**31.
    """
    keys = lax.bitcast_convert_type(weights, jnp.uint32)  # the bits of floats >= 0 are in order as they are
    scale = _mass_scale(weights)

    def mass(key: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        units = jnp.round(weights * scale[:, None]).astype(jnp.uint32)
        return jnp.sum(jnp.where(keys >= key[:, None], units, 0), axis=-1, dtype=jnp.uint32)

    target = jnp.ceil(top_p * mass(jnp.zeros(top_p.shape, jnp.uint32)).astype(jnp.float32)).astype(jnp.uint32)
    least = _highest_key(lambda key: mass(key) >= target, top_p.shape)
    return (keys >= least[:, None]) | (top_p >= 1.0)[:, None]


def _mass_scale(weights: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """A power of two that brings each row's total to [2**30, 2**31), the same for every order of summation."""
    unit = float(1 << _LIMB)
    rest = weights * unit
    high = jnp.floor(rest)
    low = jnp.floor((rest - high) * unit)
    high_sum = jnp.sum(high.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    low_sum = jnp.sum(low.astype(jnp.uint32), axis=-1, dtype=jnp.uint32)
    total = high_sum + (low_sum >> _LIMB)  # in units of 1 / unit, rounded down
    exponent = 31 - lax.clz(jnp.maximum(total, 1)).astype(jnp.int32)
    return jnp.ldexp(jnp.float32(1.0), 30 + _LIMB - exponent)


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


def highest_logits(
    logits: Float32[Array, "rows vocab"], count: int
) -> tuple[Float32[Array, "rows count"], Int32[Array, "rows count"]]:
    """What `lax.top_k` returns, without sorting the vocabulary.

    The highest `count` of all lie in the `count` spans of the highest maxima: of any other span, each element stands
    behind all those maxima.
    """
    rows, vocab_size = logits.shape
    spans = -(-vocab_size // _SPAN)
    padded = jnp.pad(logits, ((0, 0), (0, spans * _SPAN - vocab_size)), constant_values=-jnp.inf)
    maxima = jnp.max(padded.reshape(rows, spans, _SPAN), axis=-1)
    # In rising order, so that equal logits still come lowest id first.
    chosen = jnp.sort(lax.top_k(maxima, min(count, spans))[1], axis=-1)
    ids = (chosen[:, :, None] * _SPAN + jnp.arange(_SPAN)).reshape(rows, -1)
    candidates = jnp.take_along_axis(logits, ids, axis=-1, mode="fill", fill_value=-jnp.inf)
    values, places = lax.top_k(candidates, count)
    return values, jnp.take_along_axis(ids, places, axis=-1).astype(jnp.int32)


def _gumbel(rows: RowSampling, vocab_size: int) -> Float32[Array, "rows vocab"]:
    """Noise of each row's next token: counter-based, so that nothing but seed and output index enters it."""

    def bits(seed: UInt32[Array, " 2"], index: Int32[Array, ""]) -> UInt32[Array, " vocab"]:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jax.random.bits(key, (vocab_size,), jnp.uint32)

    drawn = jax.vmap(bits)(rows.seed, rows.output_index).astype(jnp.float32)
    # Large noise comes from numbers near zero, where float32 resolves all 32 drawn bits: the tail is not quantised.
    uniform = jnp.minimum((drawn + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def _counted(state: SamplingState, rows: RowSampling, token: Int32[Array, " rows"]) -> SamplingState:
    counts = rows.samples & rows.uses_history & (rows.slot > 0)
    nowhere = state.output_counts.shape[0]
    slot = jnp.where(counts, rows.slot, nowhere)
    return SamplingState(
        output_counts=state.output_counts.at[slot, token].add(1, mode="drop"),
        token_flags=state.token_flags,
        logit_bias=state.logit_bias,
    )
