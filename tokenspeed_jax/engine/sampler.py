"""Drawing the next token of every row, inside the compiled step.

Two modes. `sample_greedy` is the argmax of the raw logits. `sample` serves everything in `SamplingParams`:

    logits -> bias -> repetition -> presence, frequency -> min_tokens mask        ("penalised")
           -> temperature -> top-k -> top-p -> min-p                              (the distribution drawn from)
           -> argmax(scaled logit + Gumbel noise)

Nothing is sorted. The k-th largest logit, and the probability at which the mass of a nucleus is reached, are found
bit by bit: a float's bits, made order-preserving, are a 32-bit number, and asking "is enough of the row at or
above this number?" for each bit from the highest down yields the exact threshold in at most 32 sweeps. Tokens equal
to the threshold are all kept.

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
    logits: Float32[Array, "rows vocab"], rows: RowSampling, state: SamplingState
) -> tuple[SampleResult, SamplingState]:
    """One token per row under the row's own parameters; the state counts the tokens of rows that sample.

    No two rows with `samples` may share a slot. A row whose every token is masked draws id 0.
    Raises ValueError for a vocabulary above `MAX_VOCAB`.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"the sampler takes vocabularies up to {MAX_VOCAB}, got {logits.shape[1]}")
    penalised = _penalised(logits, rows, state)
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
    top_logits, top_ids = lax.top_k(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    result = SampleResult(
        token=token,
        logprob=_at(logits, token) - normaliser,
        sampling_logprob=jnp.where(is_greedy, 0.0, _at(scaled, token) - log_mass),
        top_ids=top_ids.astype(jnp.int32),
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
    vocab_size = penalised.shape[1]
    # Ranks are taken before the temperature, which keeps the order but may round neighbours together.
    keys = _ordered_bits(penalised)
    k = jnp.where(rows.top_k == 0, vocab_size, jnp.minimum(rows.top_k, vocab_size)).astype(jnp.uint32)
    kth = _highest_key(lambda key: jnp.sum(keys >= key[:, None], axis=-1, dtype=jnp.uint32) >= k, k.shape, bits=32)
    kept = keys >= kth[:, None]

    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    weight_keys = lax.bitcast_convert_type(weights, jnp.uint32)  # the bits of floats >= 0 are in order as they are
    target = rows.top_p * _mass(weights)
    least = _highest_key(
        lambda key: _mass(jnp.where(weight_keys >= key[:, None], weights, 0.0)) >= target, target.shape, bits=30
    )
    least = jnp.where(rows.top_p >= 1.0, jnp.uint32(0), least)
    kept &= (weight_keys >= least[:, None]) & (weights >= rows.min_p[:, None])
    return kept, jnp.where(kept, weights, 0.0)


def _ordered_bits(values: Float32[Array, "rows vocab"]) -> UInt32[Array, "rows vocab"]:
    """Unsigned numbers in the order of the floats; the two zeros are one number."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign > 0, ~bits, bits | sign)


def _highest_key(
    reaches: Callable[[UInt32[Array, " rows"]], Bool[Array, " rows"]], shape: tuple[int, ...], *, bits: int
) -> UInt32[Array, " rows"]:
    """The highest number of `bits` bits that `reaches`, which must hold at 0 and fail above where it first fails."""

    def set_bit(step: Int32[Array, ""], key: UInt32[Array, " rows"]) -> UInt32[Array, " rows"]:
        candidate = key | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
        return jnp.where(reaches(candidate), candidate, key)

    # Fixed bounds: a loop whose length the device decides would make the host wait for every sweep.
    return lax.fori_loop(0, bits, set_bit, jnp.zeros(shape, jnp.uint32))


def _mass(weights: Float32[Array, "rows vocab"]) -> Float32[Array, " rows"]:
    """Sum of weights in [0, 1], the same for every order of summation; parts below 2**-39 of a weight are dropped."""
    unit = float(1 << _LIMB)
    rest = weights * unit
    sums = []
    for _ in range(3):
        limb = jnp.floor(rest)
        rest = (rest - limb) * unit
        sums.append(jnp.sum(limb.astype(jnp.uint32), axis=-1, dtype=jnp.uint32))
    high, middle, low = sums
    middle += low >> _LIMB
    high += middle >> _LIMB
    mask = jnp.uint32((1 << _LIMB) - 1)
    fraction = (middle & mask) / unit + (low & mask) / (unit * unit)
    return (high.astype(jnp.float32) + fraction.astype(jnp.float32)) / unit


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
