"""Table expansion as its definition reads, group after group."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from tokenspeed_jax.pallas_kernels.table_expansion.geometry import ExpandedTables, TableGeometry


def expand_tables_reference(
    tables: tuple[Int[Array, "rows blocks"], ...],
    geometries: tuple[TableGeometry, ...],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
) -> ExpandedTables:
    """See `expand_tables`."""
    pages = tuple(
        expand_block_table(table, geometry.pages_per_block) for table, geometry in zip(tables, geometries, strict=True)
    )
    slots = tuple(
        position_slots(page_table, rows, positions, geometry.page_size)
        for page_table, geometry in zip(pages, geometries, strict=True)
    )
    return ExpandedTables(pages, slots)


def expand_block_table(
    table: Int[Array, "rows blocks"],
    pages_per_block: int,
    max_pages: int | None = None,
    actual_rows: Int[Array, ""] | int | None = None,
) -> Int[Array, "rows pages"]:
    """Kernel page ids of a block table (cache-runtime.md 12.1).

    Holes (0), ragged padding (-1), rows from `actual_rows` on and columns beyond the table all become page 0; the
    sub-pages of block 0 collapse to 0.

    Args:
        max_pages: columns of the result; None takes `blocks * pages_per_block`.
        actual_rows: live rows; None takes all.
    """
    rows, blocks = table.shape
    column = jnp.arange(blocks * pages_per_block if max_pages is None else max_pages, dtype=jnp.int32)
    block = column // pages_per_block
    raw = jnp.where(block < blocks, table[:, jnp.minimum(block, blocks - 1)], 0)
    if actual_rows is not None:
        raw = jnp.where(jnp.arange(rows)[:, None] < actual_rows, raw, 0)
    return jnp.where(raw > 0, raw * pages_per_block + column % pages_per_block, 0)


def position_slots(
    page_table: Int[Array, "rows pages"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    page_size: int,
) -> Int[Array, " tokens"]:
    """Slot of each (row, position); 0 where the position is beyond the table or its page is no page."""
    num_rows, pages = page_table.shape
    column = positions // page_size
    inside = (rows >= 0) & (rows < num_rows) & (positions >= 0) & (column < pages)
    page = page_table[jnp.clip(rows, 0, num_rows - 1), jnp.clip(column, 0, pages - 1)]
    return jnp.where(inside & (page > 0), page * page_size + positions % page_size, 0)
