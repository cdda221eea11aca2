"""Tokens to their experts' slots, for Hopper GPUs, written with Mosaic GPU: places all choices and copies their rows.

    grid: a block (one warpgroup) for each 64 choices, and one for the table of tiles

    expert ids of the choices before  ------->  slot = tile_rows * tiles of lower experts + choices of the same expert
    choices per expert (all)  --------------->       |
    x[the block's tokens] -- TMA --> smem -- TMA --> x_slots[slot], once a choice
                                                 +--> slot_of_choice
    choices per expert  -->  (table)    expert_of_tile, rows_of_tile, num_live

Counting is comparing: 64 choices or experts stand in the rows of a register matrix, what they are compared with in its
columns, and a row's sum is a rank or a count. Nothing is sorted, and a slot depends on the choices before it alone. Up
to `GROUP` choices every block counts for itself; of more, a kernel before counts each group (`_counts`), and a block
compares its choices with those before them in their own group. For more than `MOST_TABLED_EXPERTS` experts XLA places
the choices (`dispatch_xla`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.experts.tiles import ExpertTiles, tile_capacity

SIDE = 64  # rows and columns of a register matrix
MAX_TOP_K = SIDE
GROUP = 1024  # choices that are counted together
COUNTED_ROWS = 64  # matrices that a block compares to count for itself
SUMMED_GROUPS = 8  # whose counts a block adds up itself
MAX_TOKENS = 16  # of a block
TOKEN_BYTES = 128 * 1024  # of shared memory for a block's tokens
LANES = 64
MOST_TABLED_EXPERTS = 128  # one block makes the table of tiles: 3 us with so many experts, 37 with 512, more than XLA
MAX_HIDDEN = 256 * LANES  # of one copy
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
MATRIX = plgpu.Layout.WGMMA

Ref = Any


class PlacedTiles(NamedTuple):
    """Where a step's choices stand.

    Attributes:
        expert_of_tile: the one expert of each tile; 0 of dead tiles.
        rows_of_tile: how many of its slots hold a token; they come first. 0 of dead tiles.
        slot_of_choice: where each token's choices stand.
        num_live: tiles that hold a token; they come first.
    """

    expert_of_tile: Int[Array, " tiles"]
    rows_of_tile: Int[Array, " tiles"]
    slot_of_choice: Int[Array, "tokens top_k"]
    num_live: Int[Array, " 1"]


def dispatch_xla(
    x: Float[Array, "tokens hidden"], expert_ids: Int[Array, "tokens top_k"], num_experts: int, tile_rows: int
) -> tuple[Float[Array, "slots hidden"], PlacedTiles]:
    """As `dispatch_mosaic`, for any number of experts; slots without a token hold some token's row."""
    tiles = ExpertTiles.of(expert_ids, num_experts, tile_rows)
    live = jnp.arange(tiles.expert_of_tile.size) < tiles.num_live
    placed = PlacedTiles(
        expert_of_tile=tiles.expert_of_tile,
        rows_of_tile=jnp.where(live, tile_rows, 0).astype(jnp.int32),
        slot_of_choice=tiles.slot_of_choice.astype(jnp.int32),
        num_live=tiles.num_live.astype(jnp.int32).reshape(1),
    )
    return x[tiles.token_of_slot], placed


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a step's choices are cut into blocks and groups; `experts` is rounded up to whole matrices."""

    tokens: int
    top_k: int
    per_block: int
    experts: int
    tile_rows: int

    @property
    def num_blocks(self) -> int:
        return -(-self.tokens // self.per_block)

    @property
    def group_blocks(self) -> int:
        return GROUP // (self.per_block * self.top_k)

    @property
    def group(self) -> int:
        """Choices of a group."""
        return self.group_blocks * self.per_block * self.top_k

    @property
    def groups(self) -> int:
        return -(-self.num_blocks // self.group_blocks)

    @property
    def id_rows(self) -> int:
        """Rows of 64 ids, with which no block reads past the end."""
        return -(-max(self.tokens * self.top_k, (self.tokens - self.per_block) * self.top_k + SIDE) // SIDE)

    @property
    def window_rows(self) -> int:
        """Rows of ids that a group may touch."""
        return min(self.id_rows, GROUP // SIDE + 2)

    @property
    def counts_itself(self) -> bool:
        return self.groups == 1 and self.id_rows * self.experts // SIDE <= COUNTED_ROWS

    @property
    def sums_itself(self) -> bool:
        return self.groups <= SUMMED_GROUPS


def dispatch_mosaic(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens top_k"],
    num_experts: int,
    tile_rows: int,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "slots hidden"], PlacedTiles]:
    """Each choice's token in the slot that `ExpertTiles.of` gives it; rows of slots without a token stay undefined.

    Args:
        expert_ids: at most 64 per token.
    """
    tokens, top_k = expert_ids.shape
    hidden = x.shape[1]
    per_block = max(1, min(SIDE // top_k, MAX_TOKENS, tokens, TOKEN_BYTES // (hidden * x.dtype.itemsize)))
    plan = _Plan(tokens, top_k, per_block, -(-num_experts // SIDE) * SIDE, tile_rows)
    flat = expert_ids.reshape(-1).astype(jnp.int32)
    flat = jnp.pad(flat, (0, plan.id_rows * SIDE - flat.size), constant_values=plan.experts)
    counts = () if plan.counts_itself else (_counts(flat, plan, interpret),)
    if counts and not plan.sums_itself:
        before = jnp.cumsum(counts[0], axis=0)
        counts = (jnp.concatenate([jnp.zeros_like(before[:1]), before]),)
    num_tiles = tile_capacity(tokens * top_k, num_experts, tile_rows)
    table = -(-num_tiles // SIDE) * SIDE
    kernel = plgpu.kernel(
        functools.partial(_block, plan=plan),
        out_type=[
            jax.ShapeDtypeStruct((num_tiles * tile_rows, hidden // LANES, LANES), x.dtype),
            jax.ShapeDtypeStruct((flat.size,), jnp.int32),
            jax.ShapeDtypeStruct((table,), jnp.int32),
            jax.ShapeDtypeStruct((table,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        scratch_types={
            "x_smem": plgpu.SMEM((per_block, hidden // LANES, LANES), x.dtype),
            "ids_smem": plgpu.SMEM((plan.window_rows, SIDE), jnp.int32),
            "slots_smem": plgpu.SMEM((SIDE,), jnp.int32),
            "counts_smem": plgpu.SMEM((plan.experts,), jnp.int32),
            "ends_smem": plgpu.SMEM((plan.experts,), jnp.int32),
            "ready": plgpu.Barrier(num_barriers=2),
        },
        grid=(plan.num_blocks + 1,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="experts_dispatch",
    )
    x_slots, slots, expert_of_tile, rows_of_tile, live = kernel(
        x.reshape(tokens, hidden // LANES, LANES),
        flat,
        flat.reshape(-1, SIDE),
        *counts,
    )
    slot_of_choice = slots[: tokens * top_k].reshape(tokens, top_k)
    tiles = PlacedTiles(expert_of_tile, rows_of_tile, slot_of_choice, live)
    return x_slots.reshape(-1, hidden), tiles


def _iota(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (SIDE, SIDE), axis, layout=MATRIX)


def _rows(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (SIDE, SIDE), [0])


def _columns(vector: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(vector, (SIDE, SIDE), [1])


def _zeros() -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((SIDE, SIDE), jnp.int32), MATRIX)


def _load(ref: Ref, layout: Any) -> jax.Array:
    return blocks.gpu.load(ref, layout=layout, optimized=False)


def _window(group: Any, plan: _Plan) -> jax.Array:
    """First row of ids that a group's blocks hold."""
    return jnp.minimum(lax.div(group * plan.group, SIDE), plan.id_rows - plan.window_rows)


def _count(ids_smem: Ref, expert: Any, begin: Any, end: Any, window: Any) -> jax.Array:
    """How many choices in [begin, end) go to each of 64 experts; `window` is the number of `ids_smem`'s first row."""
    mine = _iota(0) + expert

    def add(i: jax.Array, count: jax.Array) -> jax.Array:
        place = _iota(1) + (window + i) * SIDE
        is_mine = (_columns(_load(ids_smem.at[i], COLUMN)) == mine) & (place >= begin) & (place < end)
        return count + jnp.where(is_mine, 1, 0)

    first, last = lax.div(begin, SIDE) - window, lax.div(end + (SIDE - 1), SIDE) - window
    return lax.fori_loop(first, last, add, _zeros()).sum(axis=1)


def _counts(flat: Int[Array, " ids"], plan: _Plan, interpret: Any) -> Int[Array, "groups experts"]:
    """Choices per expert of each group."""

    def body(ids_ref: Ref, counts_ref: Ref, ids_smem: Ref, ready: Ref) -> None:
        group, expert = lax.axis_index("group"), lax.axis_index("experts") * SIDE
        window = _window(group, plan)
        plgpu.copy_gmem_to_smem(ids_ref.at[pl.ds(window, plan.window_rows)], ids_smem, ready)
        plgpu.barrier_wait(ready)
        begin = group * plan.group
        end = jnp.minimum(begin + plan.group, plan.tokens * plan.top_k)
        counts_ref[group, pl.ds(expert, SIDE)] = _count(ids_smem, expert, begin, end, window)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((plan.groups, plan.experts), jnp.int32),
        scratch_types={"ids_smem": plgpu.SMEM((plan.window_rows, SIDE), jnp.int32), "ready": plgpu.Barrier()},
        grid=(plan.groups, plan.experts // SIDE),
        grid_names=("group", "experts"),
        interpret=interpret,
        kernel_name="experts_count",
    )
    return kernel(flat.reshape(-1, SIDE))


class _Counts:
    """Choices per expert, as a block gets them: counted by itself, summed by itself, or summed by XLA."""

    def __init__(self, plan: _Plan, counts_ref: Ref | None, ids_smem: Ref, counts_smem: Ref) -> None:
        self._plan, self._ids, self._smem = plan, ids_smem, counts_smem
        self._ref: Ref = counts_ref  # None where a block counts for itself

    def count(self, expert: Any) -> None:
        """Where a block counts for itself: makes the totals of 64 experts known."""
        if self._ref is None:
            choices = self._plan.tokens * self._plan.top_k
            self._smem[pl.ds(expert, SIDE)] = _count(self._ids, expert, 0, choices, 0)

    def totals(self, expert: Any) -> jax.Array:
        """Of 64 experts."""
        if self._ref is None:
            return _load(self._smem.at[pl.ds(expert, SIDE)], COLUMN)
        if not self._plan.sums_itself:
            return self._group(self._plan.groups, expert)
        return functools.reduce(lambda a, b: a + b, [self._group(i, expert) for i in range(self._plan.groups)])

    def before(self, group: jax.Array, expert: Any) -> jax.Array | None:
        """Of 64 experts, in the groups before; None where there is none."""
        if self._plan.groups == 1:
            return None
        if not self._plan.sums_itself:
            return self._group(group, expert)
        total = None
        for i in range(self._plan.groups - 1):
            count = self._group(i, expert) * jnp.where(i < group, 1, 0)
            total = count if total is None else total + count
        return total

    def _group(self, group: Any, expert: Any) -> jax.Array:
        return _load(self._ref.at[group, pl.ds(expert, SIDE)], COLUMN)


def _block(
    x_ref: Ref,
    ids_ref: Ref,
    id_rows_ref: Ref,
    *rest: Ref,
    plan: _Plan,
    x_smem: Ref,
    ids_smem: Ref,
    slots_smem: Ref,
    counts_smem: Ref,
    ends_smem: Ref,
    ready: Ref,
) -> None:
    *counts_refs, x_slots_ref, slots_ref, expert_ref, rows_ref, live_ref = rest
    counts = _Counts(plan, counts_refs[0] if counts_refs else None, ids_smem, counts_smem)
    block = lax.axis_index("block")
    group = jnp.minimum(lax.div(block, plan.group_blocks), plan.groups - 1)
    window = _window(group, plan)

    def copy_ids() -> None:
        plgpu.copy_gmem_to_smem(id_rows_ref.at[pl.ds(window, plan.window_rows)], ids_smem, ready.at[0])
        plgpu.barrier_wait(ready.at[0])

    def count_all() -> None:
        for expert in range(0, plan.experts, SIDE):
            counts.count(expert)
        plgpu.commit_smem()

    @pl.when(block < plan.num_blocks)
    def _place() -> None:
        first_token = block * plan.per_block
        start = jnp.minimum(first_token, plan.tokens - plan.per_block)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, plan.per_block)], x_smem, ready.at[1])
        copy_ids()
        count_all()
        begin = start * plan.top_k
        slots_smem[...] = _slots(ids_ref, ids_smem, counts, begin, group, window, plan)
        plgpu.commit_smem()
        plgpu.barrier_wait(ready.at[1])
        for i in range(plan.per_block):

            @pl.when(start + i >= first_token)
            def _copies(i: int = i) -> None:
                for j in range(plan.top_k):
                    slot = slots_smem[i * plan.top_k + j]
                    slots_ref[begin + i * plan.top_k + j] = slot
                    plgpu.copy_smem_to_gmem(x_smem.at[i], x_slots_ref.at[slot], commit_group=False)

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(block == plan.num_blocks)
    def _table() -> None:
        if not counts_refs:
            copy_ids()
            count_all()
        _make_table(counts, expert_ref, rows_ref, live_ref, ends_smem, plan)


def _slots(
    ids_ref: Ref, ids_smem: Ref, counts: _Counts, begin: jax.Array, group: jax.Array, window: jax.Array, plan: _Plan
) -> jax.Array:
    """Slots of the 64 choices from `begin` on."""
    ids = _rows(_load(ids_ref.at[pl.ds(begin, SIDE)], ROW))
    slot = _zeros()
    for e in range(0, plan.experts, SIDE):
        tiles = lax.div(counts.totals(e) + (plan.tile_rows - 1), plan.tile_rows)
        expert = _iota(1) + e
        slot = slot + jnp.where(expert < ids, _columns(tiles * plan.tile_rows), 0)
        before = counts.before(group, e)
        if before is not None:
            slot = slot + jnp.where(expert == ids, _columns(before), 0)
    group_begin = group * plan.group

    def compare(i: jax.Array, slot: jax.Array) -> jax.Array:
        place = _iota(1) + (window + i) * SIDE
        is_before = (_columns(_load(ids_smem.at[i], COLUMN)) == ids) & (place < _iota(0) + begin)
        return slot + jnp.where(is_before & (place >= group_begin), 1, 0)

    rows = lax.div(group_begin, SIDE) - window, lax.div(begin + (2 * SIDE - 1), SIDE) - window
    return lax.fori_loop(*rows, compare, slot).sum(axis=1)


def _make_table(counts: _Counts, expert_ref: Ref, rows_ref: Ref, live_ref: Ref, ends_smem: Ref, plan: _Plan) -> None:
    def tiles_of(totals: jax.Array) -> jax.Array:
        return lax.div(totals + (plan.tile_rows - 1), plan.tile_rows)

    for e in range(0, plan.experts, SIDE):
        ends = _zeros()
        for other in range(0, e + SIDE, SIDE):
            is_lower = _iota(1) + other <= _iota(0) + e
            ends = ends + jnp.where(is_lower, _columns(tiles_of(counts.totals(other))), 0)
        ends_smem[pl.ds(e, SIDE)] = ends.sum(axis=1)
    plgpu.commit_smem()
    live_ref[0] = ends_smem[plan.experts - 1]

    @pl.loop(0, expert_ref.shape[0] // SIDE)
    def _tiles(i: jax.Array) -> None:
        tile = _iota(0) + i * SIDE
        expert, live = _zeros(), _zeros()
        for e in range(0, plan.experts, SIDE):
            totals = counts.totals(e)
            ends = _load(ends_smem.at[pl.ds(e, SIDE)], COLUMN)
            place = tile - _columns(ends - tiles_of(totals))
            is_mine = (place >= 0) & (tile < _columns(ends))
            expert = expert + jnp.where(is_mine, _iota(1) + e, 0)
            left = jnp.minimum(_columns(totals) - place * plan.tile_rows, plan.tile_rows)
            live = live + jnp.where(is_mine, left, 0)
        expert_ref[pl.ds(i * SIDE, SIDE)] = expert.sum(axis=1)
        rows_ref[pl.ds(i * SIDE, SIDE)] = live.sum(axis=1)
