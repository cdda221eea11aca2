"""Drawing the next token of every row, inside the compiled step.

Two modes. `sample_greedy` is the argmax of the raw logits. `sample` serves everything in `SamplingParams`:

    logits -> bias -> repetition -> presence, frequency -> min_tokens mask, grammar's mask  ("penalised")
           -> temperature -> top-k -> top-p -> min-p                              (the distribution drawn from)
           -> argmax(scaled logit + Gumbel noise)

The vocabulary is never sorted: `pallas_kernels.sampling` finds the least logit that top-k, top-p and min-p leave, and
tokens equal to it are all kept.

A row's draw depends on nothing but that row: its noise is a function of its seed and of how many tokens it has
generated, and masses are summed as integers, whose sums do not depend on the order that a compiler chooses.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from tokenspeed_jax.engine.sampling_params import MAX_TOP_LOGPROBS
from tokenspeed_jax.engine.sampling_state import BLOCKED_AT_FIRST, IN_PROMPT, SamplingState
from tokenspeed_jax.pallas_kernels.sampling import MAX_VOCAB, Truncation, draw

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
    Raises ValueError for a vocabulary above `pallas_kernels.sampling.MAX_VOCAB`.

    Args:
        allowed: ids that each row may draw; None allows all. Log-probabilities under the raw logits do not heed it.
    """
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"the sampler takes vocabularies up to {MAX_VOCAB}, got {logits.shape[1]}")
    penalised = _penalised(logits, rows, state)
    if allowed is not None:
        penalised = jnp.where(allowed, penalised, -jnp.inf)
    is_greedy = rows.temperature <= 0.0
    truncation = Truncation(jnp.where(is_greedy, 1.0, rows.temperature), rows.top_k, rows.top_p, rows.min_p)
    token, sampling_logprob = draw(penalised, truncation, is_greedy, rows.seed, rows.output_index)
    top_logits, top_ids = highest_logits(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    # The highest logit is known: one read of the logits less than `logsumexp` takes.
    peak = jnp.where(jnp.isfinite(top_logits[:, 0]), top_logits[:, 0], 0.0)
    normaliser = peak + jnp.log(jnp.sum(jnp.exp(logits - peak[:, None]), axis=-1))
    result = SampleResult(
        token=token,
        logprob=_at(logits, token) - normaliser,
        sampling_logprob=jnp.where(is_greedy, 0.0, sampling_logprob),
        top_ids=top_ids,
        top_logprobs=top_logits - normaliser[:, None],
    )
    return result, _counted(state, rows, token)


def _at(values: Float32[Array, "rows vocab"], token: Int32[Array, " rows"]) -> Float32[Array, " rows"]:
    return jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0]


def _penalised(
    logits: Float32[Array, "rows vocab"], rows: RowSampling, state: SamplingState
) -> Float32[Array, "rows vocab"]:
    # Rows without history all read the padding's row, which stays in the cache.
    slot = jnp.where(rows.uses_history, rows.slot, 0)
    counts = state.output_counts[slot]
    flags = state.token_flags[slot]
    biased = logits + state.logit_bias[slot]
    # Written without a truth value for each token that is used twice: XLA would store it.
    seen = counts + (flags & IN_PROMPT) > 0
    factor = rows.repetition[:, None]
    repeated = jnp.where(seen, jnp.where(biased > 0, biased / factor, biased * factor), biased)
    # A tiny factor may have divided beyond the range of float32, and infinity minus itself is no number.
    repeated = jnp.minimum(repeated, jnp.finfo(jnp.float32).max)
    penalty = rows.presence[:, None] * jnp.minimum(counts, 1) + rows.frequency[:, None] * counts
    is_blocked = (flags & BLOCKED_AT_FIRST > 0) & (rows.output_index < rows.min_tokens)[:, None]
    penalised = jnp.where(is_blocked, -jnp.inf, repeated - penalty)
    return jnp.where(rows.uses_history[:, None], penalised, logits)


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


def _counted(state: SamplingState, rows: RowSampling, token: Int32[Array, " rows"]) -> SamplingState:
    counts = rows.samples & rows.uses_history & (rows.slot > 0)
    nowhere = state.output_counts.shape[0]
    slot = jnp.where(counts, rows.slot, nowhere)
    return SamplingState(
        output_counts=state.output_counts.at[slot, token].add(1, mode="drop"),
        token_flags=state.token_flags,
        logit_bias=state.logit_bias,
    )
