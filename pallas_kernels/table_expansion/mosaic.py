"""Table expansion for Hopper GPUs, written with Mosaic GPU: all groups and all tokens of a step in one launch.

    grid: (block,); one block = one warpgroup; which of these a block does, its number says

    512 entries of one group's table                     8 of the step's tokens
    --------------------------------                     ----------------------
    block ids <- table, 4 loads of 128, one a thread     (row, position) of each <- rows, positions
    page ids = block id * pages_per_block + j            block id in each group <- table, at row and position
    pages[entry, j] <- page ids, for every j             slots[group, token] <- block id * block_tokens + offset

The kernel has no shared memory and no barrier of its own. What it waits for is the latency of global memory, so a
block issues all its loads before it uses the first. A token's lookup lands anywhere in a table, which vectors of a
warpgroup cannot follow: tokens are scalars, 8 of them a block so that a long prompt fills the GPU with blocks and not
with waiting. Tables of fewer than 128 entries are scalars as well. The last vector of a table may overlap the one
before it in the same block, and stores the same values again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from tokenspeed_jax.pallas_kernels.table_expansion.geometry import ExpandedTables, TableGeometry

VECTOR = 128  # entries, one for each thread of the warpgroup
VECTORS = 4  # of one block
SCALARS = 8  # of one block

Ref = Any
Job = tuple[int, Callable[[jax.Array], None]]  # how many blocks it takes, and what its n-th block does


@functools.partial(jax.jit, static_argnames=("geometries", "interpret"))
def expand_tables_mosaic(
    tables: tuple[Int[Array, "rows blocks"], ...],
    geometries: tuple[TableGeometry, ...],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    interpret: Any = None,
) -> ExpandedTables:
    """See `expand_tables`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    shapes = tuple(table.shape for table in tables)
    num_tokens = rows.shape[0]
    page_types = [
        jax.ShapeDtypeStruct((table.size, geometry.pages_per_block), jnp.int32)
        for table, geometry in zip(tables, geometries, strict=True)
    ]
    slot_types = [jax.ShapeDtypeStruct((num_tokens,), jnp.int32)] * len(tables)
    kernel = plgpu.kernel(
        functools.partial(_block, shapes=shapes, geometries=geometries, num_tokens=num_tokens),
        out_type=[*page_types, *slot_types],
        grid=(sum(_vector_blocks(table.size) for table in tables) + -(-num_tokens // SCALARS),),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="expand_tables",
    )
    results = kernel(rows, positions, *(table.reshape(-1) for table in tables))
    pages = [page.reshape(table.shape[0], -1) for page, table in zip(results, tables, strict=False)]
    return ExpandedTables(tuple(pages), tuple(results[len(tables) :]))


def _vector_blocks(entries: int) -> int:
    """Blocks that expand a table."""
    return -(-entries // SCALARS) if entries < VECTOR else -(-(entries // VECTOR) // VECTORS)


def _block(
    rows_ref: Ref,
    positions_ref: Ref,
    *table_page_and_slot_refs: Ref,
    shapes: tuple[tuple[int, ...], ...],
    geometries: tuple[TableGeometry, ...],
    num_tokens: int,
) -> None:
    count = len(shapes)
    tables, pages, slots = (table_page_and_slot_refs[i * count : (i + 1) * count] for i in range(3))
    jobs: list[Job] = []
    for table_ref, page_ref, geometry in zip(tables, pages, geometries, strict=True):
        entries = table_ref.shape[0]
        expand = _expand_scalars if entries < VECTOR else _expand_vectors
        jobs.append((_vector_blocks(entries), functools.partial(expand, table_ref, page_ref, geometry)))
    find = functools.partial(_find_slots, rows_ref, positions_ref, tables, slots, shapes, geometries)
    jobs.append((-(-num_tokens // SCALARS), find))
    index = lax.axis_index("block")
    first = 0
    for blocks, job in jobs:
        pl.when((index >= first) & (index < first + blocks))(functools.partial(job, index - first))
        first += blocks


def _page_ids(block_ids: jax.Array, geometry: TableGeometry, page: int) -> jax.Array:
    return jnp.where(block_ids > 0, block_ids * geometry.pages_per_block + page, 0)


def _expand_vectors(table_ref: Ref, page_ref: Ref, geometry: TableGeometry, index: jax.Array) -> None:
    entries = table_ref.shape[0]
    whole = entries // VECTOR

    def load(start: jax.Array | int) -> jax.Array:
        return table_ref[pl.ds(start, VECTOR)]

    def store(start: jax.Array | int, block_ids: jax.Array) -> None:
        for page in range(geometry.pages_per_block):
            page_ref[pl.ds(start, VECTOR), page] = _page_ids(block_ids, geometry, page)

    starts = [jnp.minimum(index * VECTORS + i, whole - 1) * VECTOR for i in range(VECTORS)]
    for start, block_ids in zip(starts, [load(start) for start in starts], strict=True):
        store(start, block_ids)
    if entries % VECTOR:

        @pl.when(index == _vector_blocks(entries) - 1)
        def _tail() -> None:
            store(entries - VECTOR, load(entries - VECTOR))


def _expand_scalars(table_ref: Ref, page_ref: Ref, geometry: TableGeometry, index: jax.Array) -> None:
    entries = _scalars(index, table_ref.shape[0])
    for entry, block_id in zip(entries, [table_ref[entry] for entry in entries], strict=True):
        for page in range(geometry.pages_per_block):
            page_ref[entry, page] = _page_ids(block_id, geometry, page)


def _find_slots(
    rows_ref: Ref,
    positions_ref: Ref,
    table_refs: Sequence[Ref],
    slot_refs: Sequence[Ref],
    shapes: tuple[tuple[int, ...], ...],
    geometries: tuple[TableGeometry, ...],
    index: jax.Array,
) -> None:
    tokens = _scalars(index, rows_ref.shape[0])
    places = [(rows_ref[token], positions_ref[token]) for token in tokens]
    found = [
        [_slot(table_ref, shape, geometry, *place) for place in places]
        for table_ref, shape, geometry in zip(table_refs, shapes, geometries, strict=True)
    ]
    for slot_ref, slots in zip(slot_refs, found, strict=True):
        for token, slot in zip(tokens, slots, strict=True):
            slot_ref[token] = slot


def _slot(
    table_ref: Ref, shape: tuple[int, ...], geometry: TableGeometry, row: jax.Array, position: jax.Array
) -> jax.Array:
    num_rows, blocks = shape
    column = lax.div(jnp.maximum(position, 0), geometry.block_tokens)
    inside = (row >= 0) & (row < num_rows) & (position >= 0) & (column < blocks)
    block_id = table_ref[jnp.clip(row, 0, num_rows - 1) * blocks + jnp.minimum(column, blocks - 1)]
    slot = block_id * geometry.block_tokens + lax.rem(jnp.maximum(position, 0), geometry.block_tokens)
    return jnp.where(inside & (block_id > 0), slot, 0)


def _scalars(index: jax.Array, length: int) -> list[jax.Array]:
    """The elements of the index-th block; the last one stands in for those beyond the end."""
    return [jnp.minimum(index * SCALARS + i, length - 1) for i in range(SCALARS)]
