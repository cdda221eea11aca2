"""What latent prefill expands at a time: a piece of all rows' cached tokens for a group of heads.

The blocks of keys of all rows with tokens in the step stand one after another, and are cut into pieces of one size.
How much memory a piece takes depends on neither the length of the rows nor the width of the table.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.latent_attention.expanded_mosaic import BLOCK, GRANULE, TILE, Windows
from tokenspeed_jax.pallas_kernels.pages import PageView

WORKSPACE_BYTES = 128 * 2**20  # expanded keys and values of one piece
GROUP_HEADS = 16  # enough work for a launch; few enough that keys and values of a piece come out of the L2 cache


@dataclasses.dataclass(frozen=True)
class ExpansionTiling:
    """How the expansion is cut.

    Attributes:
        group_heads: heads expanded together, a divisor of the heads.
        piece_blocks: blocks of keys in one piece.
    """

    group_heads: int
    piece_blocks: int

    @classmethod
    def choose(cls, *, heads: int, rows: int, columns: int, page: int, bytes_per_key: int) -> "ExpansionTiling":
        """As many blocks as the table can name, or the workspace can hold.

        Args:
            columns: pages that the table can name for a row.
            bytes_per_key: of one head's key and value.
        """
        group = math.gcd(heads, GROUP_HEADS)
        most = max(WORKSPACE_BYTES // (group * BLOCK * bytes_per_key), 1)
        return cls(group, min(rows * -(-columns * page // BLOCK), most))


class RowBlocks(NamedTuple):
    """Blocks of keys of the rows that have tokens in the step, one row's after another's.

    Attributes:
        starts: where each row's blocks begin, and at the end the number of all.
        kv_lens: tokens of each row.
    """

    starts: Int[Array, " rows_and_end"]
    kv_lens: Int[Array, " rows"]

    @classmethod
    def of(cls, query_starts: Int[Array, " rows_and_end"], kv_lens: Int[Array, " rows"]) -> "RowBlocks":
        """The blocks of rows that `query_starts` delimits."""
        counts = jnp.where(query_starts[1:] > query_starts[:-1], (kv_lens + BLOCK - 1) // BLOCK, 0)
        return cls(jnp.pad(jnp.cumsum(counts), (1, 0)), kv_lens)

    def cached(
        self, rows: PageView, page_table: Int[Array, "rows columns"], first: Int[Array, ""], count: int
    ) -> Float[Array, "piece row_dim"]:
        """Cached rows of the blocks from `first` on; zeros for what nobody wrote, which may hold anything."""
        block = first + jnp.arange(count)
        # Comparing with every row is one small fusion; a binary search would be a loop that the host drives.
        row = jnp.searchsorted(self.starts[1:], block, side="right", method="compare_all")
        row = jnp.minimum(row, self.kv_lens.shape[0] - 1)
        page = rows.tokens_per_page
        per_block = BLOCK // page
        local = block - self.starts[row]
        column = local[:, None] * per_block + jnp.arange(per_block)
        ids = page_table.at[row[:, None], column].get(mode="clip")
        place = local[:, None] * BLOCK + jnp.arange(BLOCK)
        written = (place < self.kv_lens[row][:, None]) & (block < self.starts[-1])[:, None]
        taken = rows.take(ids).reshape(count * BLOCK, -1)
        return jnp.where(written.reshape(-1, 1), taken, 0)


def cut_windows(
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    row_blocks: RowBlocks,
    num_tokens: int,
) -> Windows:
    """Windows for the rows that `query_starts` delimits; `base` counts from the first of all blocks."""
    num_rows = kv_lens.shape[0]
    begin, end = query_starts[:-1], query_starts[1:]
    aligned = begin // GRANULE * GRANULE
    counts = jnp.where((end > begin) & (kv_lens > 0), (end - aligned + TILE - 1) // TILE, 0)
    ends = jnp.cumsum(counts)
    # Each row wastes less than one window, and less than one granule at its start.
    most = min(num_tokens, (num_tokens + num_rows * (TILE + GRANULE - 2)) // TILE)
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all")
    row = jnp.minimum(row, num_rows - 1).astype(jnp.int32)
    start = aligned[row] + (index - (ends - counts)[row]) * TILE
    used = index < ends[-1]
    first = jnp.maximum(begin[row] - start, 0)
    stop = jnp.where(used, jnp.minimum(end[row] - start, TILE), 0)
    position = kv_lens[row] - end[row] + start
    columns = (jnp.where(used, start, 0), first, stop, position, row_blocks.starts[row])
    return Windows(*(column.astype(jnp.int32) for column in columns))
