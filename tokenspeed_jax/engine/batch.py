"""From a scheduler's plan to one step's arrays: a single int32 buffer, uploaded once and sliced inside the step.

The host side (`BatchBuilder`) and the device side (`BatchLayout.unpack`) share the layout, so a field is described
once. Padding rows have length 0 and slot 0, whose tables are empty; padding tokens are token 0 and belong to no row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.cache.resident_tables import TableChanges
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.state_blocks import StateBlocks
from tokenspeed_jax.engine.buckets import Bucket, BucketTable, SamplingMode
from tokenspeed_jax.engine.requests import FLOAT_CONSTANTS, INT_CONSTANTS, SampleState
from tokenspeed_jax.engine.sampler import RowSampling

FROM_DEVICE = -1
"""Token of a row whose input is the token that an earlier step sampled and left on the device."""

_ALIGNMENT = 64
"""Fields begin at multiples of this many int32: XLA hands a slice to a kernel in place, and Mosaic GPU kernels take
buffers aligned to 256 bytes only."""

_FLOAT_COLUMNS = FLOAT_CONSTANTS
_INT_COLUMNS = ("slot", "output_index", "samples", *INT_CONSTANTS)
_SLOT, _OUTPUT_INDEX, SAMPLES, _CONSTANTS = range(4)
MIN_TOKENS = _INT_COLUMNS.index("min_tokens")

Fields = dict[str, tuple[slice, tuple[int, ...]]]
"""Where the fields of a buffer lie, and their shapes."""


def fields_of(shapes: Mapping[str, tuple[int, ...]]) -> Fields:
    """Fields one after the other, each aligned."""
    fields, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + int(np.prod(shape))
        fields[name] = (slice(begin, end), shape)
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
    return fields


def sampling_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """The fields from which `row_sampling` reads how rows are sampled."""
    return {"ints": (len(_INT_COLUMNS), rows), "floats": (len(_FLOAT_COLUMNS), rows)}


def row_sampling(ints: Int[Array, "columns rows"], floats: Int[Array, "columns rows"]) -> RowSampling:
    """How each row is sampled, from two uploaded fields; floats come as their bits."""
    columns: dict[str, Array] = dict(zip(_INT_COLUMNS, ints, strict=True))
    values: Float[Array, "columns rows"] = lax.bitcast_convert_type(floats, jnp.float32)
    columns |= dict(zip(_FLOAT_COLUMNS, values, strict=True))
    columns |= {name: columns[name] != 0 for name in ("samples", "uses_history")}
    seed = jnp.stack([columns.pop("seed_high"), columns.pop("seed_low")], axis=1)
    return RowSampling(seed=lax.bitcast_convert_type(seed, jnp.uint32), **columns)


@dataclass(frozen=True)
class StepBatch:
    """One step's batch as arrays on the device.

    Attributes:
        tokens: input ids; `FROM_DEVICE` takes the last token sampled for the row's slot.
        query_starts: row r's tokens are [query_starts[r], query_starts[r + 1]).
        kv_lens: tokens of each row's sequence after this step; 0 for a padding row.
        changes: (slot, column, block) of the entries in which the block tables of each history group changed.
        states: blocks of each row's state, per state group.
        body_lengths: tokens of each row before its checkpoint; all of them where it has none.
        sampling: sampling parameters of each row.
    """

    tokens: Int[Array, " tokens"]
    query_starts: Int[Array, " rows_plus_1"]
    kv_lens: Int[Array, " rows"]
    changes: dict[str, Int[Array, "3 entries"]]
    states: dict[str, StateBlocks]
    body_lengths: Int[Array, " rows"]
    sampling: RowSampling


@dataclass(frozen=True)
class BatchLayout:
    """Where each field of a bucket's batch lies in its buffer.

    Attributes:
        table_changes: (group id, changed entries that fit) of the history groups, in contract order.
        state_groups: ids of the state groups, in contract order.
    """

    bucket: Bucket
    table_changes: tuple[tuple[str, int], ...]
    state_groups: tuple[str, ...]

    @cached_property
    def _slices(self) -> Fields:
        rows, tokens = self.bucket.rows, self.bucket.tokens
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (tokens,),
            "query_starts": (rows + 1,),
            "kv_lens": (rows,),
            "body_lengths": (rows,),
            **sampling_shapes(rows),
        }
        shapes |= {f"changes.{group}": (3, entries) for group, entries in self.table_changes}
        shapes |= {f"states.{group}": (3, rows) for group in self.state_groups}
        return fields_of(shapes)

    @property
    def size(self) -> int:
        """Length of the buffer in int32 elements."""
        return max(item[0].stop for item in self._slices.values())

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Writable views of a host buffer's fields."""
        return {name: buffer[where].reshape(shape) for name, (where, shape) in self._slices.items()}

    def unpack(self, buffer: Int[Array, " size"]) -> StepBatch:
        """The fields of an uploaded buffer, by static slices."""
        field = {name: buffer[where].reshape(shape) for name, (where, shape) in self._slices.items()}
        return StepBatch(
            tokens=field["tokens"],
            query_starts=field["query_starts"],
            kv_lens=field["kv_lens"],
            changes={group: field[f"changes.{group}"] for group, _ in self.table_changes},
            states={group: StateBlocks(*field[f"states.{group}"]) for group in self.state_groups},
            body_lengths=field["body_lengths"],
            sampling=row_sampling(field["ints"], field["floats"]),
        )


