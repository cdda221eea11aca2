"""The engine's compiled programs: compiled once per bucket, run on the arena and the device state they own."""

import dataclasses
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
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
from tokenspeed_jax.engine.requests import SampleState
from tokenspeed_jax.engine.sampling_params import MAX_LOGIT_BIAS
from tokenspeed_jax.engine.sampling_state import MAX_BLOCKED, begin_request, bias_arrays, padded_ids
from tokenspeed_jax.engine.split_model import Weights
from tokenspeed_jax.engine.step import DeviceState, StepModel, build_step

_PARALLEL_COMPILATIONS = min(max(os.cpu_count() or 1, 2), 16)
"""Threads that compile while another lowers: the compiler lets go of Python's lock, and uses few cores by itself."""


@dataclass
class StepPrograms:
    """Compiles and runs steps. Owned by the step loop; not thread-safe after `warm_up`.

    Attributes:
        weights: an argument of every step and never donated.
        max_model_len: padded length of token lists handed to `begin_request`.
        scorer: scores prompts from the hidden rows of steps.
    """

    model: StepModel
    weights: Weights
    device_state: DeviceState
    max_model_len: int
    _steps: dict[Bucket, Any] = field(default_factory=dict)
    _begin: Any = None
    _update_tables: Any = None

    def __post_init__(self) -> None:
        self.scorer = PromptScorer(self.model.structure, self.weights, self.model.precision)

    def warm_up(self, layouts: Iterable[BatchLayout], *, progress: bool) -> int:
        """Compiles every bucket and runs none. Errors of the compiler propagate.

        Returns:
            How many programs JAX took from its compilation cache.
        """
        layouts, hits = list(layouts), CacheHits()
        arena = self.model.arena
        others = [self._compile_begin, self._compile_update, arena.compile_copies]
        others += [arena.compile_zeroing] if arena.requires_block_zeroing else []
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
            self._steps[layout.bucket] = self._lower(layout).compile()
        return self._steps[layout.bucket]

    def measured_workspace(self, layout: BatchLayout) -> int:
        """Temporaries of an extend step and of the scoring of its rows, both of which this compiles."""
        lowered = self._lower(layout)
        self._steps[layout.bucket] = lowered.compile()
        self._lower_scorer(lowered)()
        return self.workspace_bytes

    def run(self, built: BuiltBatch) -> tuple[jax.Array, jax.Array | None]:
        """Dispatches one step without waiting for it.

        Returns:
            Its packed outputs (see `step.unpack_outputs`), and the hidden rows of a step that feeds prompts.
        """
        arena = self.model.arena
        for changes in built.early_changes:
            update = self._update_tables or self._compile_update()
            tables = update(self.device_state.tables, changes)
            self.device_state = dataclasses.replace(self.device_state, tables=tables)
        step = self.compiled(built.layout)
        arena.planes, self.device_state, outputs, hidden = step(
            self.weights, arena.planes, self.device_state, built.buffer
        )
        outputs.copy_to_host_async()
        return outputs, hidden

    def begin_request(self, slot: int, sample: SampleState, blocked: np.ndarray) -> None:
        """Sets a slot's token counts, bias and stop mask for a sample whose parameters need them.

        Args:
            blocked: ids that may not be drawn before `min_tokens`, as `sampling_state.blocked_ids` gives them.
        """
        begin = self._begin or self._compile_begin()
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
        others = (self._begin, self._update_tables)
        once = sum(item is not None for item in others)
        return len(self._steps) + once + self.scorer.compilations + self.model.arena.compilations

    @property
    def workspace_bytes(self) -> int:
        """Temporaries of the costliest program compiled so far, and the hidden rows that it makes or reads."""
        steps = (step.memory_analysis() for step in self._steps.values())
        own = (step.temp_size_in_bytes + step.output_size_in_bytes - step.alias_size_in_bytes for step in steps)
        return max(self.scorer.workspace_bytes, *own, 0)

    def _lower(self, layout: BatchLayout) -> jax.stages.Lowered:
        step = jax.jit(build_step(self.model, layout), donate_argnums=(1, 2))
        buffer = jax.ShapeDtypeStruct((layout.size,), jnp.int32)
        planes = jax.tree.map(_shape_of, self.model.arena.planes)
        state = jax.tree.map(_shape_of, self.device_state)
        with jax.default_matmul_precision(self.model.precision):
            return step.lower(self.weights, planes, state, buffer)

    def _lower_scorer(self, step: jax.stages.Lowered) -> Callable[[], None]:
        """What compiles the scorer of an extend step's hidden rows."""
        hidden = step.out_info[-1]
        return self.scorer.lower(jax.ShapeDtypeStruct(hidden.shape, hidden.dtype))

    def _compile_update(self) -> Any:
        groups = self.model.router.group_ids

        def update(tables: Tables, changes: Int[Array, "groups 3 entries"]) -> Tables:
            return apply_changes(tables, dict(zip(groups, changes, strict=True)))

        changes = jax.ShapeDtypeStruct((len(groups), 3, EARLY_ENTRIES), jnp.int32)
        tables = jax.tree.map(_shape_of, self.device_state.tables)
        self._update_tables = jax.jit(update, donate_argnums=0).lower(tables, changes).compile()
        return self._update_tables

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


def _shape_of(array: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
