"""`QueryTiles`: the tokens of a prefill step cut into tiles that never cross rows."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int


def max_tiles(num_tokens: int, num_rows: int, tile: int, alignment: int = 1) -> int:
    """Tiles that any split of `num_tokens` over `num_rows` can need: each row wastes less than one tile.

    Its first tile may besides waste all but one of `alignment` tokens.
    """
    return min(num_tokens, (num_tokens + num_rows * (tile - 1 + alignment - 1)) // tile)


class QueryTiles(NamedTuple):
    """One entry per tile; unused entries are empty.

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
        cls,
        query_starts: Int[Array, " rows_and_end"],
        kv_lens: Int[Array, " rows"],
        num_tokens: int,
        tile: int,
        alignment: int = 1,
    ) -> "QueryTiles":
        """Tiles of at most `tile` tokens for the rows that `query_starts` delimits, in token order, the unused last.

        All tiles of a row but its first begin at multiples of `alignment` tokens, a divisor of `tile`; the first lies
        within the `tile` tokens from such a multiple on.
        """
        num_rows = kv_lens.shape[0]
        query_lens = query_starts[1:] - query_starts[:-1]
        # Tokens between the multiple and the row's first; none where they would make a tile of an empty row.
        lead = jnp.where(query_lens > 0, query_starts[:-1] % alignment, 0)
        ends = jnp.cumsum((lead + query_lens + tile - 1) // tile)
        index = jnp.arange(max_tiles(num_tokens, num_rows, tile, alignment), dtype=jnp.int32)
        # Comparing with every row is one small fusion; a binary search would be a loop that the host drives.
        row = jnp.searchsorted(ends, index, side="right", method="compare_all")
        row = jnp.minimum(row, num_rows - 1).astype(jnp.int32)
        offset = (index - jnp.where(row > 0, ends[row - 1], 0)) * tile - lead[row]
        begin = jnp.maximum(offset, 0)
        length = jnp.maximum(jnp.minimum(offset + tile, query_lens[row]) - begin, 0)
        length = jnp.where(index < ends[-1], length, 0)
        position = kv_lens[row] - query_lens[row] + begin
        return cls(row, query_starts[row] + begin, length, position, ends[-1])

    def longest_first(self) -> "QueryTiles":
        """The tiles by the keys that they see, most first; among equals in token order."""
        seen = jnp.where(self.length > 0, jnp.maximum(self.position + self.length, 0), -1)
        index = jnp.arange(seen.shape[0])
        # Comparing all with all is one small fusion; a sort would be several kernels.
        before = (seen[None] > seen[:, None]) | ((seen[None] == seen[:, None]) & (index[None] < index[:, None]))
        order = jnp.argmax(before.sum(axis=1)[None] == index[:, None], axis=1)
        return self._replace(
            row=self.row[order], start=self.start[order], length=self.length[order], position=self.position[order]
        )
