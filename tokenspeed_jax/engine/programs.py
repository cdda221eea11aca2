"""The engine's compiled programs: compiled once per bucket, run on the arena and the device state they own."""

import dataclasses
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from tqdm import tqdm

from tokenspeed_jax.cache.resident_tables import EARLY_ENTRIES, Tables, apply_changes
from tokenspeed_jax.engine.batch import BatchLayout, BuiltBatch
from tokenspeed_jax.engine.buckets import Bucket
from tokenspeed_jax.engine.compilation_cache import CacheHits
from tokenspeed_jax.engine.prompt_scorer import PromptScorer
from tokenspeed_jax.engine.redraw import Redraw, RedrawLayout, build_redraw
from tokenspeed_jax.engine.requests import SampleState
from tokenspeed_jax.engine.sampling_params import MAX_LOGIT_BIAS, MAX_TOP_LOGPROBS
from tokenspeed_jax.engine.sampling_state import MAX_BLOCKED, begin_request, bias_arrays, padded_ids
from tokenspeed_jax.engine.split_model import Weights
from tokenspeed_jax.engine.step import DeviceOutputs, DeviceState, StepModel, build_step
from tokenspeed_jax.engine.weight_store import WeightStore
from tokenspeed_jax.errors import EngineStateError

_PARALLEL_COMPILATIONS = min(max(os.cpu_count() or 1, 2), 16)
"""Threads that compile while another lowers: the compiler lets go of Python's lock, and uses few cores by itself."""


