"""Block tables of all cache groups to kernel page tables, and a step's tokens to the slots they are written to."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.table_expansion.geometry import ExpandedTables, TableGeometry
from tokenspeed_jax.pallas_kernels.table_expansion.mosaic import expand_tables_mosaic
from tokenspeed_jax.pallas_kernels.table_expansion.reference import (
    expand_block_table,
    expand_tables_reference,
    position_slots,
)

__all__ = ["ExpandedTables", "TableGeometry", "expand_block_table", "expand_tables", "mosaic_refusal", "position_slots"]


def mosaic_refusal(tables: Sequence[Int[Array, "rows blocks"]], rows: Int[Array, " tokens"]) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve this step on the default device; None when it can."""
    if not rows.size or not all(table.size for table in tables):
        return "the step has no tokens, or a block table that is empty"
    return hopper_refusal()


def expand_tables(
    tables: Sequence[Int[Array, "rows blocks"]],
    geometries: Sequence[TableGeometry],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    implementation: Implementation | None = None,
) -> ExpandedTables:
    """Page tables and slots of every cache group of a step (cache-runtime.md 12.1 and 12.2).

    Column c of a page table covers the tokens `[c * page_size, (c + 1) * page_size)` of its row. Holes (0) and ragged
    padding (-1) become page 0, the null page, and so do all pages of block 0. The slot of a token is
    `page id * page_size + offset`, 0 where it is written nowhere: a padding token, a position beyond the table, or a
    block that is none. No slot but 0 lies in the null page, and writers drop that one.

    Args:
        tables: block ids, one table per group; the groups may differ in columns, not in rows.
        geometries: of each group.
        rows, positions: table row of each of the step's tokens, and its position in its sequence; padding tokens have
            row -1.
        implementation: None takes the fastest that serves the call. The plain form is one, named both `reference` and
            `xla`: elementwise operations and lookups, which XLA fuses by itself into a few kernels per group.

    Returns:
        int32, in the order of `tables`.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    _check_shapes(tables, geometries, rows, positions)
    implementation = choose_implementation(implementation, mosaic_refusal(tables, rows))
    function = expand_tables_mosaic if implementation == "mosaic" else expand_tables_reference
    with jax.named_scope("expand_tables"):
        return function(
            tuple(table.astype(jnp.int32) for table in tables),
            tuple(geometries),
            rows.astype(jnp.int32),
            positions.astype(jnp.int32),
        )


def _check_shapes(
    tables: Sequence[jax.Array], geometries: Sequence[TableGeometry], rows: jax.Array, positions: jax.Array
) -> None:
    """Raises ValueError where tables, geometries and tokens do not fit together."""
    if not tables or len(tables) != len(geometries):
        raise ValueError(f"{len(tables)} block tables need as many geometries, got {len(geometries)}")
    for table in tables:
        if table.ndim != 2 or not jnp.issubdtype(table.dtype, jnp.integer):
            raise ValueError(f"a block table must be a matrix of integers, got {table.dtype}{list(table.shape)}")
    if len({table.shape[0] for table in tables}) > 1:
        raise ValueError(f"block tables differ in rows: {[table.shape[0] for table in tables]}")
    for name, vector in (("rows", rows), ("positions", positions)):
        if vector.ndim != 1 or vector.shape != rows.shape or not jnp.issubdtype(vector.dtype, jnp.integer):
            raise ValueError(f"{name} must be {rows.size} integers, got {vector.dtype}{list(vector.shape)}")
