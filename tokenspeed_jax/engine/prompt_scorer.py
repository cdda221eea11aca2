"""Scoring prompts while they are prefilled: from a step's hidden rows to log-probabilities of the tokens behind them.

A step returns what its model made of every token that it fed. Where a request asks for `prompt_logprobs`, the rows of
its prompt pass through the model's head here, so many at a time that their logits fit: 32,768 rows of a vocabulary of
152k would be 19 GiB.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.prompt_logprobs import PromptScores
from tokenspeed_jax.engine.sampler import highest_logits
from tokenspeed_jax.engine.sampling_params import MAX_TOP_LOGPROBS
from tokenspeed_jax.engine.split_model import Weights
from tokenspeed_jax.engine.weight_store import WeightStore

ROWS_PER_CALL = 128
"""Rows whose logits are held at once: a vocabulary of 256k words takes 128 MiB of them."""


def score_rows(logits: Float[Array, "rows vocab"], targets: Int[Array, " rows"]) -> Int[Array, "rows columns"]:
    """Log-probability and rank of each row's target, then the most probable ids and their log-probabilities.

    The log-probabilities are the bits of float32.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, targets[:, None], axis=-1)
    rank = 1 + jnp.sum(logits > own, axis=-1, keepdims=True, dtype=jnp.int32)
    top, top_ids = highest_logits(logits, min(MAX_TOP_LOGPROBS, logits.shape[1]))
    own_bits, top_bits = (lax.bitcast_convert_type(values - normaliser, jnp.int32) for values in (own, top))
    return jnp.concatenate([own_bits, rank, top_ids, top_bits], axis=1)


@dataclass(frozen=True)
class _Span:
    """Tokens of one prompt that a step scores.

    Attributes:
        first: place of the first of them in its prompt.
        rows: hidden row that predicts each of them.
    """

    scores: PromptScores
    first: int
    rows: range


@dataclass(frozen=True)
class PendingScores:
    """The scores of one dispatched step; none for most steps."""

    spans: tuple[_Span, ...] = ()
    packed: tuple[jax.Array, ...] = ()

    def land(self) -> None:
        """Waits for the scores and gives them to their requests."""
        if not self.spans:
            return
        rows = np.concatenate([np.asarray(part) for part in self.packed])
        begin = 0
        for span in self.spans:
            span.scores.put(span.first, rows[begin : begin + len(span.rows)])
            begin += len(span.rows)


class PromptScorer:
    """Compiles and dispatches the scoring of a step's rows. Owned by the step loop; not thread-safe after warm-up.

    Attributes:
        late_compile_seconds: time spent compiling outside of the warm-up.
    """

    def __init__(self, store: WeightStore, precision: str | None) -> None:
        self._store = store
        self._precision = precision
        self._programs: dict[int, Any] = {}
        self.late_compile_seconds = 0.0

    def lower(self, hidden: jax.ShapeDtypeStruct) -> Callable[[], None]:
        """Lowers the program for hidden rows of this shape; the result compiles it, on any thread."""
        rows = jax.ShapeDtypeStruct((min(ROWS_PER_CALL, hidden.shape[0]),), jnp.int32)
        with jax.default_matmul_precision(self._precision):
            lowered = jax.jit(self._score).lower(self._store.arrays, hidden, rows, rows)

        def compile_it() -> None:
            self._programs[hidden.shape[0]] = lowered.compile()

        return compile_it

    def dispatch(self, built: BuiltBatch, hidden: jax.Array | None) -> PendingScores:
        """Starts the scoring of what a dispatched step feeds of prompts whose requests ask for it.

        Args:
            hidden: what the step's model made of its tokens; None for a step that feeds no prompt.
        """
        spans = () if hidden is None else _spans(built)
        if hidden is None or not spans:
            return PendingScores()
        if hidden.shape[0] not in self._programs:
            start = time.perf_counter()
            self.lower(jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=hidden.sharding))()
            self.late_compile_seconds += time.perf_counter() - start
        program = self._programs[hidden.shape[0]]
        per_call = min(ROWS_PER_CALL, hidden.shape[0])
        rows = np.concatenate([np.array(span.rows, np.int32) for span in spans])
        targets = np.array(
            [token for span in spans for token in span.scores.targets(span.first, len(span.rows))], np.int32
        )
        packed = []
        for begin in range(0, len(rows), per_call):
            # Rows of padding read row 0; nobody looks at what becomes of them.
            padded = np.zeros((2, per_call), np.int32)
            padded[0, : len(rows) - begin] = rows[begin : begin + per_call]
            padded[1, : len(rows) - begin] = targets[begin : begin + per_call]
            try:
                packed.append(program(self._store.arrays, hidden, padded[0], padded[1]))
            except RuntimeError:
                if self._store.missing() is None:
                    raise
                return PendingScores()  # the loop ends these requests when it comes to the next step
            packed[-1].copy_to_host_async()
        return PendingScores(spans, tuple(packed))

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of the costliest of them, with the logits in them, and the hidden rows that it reads."""
        return max((_bytes_of(program) for program in self._programs.values()), default=0)

    def _score(
        self,
        weights: Weights,
        hidden: Float[Array, "tokens hidden"],
        rows: Int[Array, " rows"],
        targets: Int[Array, " rows"],
    ) -> Int[Array, "rows columns"]:
        return score_rows(self._store.structure.module(weights).logits(hidden[rows]), targets)


def _spans(built: BuiltBatch) -> tuple[_Span, ...]:
    """What the rows of a batch feed of prompts that are to be scored; a prompt's last token predicts none of it."""
    chosen = [
        (row, sample.request.prompt_scores)
        for row, sample in enumerate(built.samples)
        if sample.request.prompt_scores is not None and sample.index == 0
    ]
    if not chosen:
        return ()
    view = built.layout.views(built.buffer)
    spans = []
    for row, scores in chosen:
        begin, end = view["query_starts"][row : row + 2].tolist()
        fed_before = int(view["kv_lens"][row]) - (end - begin)
        first = fed_before + 1
        count = min(end - begin, built.samples[row].prompt_length - first)
        if count > 0:
            spans.append(_Span(scores, first, range(begin, begin + count)))
    return tuple(spans)


def _bytes_of(program: Any) -> int:
    memory = program.memory_analysis()
    hidden = program.in_avals[0][1]
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + hidden.size * hidden.dtype.itemsize
