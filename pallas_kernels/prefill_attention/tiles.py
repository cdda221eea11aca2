"""`QueryTiles`: the tokens of a prefill step cut into tiles that never cross rows."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


def max_tiles(num_tokens: int, num_rows: int, tile: int) -> int:
    """Tiles that any split of `num_tokens` over `num_rows` can need: each row wastes less than one tile."""
    return min(num_tokens, (num_tokens + num_rows * (tile - 1)) // tile)


class QueryTiles(NamedTuple):
    """One entry per tile, in token order; entries from `count` on are empty.

    Attributes:
        row: the row that the tile belongs to.
        start: the tile's first token in the step.
        length: tokens in the tile; 0 for unused entries.
        position: position of the first token in its row.
        count: tiles in use.
    """

    row: Int[Array, " tiles"]
    start: Int[Array, " tiles"]
    length: Int[Array, " tiles"]
    position: Int[Array, " tiles"]
    count: Int[Array, ""]

    @classmethod
    def cut(
        cls, query_starts: Int[Array, " rows_and_end"], kv_lens: Int[Array, " rows"], num_tokens: int, tile: int
    ) -> "QueryTiles":
        """Tiles of at most `tile` tokens for the rows that `query_starts` delimits."""
        num_rows = kv_lens.shape[0]
        query_lens = query_starts[1:] - query_starts[:-1]
        ends = jnp.cumsum((query_lens + tile - 1) // tile)
        index = jnp.arange(max_tiles(num_tokens, num_rows, tile), dtype=jnp.int32)
        # Comparing with every row is one small fusion; a binary search would be a loop that the host drives.
        row = jnp.searchsorted(ends, index, side="right", method="compare_all")
        row = jnp.minimum(row, num_rows - 1).astype(jnp.int32)
        offset = (index - jnp.where(row > 0, ends[row - 1], 0)) * tile
        length = jnp.where(index < ends[-1], jnp.clip(query_lens[row] - offset, 0, tile), 0)
        position = kv_lens[row] - query_lens[row] + offset
        return cls(row, query_starts[row] + offset, length, position, ends[-1])