@dataclass
class StepPrograms:
    """Compiles and runs steps. Owned by the step loop; not thread-safe after `warm_up`.

    Attributes:
        store: of the weights, which are an argument of every step and never donated.
        max_model_len: padded length of token lists handed to `begin_request`.
        scorer: scores prompts from the hidden rows of steps.
    """

    model: StepModel
    store: WeightStore
    device_state: DeviceState
    max_model_len: int
    _late_compile_seconds: float = 0.0
    _steps: dict[Bucket, Any] = field(default_factory=dict)
    _redraws: dict[int, Any] = field(default_factory=dict)
    _begin: Any = None
    _update_tables: Any = None
    _postponed: BuiltBatch | None = None

    def __post_init__(self) -> None:
        self.scorer = PromptScorer(self.store, self.model.precision)

    @property
    def weights(self) -> Weights:
        """What the next step runs with."""
        return self.store.arrays

    def warm_up(self, layouts: Iterable[BatchLayout], *, progress: bool) -> int:
        """Compiles every bucket and runs none. Errors of the compiler propagate.

        Returns:
            How many programs JAX took from its compilation cache.
        """
        layouts, hits = list(layouts), CacheHits()
        arena = self.model.arena
        others = [self._compile_begin, self._compile_update, arena.compile_copies]
        others += [arena.compile_zeroing] if arena.requires_block_zeroing else []
        if self.model.returns_logits:
            others += [partial(self._compile_redraw, rows) for rows in {layout.bucket.rows for layout in layouts}]
        unscored = {layout.bucket.tokens for layout in layouts if layout.bucket.mode == "extend"}
        num_programs = len(layouts) + len(others) + len(unscored)
        with (
            hits.listening(),
            ThreadPoolExecutor(_PARALLEL_COMPILATIONS, initializer=hits.watch_this_thread) as pool,
            tqdm(total=num_programs, desc="Compiling steps", disable=not progress) as bar,
        ):
            futures: dict[Future[Any], Bucket | None] = {}
            # Lowered here, one after the other and always in this order: jax 0.11 numbers the Mosaic kernels of a
            # process as it lowers them, and these numbers are part of the key under which it keeps a program.
            for layout in layouts:
                lowered = self._lower(layout)
                futures[pool.submit(lowered.compile)] = layout.bucket
                if layout.bucket.tokens in unscored and layout.bucket.mode == "extend":
                    unscored.remove(layout.bucket.tokens)
                    futures[pool.submit(self._lower_scorer(lowered))] = None
            futures |= {pool.submit(item): None for item in others}
            for future in as_completed(futures):
                bucket = futures[future]
                program = future.result()
                if bucket is not None:
                    self._steps[bucket] = program
                bar.update()
        return hits.count

    def compiled(self, layout: BatchLayout) -> Any:
        """The compiled step of a bucket (`jax.stages.Compiled`); compiles it when it is missing."""
        if layout.bucket not in self._steps:
            self._steps[layout.bucket] = self._timed(lambda: self._lower(layout).compile())
        return self._steps[layout.bucket]

    def measured_workspace(self, layout: BatchLayout) -> int:
        """Workspace of an extend step and of the scoring of its rows, both of which this compiles."""
        lowered = self._lower(layout)
        self._steps[layout.bucket] = lowered.compile()
        self._lower_scorer(lowered)()
        return self.workspace_bytes

    def run(self, built: BuiltBatch) -> DeviceOutputs:
        """Dispatches one step without waiting for it.

        What is drawn is on its way to the host then, unless `redraw` has rows to draw yet.

        Raises:
            EngineStateError: the weights were deleted by who shares them. The step has not begun: it waits for
                `run_postponed`, since it also carries what has changed in the block tables.
        """
        arena = self.model.arena
        for changes in built.early_changes:
            update = self._update_tables or self._timed(self._compile_update)
            tables = update(self.device_state.tables, changes)
            self.device_state = dataclasses.replace(self.device_state, tables=tables)
        step = self.compiled(built.layout)
        try:
            results = step(self.weights, arena.planes, self.device_state, built.buffer)
        except RuntimeError as error:
            donated = jax.tree.leaves((arena.planes, self.device_state))
            if (reason := self.store.missing()) is None or any(array.is_deleted() for array in donated):
                raise
            self._postponed = built
            raise EngineStateError(reason) from error
        arena.planes, self.device_state, outputs = results
        if not built.constrained:
            outputs.packed.copy_to_host_async()
        return outputs

    def run_postponed(self) -> None:
        """Runs the step that `run` could not, if there is one, for its changes of the tables; its rows are nobody's."""
        built, self._postponed = self._postponed, None
        if built is not None:
            self.run(built)

    def redraw(self, redraw: Redraw, packed: jax.Array, logits: jax.Array) -> jax.Array:
        """Dispatches the draws of a batch's constrained rows; returns the step's packed outputs with theirs in them."""
        rows = redraw.layout.rows
        program = self._redraws.get(rows) or self._timed(lambda: self._compile_redraw(rows))
        self.device_state, packed = program(logits, self.device_state, packed, redraw.buffer)
        packed.copy_to_host_async()
        return packed

    def begin_request(self, slot: int, sample: SampleState, blocked: np.ndarray) -> None:
        """Sets a slot's token counts, bias and stop mask for a sample whose parameters need them.

        Args:
            blocked: ids that may not be drawn before `min_tokens`, as `sampling_state.blocked_ids` gives them.
        """
        begin = self._begin or self._timed(self._compile_begin)
        sampling = begin(
            self.device_state.sampling,
            np.int32(slot),
            padded_ids(sample.request.prompt_token_ids, self.max_model_len),
            padded_ids(sample.token_ids, self.max_model_len),
            *bias_arrays(sample.params),
            blocked,
        )
        self.device_state = dataclasses.replace(self.device_state, sampling=sampling)

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        once = sum(item is not None for item in (self._begin, self._update_tables))
        own = len(self._steps) + len(self._redraws) + once
        return own + self.scorer.compilations + self.model.arena.compilations + self.store.compilations

    @property
    def late_compile_seconds(self) -> float:
        """Time spent compiling outside of `warm_up`."""
        parts = (self.scorer.late_compile_seconds, self.model.arena.late_compile_seconds, self.store.compile_seconds)
        return self._late_compile_seconds + sum(parts)

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of the costliest program compiled so far, with what a step hands out beside arena and state."""
        steps = (_workspace(step.memory_analysis()) for step in self._steps.values())
        return max(self.scorer.workspace_bytes + self._logits_bytes, *steps, 0)

    @property
    def _logits_bytes(self) -> int:
        """Logits of a step, which are kept for `redraw` while its prompts are scored."""
        if not self.model.returns_logits:
            return 0
        return 4 * self._vocab_size * max((bucket.rows for bucket in self._steps), default=0)

    @property
    def _vocab_size(self) -> int:
        return self.device_state.sampling.output_counts.shape[1]

    def _timed(self, make: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        program = make()
        self._late_compile_seconds += time.perf_counter() - start
        return program

    def _lower(self, layout: BatchLayout) -> jax.stages.Lowered:
        step = jax.jit(build_step(self.model, layout), donate_argnums=(1, 2))
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        planes = jax.tree.map(_shape_of, self.model.arena.planes)
        state = jax.tree.map(_shape_of, self.device_state)
        with jax.default_matmul_precision(self.model.precision):
            return step.lower(self.weights, planes, state, buffer)

    def _lower_scorer(self, step: jax.stages.Lowered) -> Callable[[], None]:
        """What compiles the scorer of an extend step's hidden rows."""
        hidden = step.out_info[-1].hidden
        return self.scorer.lower(jax.ShapeDtypeStruct(hidden.shape, hidden.dtype))

    def _compile_update(self) -> Any:
        groups = self.model.router.group_ids

        def update(tables: Tables, changes: Int[Array, "groups 3 entries"]) -> Tables:
            return apply_changes(tables, dict(zip(groups, changes, strict=True)))

        changes = jax.ShapeDtypeStruct((len(groups), 3, EARLY_ENTRIES), jnp.int32)
        tables = jax.tree.map(_shape_of, self.device_state.tables)
        self._update_tables = jax.jit(update, donate_argnums=0).lower(tables, changes).compile()
        return self._update_tables

    def _compile_redraw(self, rows: int) -> Any:
        vocab_size = self._vocab_size
        layout = RedrawLayout(rows, vocab_size)
        lowered = jax.jit(build_redraw(layout), donate_argnums=1).lower(
            jax.ShapeDtypeStruct((rows, vocab_size), jnp.float32),
            jax.tree.map(_shape_of, self.device_state),
            jax.ShapeDtypeStruct((rows, 3 + 2 * min(MAX_TOP_LOGPROBS, vocab_size)), jnp.int32),
            jax.ShapeDtypeStruct((layout.size,), jnp.int32),
        )
        self._redraws[rows] = lowered.compile()
        return self._redraws[rows]

    def _compile_begin(self) -> Any:
        ids = jax.ShapeDtypeStruct((self.max_model_len,), jnp.int32)
        lowered = jax.jit(begin_request, donate_argnums=0).lower(
            jax.tree.map(_shape_of, self.device_state.sampling),
            jax.ShapeDtypeStruct((), jnp.int32),
            ids,
            ids,
            jax.ShapeDtypeStruct((MAX_LOGIT_BIAS,), jnp.int32),
            jax.ShapeDtypeStruct((MAX_LOGIT_BIAS,), jnp.float32),
            jax.ShapeDtypeStruct((MAX_BLOCKED,), jnp.int32),
        )
        self._begin = lowered.compile()
        return self._begin


def _workspace(memory: Any) -> int:
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
