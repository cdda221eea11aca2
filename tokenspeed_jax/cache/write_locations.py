"""Which row and position each token of a step has, and the slots of groups with rows of their own.

Pure functions of arrays, used inside the compiled step; those from block tables to pages and slots are in
`pallas_kernels.table_expansion`. Pages and slots reach models through the router only. A *slot* is
`page id * page size + offset`; slot 0 stands for "nowhere" in the stacked spellings, and -1 in the token-shaped one.
A writer drops both, so nothing ever reaches the null page.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int


def decode_window(
    kv_lens: Int[Array, " rows"], tokens_per_row: int = 1
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """(row, position) of each token of a decode step: the last `tokens_per_row` positions of every row, row after row.

    Args:
        kv_lens: tokens of each row after this step; padding rows have 0 or 1, and an empty table row.
    """
    ahead = jnp.arange(tokens_per_row, dtype=kv_lens.dtype) - tokens_per_row
    positions = jnp.maximum(kv_lens[:, None] + ahead, 0)
    rows = jnp.repeat(jnp.arange(kv_lens.shape[0], dtype=kv_lens.dtype), tokens_per_row)
    return rows, positions.reshape(-1)


def extend_span(
    query_starts: Int[Array, " rows_plus_1"], kv_lens: Int[Array, " rows"], num_tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"]]:
    """(row, position) of each of `num_tokens` tokens of a prefill or mixed step; (-1, 0) beyond the last row.

    Args:
        query_starts: where each row's new tokens begin; the last entry is the number of live tokens.
        kv_lens: tokens of each row after this step.
    """
    token = jnp.arange(num_tokens, dtype=query_starts.dtype)
    row = jnp.clip(jnp.searchsorted(query_starts, token, side="right") - 1, 0, kv_lens.shape[0] - 1)
    prefix = kv_lens - (query_starts[1:] - query_starts[:-1])
    live = token < query_starts[-1]
    position = prefix[row] + token - query_starts[row]
    return jnp.where(live, row, -1).astype(token.dtype), jnp.where(live, position, 0)


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
