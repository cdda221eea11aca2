"""Rows of a test batch, hypothesis strategies for them, and the slow definition of how a row is sampled."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from tokenspeed_jax.engine.sampler import RowSampling, seed_words
from tokenspeed_jax.engine.sampling_state import SamplingState, begin_request, init_sampling_state, padded_ids

VOCAB = 32
SLOTS = 5


@dataclass(frozen=True)
class Row:
    """One row of a test batch: its logits, its parameters and what it has seen."""

    logits: tuple[float, ...]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    samples: bool = True
    uses_history: bool = True
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    blocked: tuple[int, ...] = ()
    output_index: int | None = None


def batch(rows: list[Row], slots: list[int]) -> tuple[jax.Array, RowSampling, SamplingState]:
    state = init_sampling_state(SLOTS, len(rows[0].logits))
    for row, slot in zip(rows, slots, strict=True):
        if slot:
            state = begin(state, slot, row)

    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray([getattr(row, name) for row in rows], dtype)

    fields = {
        name: column(name, np.float32)
        for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    }
    return (
        jnp.asarray([row.logits for row in rows], jnp.float32),
        RowSampling(
            slot=jnp.asarray(slots, jnp.int32),
            top_k=column("top_k", np.int32),
            seed=jnp.asarray([seed_words(row.seed) for row in rows], jnp.uint32),
            output_index=jnp.asarray(
                [len(row.output) if row.output_index is None else row.output_index for row in rows], jnp.int32
            ),
            min_tokens=column("min_tokens", np.int32),
            samples=column("samples", np.bool_),
            uses_history=column("uses_history", np.bool_),
            **fields,
        ),
        state,
    )


@jax.jit
def _begin(state, slot, prompt, output, bias_ids, bias_values, blocked):
    return begin_request(state, slot, prompt, output, bias_ids, bias_values, blocked)


def begin(state: SamplingState, slot: int, row: Row) -> SamplingState:
    values = np.zeros(8, np.float32)
    values[: len(row.bias)] = [value for _, value in row.bias]
    return _begin(
        state,
        slot,
        padded_ids(row.prompt, 24),
        padded_ids(row.output, 24),
        padded_ids([token for token, _ in row.bias], 8),
        values,
        padded_ids(row.blocked, 4),
    )


# The reference: one row, float64, full sorts.


def reference_penalised(row: Row) -> np.ndarray:
    logits = np.asarray(row.logits, np.float32).astype(np.float64)
    if not row.uses_history:
        return logits
    counts = np.zeros(len(logits))
    for token in row.output:
        counts[token] += 1
    for token, value in row.bias:
        logits[token] += np.float32(value)
    for token in set(row.prompt) | set(row.output):
        factor = float(np.float32(row.repetition))
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    logits -= float(np.float32(row.presence)) * (counts > 0) + float(np.float32(row.frequency)) * counts
    if len(row.output) < row.min_tokens:
        logits[list(row.blocked)] = -np.inf
    return logits


def reference_kept(penalised: np.ndarray, row: Row, top_p: float) -> np.ndarray:
    """The kept set of already penalised logits."""
    size = len(penalised)
    kept = np.ones(size, bool)
    if row.top_k:
        kth = np.sort(penalised)[::-1][min(row.top_k, size) - 1]
        kept &= penalised >= kth
    weights = np.where(kept, np.exp((penalised - penalised.max()) / np.float32(row.temperature)), 0.0)
    probabilities = weights / weights.sum()
    if top_p < 1.0:
        falling = np.sort(probabilities)[::-1]
        enough = np.cumsum(falling) >= top_p
        least = falling[np.argmax(enough)] if enough.any() else 0.0
        kept &= probabilities >= least
    return kept & (probabilities >= np.float32(row.min_p) * probabilities.max())


# Logits on a coarse grid: ties are frequent, and what is no tie stays apart through float32 arithmetic.
grid_logits = st.lists(st.integers(-80, 80), min_size=VOCAB, max_size=VOCAB).map(lambda v: tuple(x / 8 for x in v))
flat_logits = st.lists(st.integers(0, 2), min_size=VOCAB, max_size=VOCAB).map(lambda v: tuple(x / 2 for x in v))
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=20).map(tuple)
any_row = st.builds(
    Row,
    logits=st.one_of(grid_logits, flat_logits),
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, VOCAB, 1000]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.0501, 0.301, 1.0]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    repetition=st.sampled_from([1.0, 2.0, 0.5]),
    seed=st.integers(0, 2**63 - 1),
    min_tokens=st.sampled_from([0, 10]),
    uses_history=st.booleans(),
    prompt=tokens,
    output=tokens,
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -2.0, 3.5, 100.0]), max_size=8).map(
        lambda d: tuple(d.items())
    ),
    blocked=st.lists(st.integers(0, VOCAB - 1), max_size=4, unique=True).map(tuple),
)
