"""What the blocks of a grouped product read first, for the kernel before it to ask the cache for."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

Ref = Any


@dataclasses.dataclass(frozen=True)
class FirstReads:
    """Block b of the product starts with the columns b % column_blocks of tile b // column_blocks.

    Attributes:
        num_blocks: of the product.
        column_blocks: blocks with the same tile.
        width: from one block's columns to the next one's.
        starts: where the first block's columns start, for each of its weight blocks.
        columns: of a weight block.
        chunks: how many chunks of input channels to fetch.
        chunk: channels of one.
    """

    num_blocks: int
    column_blocks: int
    width: int
    starts: tuple[int, ...]
    columns: int
    chunks: int
    chunk: int

    def tile(self, block: jax.Array) -> jax.Array:
        """The block's first tile."""
        return lax.div(block, self.column_blocks)

    def fetch(self, w_ref: Ref, expert: jax.Array, block: jax.Array) -> None:
        """Asks the cache for what the block reads of the expert's weights."""
        column = lax.rem(block, self.column_blocks) * self.width
        for chunk in range(self.chunks):
            for start in self.starts:
                channels = pl.ds(chunk * self.chunk, self.chunk)
                plgpu.async_prefetch(w_ref.at[expert, pl.ds(start + column, self.columns), channels])


class Following(NamedTuple):
    """The product after a kernel."""

    weights: Float[Array, "experts out channels"]
    reads: FirstReads
