"""Block tables to kernel pages, and token positions to slots: pure functions of arrays, used inside the compiled step.

Only the router calls these. A *slot* is `page id * page size + offset`; slot 0 stands for "nowhere" in the stacked
spellings, and -1 in the token-shaped one. A writer drops both, so nothing ever reaches the null page.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeWindow:
    """The last `tokens_per_row` positions of every row, row after row.

    Attributes:
        kv_lens: tokens of each row after this step; 0 for padding rows.
    """

    kv_lens: Int[Array, " rows"]
    tokens_per_row: int = dataclasses.field(default=1, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExtendSpan:
    """The new tokens of every row, row after row, in an array of `num_tokens` of which the rest is padding.

    Attributes:
        query_starts: where each row's tokens begin; the last entry is the number of live tokens.
        kv_lens: tokens of each row after this step.
    """

    query_starts: Int[Array, " rows+1"]
    kv_lens: Int[Array, " rows"]
    num_tokens: int = dataclasses.field(metadata={"static": True})


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


def decode_window_slots(
    page_table: Int[Array, "rows pages"], window: DecodeWindow, page_size: int
) -> Int[Array, " rows*window"]:
    """Slots of a decode step: token j of n of a row has position `max(kv_len - n + j, 0)`."""
    n = window.tokens_per_row
    start = window.kv_lens[:, None] - n
    positions = jnp.maximum(start + jnp.arange(n, dtype=window.kv_lens.dtype), 0)
    rows = jnp.repeat(jnp.arange(page_table.shape[0]), n)
    return position_slots(page_table, rows, positions.reshape(-1), page_size)


def extend_span_slots(page_table: Int[Array, "rows pages"], span: ExtendSpan, page_size: int) -> Int[Array, " tokens"]:
    """Slots of a prefill step; tokens beyond the last row get slot 0."""
    token = jnp.arange(span.num_tokens, dtype=span.query_starts.dtype)
    rows = jnp.searchsorted(span.query_starts, token, side="right") - 1
    row = jnp.clip(rows, 0, page_table.shape[0] - 1)
    prefix = span.kv_lens - (span.query_starts[1:] - span.query_starts[:-1])
    positions = prefix[row] + token - span.query_starts[row]
    slots = position_slots(page_table, row, positions, page_size)
    return jnp.where(token < span.query_starts[-1], slots, 0)


def token_row_slots(
    table: Int[Array, "rows blocks"],
    rows: Int[Array, " tokens"],
    positions: Int[Array, " tokens"],
    *,
    rows_per_page: int,
    entry_stride_tokens: int,
    base_block: int = 0,
) -> Int[Array, " tokens"]:
    """Row slots of a group with `entry_stride_tokens` tokens per row, -1 where there is none (12.2, token-shaped).

    Block id 0 passes through as page 0: the caller masks holes where page 0 is no legal sink.

    Args:
        base_block: first logical block that column 0 of `table` holds.
    """
    num_rows, blocks = table.shape
    entry = positions // entry_stride_tokens
    column = entry // rows_per_page - base_block
    inside = (rows >= 0) & (rows < num_rows) & (column >= 0) & (column < blocks)
    page = table[jnp.clip(rows, 0, num_rows - 1), jnp.clip(column, 0, blocks - 1)]
    return jnp.where(inside & (page >= 0), page * rows_per_page + entry % rows_per_page, -1)
