"""Tokens to their experts' slots, for Hopper GPUs, written with Mosaic GPU: places all choices and copies their rows.

    grid: one block (one warpgroup) for each 64 choices, and one for the table of tiles

    expert ids of 64 choices  ----------->  slot = tile_rows * tiles of lower experts + choices of the same expert before
    choices per expert (all)  ----------->       |
    x[the block's tokens] -- TMA --> smem -- TMA --> x_slots[slot], once a choice
                                                 +--> slot_of_choice
    choices per expert  -->  (last block)  expert_of_tile, rows_of_tile, num_live

Counting is comparing: 64 choices stand in the rows of a register matrix, the experts or the choices before them in its
columns, and a row's sum is a rank. Nothing is sorted, and a slot depends on the choices before it alone.
"""
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.experts.tiles import tile_capacity

CHOICES = 64  # of one block: rows of a register matrix
COLUMNS = 64  # of a register matrix
GROUP = 1024  # choices that are counted together; of a choice's group those before it are compared one by one
MAX_TOKENS = 16
LANES = 64
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


def dispatch_mosaic(
    x: Float[Array, "tokens hidden"],
    expert_ids: Int[Array, "tokens top_k"],
    num_experts: int,
    tile_rows: int,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "slots hidden"], PlacedTiles]:
    tokens, top_k = expert_ids.shape
    hidden = x.shape[1]
    per_block = min(CHOICES // top_k, MAX_TOKENS, tokens)
    num_blocks = -(-tokens // per_block)
    experts = -(-num_experts // COLUMNS) * COLUMNS
    num_tiles = tile_capacity(tokens * top_k, num_experts, tile_rows)
    table = -(-num_tiles // CHOICES) * CHOICES
    flat = expert_ids.reshape(-1).astype(jnp.int32)
    group_blocks = GROUP // (per_block * top_k)
    groups = -(-num_blocks // group_blocks)
    window = (tokens - per_block) * top_k + CHOICES
    if window > flat.size:
        flat = jnp.pad(flat, (0, window - flat.size), constant_values=experts)
    before = ()
    if groups == 1:
        totals = jnp.sum(flat[:, None] == jnp.arange(experts), axis=0, dtype=jnp.int32)
    else:
        per_group = group_blocks * per_block * top_k
        grouped = jnp.pad(flat[: tokens * top_k], (0, groups * per_group - tokens * top_k), constant_values=experts)
        counts = jnp.sum(grouped.reshape(groups, per_group, 1) == jnp.arange(experts), axis=1, dtype=jnp.int32)
        ends = jnp.cumsum(counts, axis=0)
        totals, before = ends[-1], ((ends - counts).reshape(-1),)
    kernel = plgpu.kernel(
        functools.partial(
            _block, tokens=tokens, per_block=per_block, top_k=top_k, tile_rows=tile_rows, experts=experts,
            group_blocks=group_blocks,
        ),
        out_type=[
            jax.ShapeDtypeStruct((num_tiles * tile_rows, hidden // LANES, LANES), x.dtype),
            jax.ShapeDtypeStruct((flat.size,), jnp.int32),
            jax.ShapeDtypeStruct((table,), jnp.int32),
            jax.ShapeDtypeStruct((table,), jnp.int32),
            jax.ShapeDtypeStruct((1,), jnp.int32),
        ],
        scratch_types={
            "x_smem": plgpu.SMEM((per_block, hidden // LANES, LANES), x.dtype),
            "slots_smem": plgpu.SMEM((CHOICES,), jnp.int32),
            "ends_smem": plgpu.SMEM((experts,), jnp.int32),
            "ready": plgpu.Barrier(),
        },
        grid=(num_blocks + 1,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="experts_dispatch",
    )
    x_slots, slots, expert_of_tile, rows_of_tile, live = kernel(
        x.reshape(tokens, hidden // LANES, LANES), flat, totals, *before
    )
    slot_of_choice = slots[: tokens * top_k].reshape(tokens, top_k)
    tiles = PlacedTiles(expert_of_tile, rows_of_tile, slot_of_choice, live)
    return x_slots.reshape(-1, hidden), tiles


def _block(
    x_ref: Ref, ids_ref: Ref, totals_ref: Ref, *rest: Ref, tokens: int, per_block: int, top_k: int, tile_rows: int,
    experts: int, group_blocks: int, x_smem: Ref, slots_smem: Ref, ends_smem: Ref, ready: Ref,
) -> None:
    *before_ref, x_slots_ref, slots_ref, expert_ref, rows_ref, live_ref = rest
    block = lax.axis_index("block")
    num_blocks = lax.axis_size("block") - 1

    def tiles_of(first: Any) -> tuple[jax.Array, jax.Array]:
        totals = blocks.gpu.load(totals_ref.at[pl.ds(first, COLUMNS)], layout=COLUMN, optimized=False)
        return totals, lax.div(totals + (tile_rows - 1), tile_rows)

    def iota(axis: int) -> jax.Array:
        return plgpu.broadcasted_iota(jnp.int32, (CHOICES, COLUMNS), axis, layout=MATRIX)

    def rows(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (CHOICES, COLUMNS), [0])

    def columns(vector: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(vector, (CHOICES, COLUMNS), [1])

    def zeros() -> jax.Array:
        return plgpu.layout_cast(jnp.zeros((CHOICES, COLUMNS), jnp.int32), MATRIX)

    @pl.when(block < num_blocks)
    def _place() -> None:
        first = block * per_block
        start = jnp.minimum(first, tokens - per_block)
        plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, per_block)], x_smem, ready)
        begin = start * top_k
        ids = rows(blocks.gpu.load(ids_ref.at[pl.ds(begin, CHOICES)], layout=ROW, optimized=False))
        group = lax.div(block, group_blocks)
        group_begin = group * (group_blocks * per_block * top_k)
        slot = zeros()
        for e in range(0, experts, COLUMNS):
            _, tiles = tiles_of(e)
            expert = iota(1) + e
            slot = slot + jnp.where(expert < ids, columns(tiles * tile_rows), 0)
            if before_ref:
                earlier = blocks.gpu.load(
                    before_ref[0].at[pl.ds(group * experts + e, COLUMNS)], layout=COLUMN, optimized=False
                )
                slot = slot + jnp.where(expert == ids, columns(earlier), 0)

        def compare(i: jax.Array, slot: jax.Array) -> jax.Array:
            at = jnp.minimum(group_begin + i * COLUMNS, ids_ref.shape[0] - COLUMNS)
            skipped = group_begin + i * COLUMNS
            others = columns(blocks.gpu.load(ids_ref.at[pl.ds(at, COLUMNS)], layout=COLUMN, optimized=False))
            place = iota(1) + at
            is_before = (others == ids) & (place < iota(0) + begin) & (place >= skipped)
            return slot + jnp.where(is_before, 1, 0)

        steps = lax.div(begin + CHOICES - group_begin + (COLUMNS - 1), COLUMNS)
        slot = lax.fori_loop(0, steps, compare, slot)
        slots = slot.sum(axis=1)
        slots_smem[...] = slots
        plgpu.commit_smem()
        plgpu.barrier_wait(ready)
        for i in range(per_block):
            @pl.when(start + i >= first)
            def _copies() -> None:
                for j in range(top_k):
                    choice = slots_smem[i * top_k + j]
                    slots_ref[begin + i * top_k + j] = choice
                    plgpu.copy_smem_to_gmem(x_smem.at[i], x_slots_ref.at[choice], commit_group=False)
        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(block == num_blocks)
    def _table() -> None:
        for e in range(0, experts, CHOICES):
            ends = zeros()
            for other in range(0, e + CHOICES, COLUMNS):
                _, tiles = tiles_of(other)
                ends = ends + jnp.where(iota(1) + other <= iota(0) + e, columns(tiles), 0)
            ends_smem[pl.ds(e, CHOICES)] = ends.sum(axis=1)
        plgpu.commit_smem()
        live_ref[0] = ends_smem[experts - 1]

        @pl.loop(0, expert_ref.shape[0] // CHOICES)
        def _tiles(i: jax.Array) -> None:
            tile = iota(0) + i * CHOICES
            expert, live = zeros(), zeros()
            for e in range(0, experts, COLUMNS):
                totals, tiles = tiles_of(e)
                ends = blocks.gpu.load(ends_smem.at[pl.ds(e, COLUMNS)], layout=COLUMN, optimized=False)
                place = tile - columns(ends - tiles)
                is_mine = (place >= 0) & (tile < columns(ends))
                expert = expert + jnp.where(is_mine, iota(1) + e, 0)
                left = jnp.minimum(columns(totals) - place * tile_rows, tile_rows)
                live = live + jnp.where(is_mine, left, 0)
            expert_ref[pl.ds(i * CHOICES, CHOICES)] = expert.sum(axis=1)
            rows_ref[pl.ds(i * CHOICES, CHOICES)] = live.sum(axis=1)