@dataclass(frozen=True)
class BuiltBatch:
    """A batch ready for dispatch, with what landing needs of its rows.

    Attributes:
        samples, slots: of each row.
        draws: whether the row samples a token; a prefill chunk that does not end its prompt draws none.
        constrained: rows whose token a grammar constrains. The step draws none for them, `redraw` does.
        early_changes: changes of the block tables for which the buffer has no room, to be applied before the step.
        num_tokens: tokens that the step computes, without padding.
    """

    layout: BatchLayout
    buffer: np.ndarray
    samples: tuple[SampleState, ...]
    slots: list[int]
    draws: list[bool]
    constrained: list[int]
    early_changes: tuple[np.ndarray, ...]
    num_tokens: int


class BatchBuilder:
    """Builds batches in the bucket shapes of one engine. Not thread-safe; owned by the step loop."""

    def __init__(self, buckets: BucketTable, router: CacheGroupRouter) -> None:
        self._buckets = buckets
        self._router = router
        self._changes = TableChanges(router)
        self._layouts: dict[Bucket, BatchLayout] = {}

    def layout(self, bucket: Bucket) -> BatchLayout:
        """The buffer layout of one bucket."""
        if bucket not in self._layouts:
            room = self._changes.capacity
            changes = tuple((group, room(group, bucket.rows, bucket.tokens)) for group in self._router.group_ids)
            self._layouts[bucket] = BatchLayout(bucket, changes, self._router.state_group_ids)
        return self._layouts[bucket]

    def note_changes(self, plan: scheduling.ExecutionPlan) -> None:
        """Remembers what every plan changes in the block tables, until the next batch takes it along."""
        self._changes.note(plan.table_changes())

    def build(
        self, batch: scheduling.Forward.Batch, samples: Sequence[SampleState], tables: Mapping[str, np.ndarray]
    ) -> BuiltBatch:
        """Fills a fresh buffer from the plan's batch; `samples[r]` is the sample of row r.

        Rows keep the plan's order: prefill chunks first, then decode rows.

        Args:
            tables: `Scheduler.block_table_views()` of this plan.
        """
        num_rows, num_prefills = len(samples), batch.num_extends()
        lengths = np.asarray(batch.input_lengths_array())
        mode: SamplingMode = "greedy" if all(s.is_plain_greedy for s in samples) else "full"
        total = int(lengths.sum())
        bucket = self._buckets.extend(total, mode) if num_prefills else self._buckets.decode(num_rows, mode)
        layout = self.layout(bucket)
        # A fresh buffer each step: on a CPU the device may read host memory in place, after this returns.
        buffer = np.zeros(layout.size, np.int32)
        view = layout.views(buffer)

        starts = view["query_starts"]
        np.cumsum(lengths, out=starts[1 : num_rows + 1])
        starts[num_rows + 1 :] = total
        inputs = np.asarray(batch.input_ids_array())
        view["tokens"][: len(inputs)] = inputs
        view["tokens"][len(inputs) : total] = batch.decode_input_ids_array()

        ends = np.asarray(batch.extend_prefix_lens_array()) + lengths[:num_prefills]
        view["kv_lens"][:num_prefills] = ends
        view["kv_lens"][num_prefills:num_rows] = [s.prompt_length + s.num_dispatched for s in samples[num_prefills:]]
        completes = np.ones(num_rows, bool)
        completes[:num_prefills] = ends == np.asarray(batch.prefill_lengths_array())[:num_prefills]
        slots = np.asarray(batch.request_pool_indices_array())
        self._fill_sampling(view, slots, samples, completes)
        # A sample with a grammar is never plain greedy.
        constrained = [] if mode == "greedy" else constrained_rows(samples, completes)
        view["ints"][SAMPLES, constrained] = 0
        own, early = self._changes.take(dict(layout.table_changes))
        for group, entries in own.items():
            view[f"changes.{group}"][:] = entries
        after = view["kv_lens"][:num_rows]
        blocks, view["body_lengths"][:] = self._router.host_state_blocks(
            tables, slots, after - lengths, after, num_prefills, bucket.rows
        )
        for group, ids in blocks.items():
            view[f"states.{group}"][:] = ids
        draws = completes.tolist()
        return BuiltBatch(layout, buffer, tuple(samples), slots.tolist(), draws, constrained, tuple(early), total)

    @staticmethod
    def _fill_sampling(
        view: dict[str, np.ndarray], slots: np.ndarray, samples: Sequence[SampleState], completes: np.ndarray
    ) -> None:
        n = len(samples)
        ints, floats = view["ints"], view["floats"].view(np.float32)
        ints[_SLOT, :n] = slots
        ints[SAMPLES, :n] = completes
        ints[_OUTPUT_INDEX, :n] = [s.num_dispatched for s in samples]
        constants = np.frombuffer(b"".join([s.constants for s in samples]), np.int32).reshape(n, -1).T
        ints[_CONSTANTS:, :n] = constants[: len(INT_CONSTANTS)]
        floats[:, :n] = constants[len(INT_CONSTANTS) :].view(np.float32)
        # Padding rows must not divide by zero.
        floats[_FLOAT_COLUMNS.index("repetition"), n:] = 1.0
        floats[_FLOAT_COLUMNS.index("top_p"), n:] = 1.0


def constrained_rows(samples: Sequence[SampleState], draws: np.ndarray) -> list[int]:
    """Rows that draw a token under a grammar."""
    return [row for row, sample in enumerate(samples) if sample.matcher is not None and draws[row]]
