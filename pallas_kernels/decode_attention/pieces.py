"""How rows of decode attention are cut into pieces, and in which order the GPU's blocks take them.

A row's visible pages are cut into pieces of equal size, the last one shorter. How many depends on the row's own length
and on shapes alone, never on the lengths beside it; so does every bit of its result.

    few rows     each row into enough pieces to fill the GPU
    many rows    a row is one piece up to `piece_pages`, so a long row beside short ones keeps nobody waiting

Every pair of warpgroups walks the list of pieces, longest first, in strides of the number of pairs. The KV heads of a
piece stand next to each other in the list, so that pairs which run at the same time read the same pages, in which the
heads of a token are neighbours.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Int32

from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64  # tokens of a page
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; the grid and the number of pieces depend on it
PIECE_PAGES = 32  # half a megabyte or more: starting and merging such a piece costs about a hundredth of reading it
MOST_PARTIALS = 2048  # pieces of all rows whose outputs are kept for the merge, which bounds that memory
WHOLE_PAGES = 16  # cutting so short a row in two costs a merge, which takes longer than half of the row
BLOCKS_OF_NARROW_HEADS = 8 * MULTIPROCESSORS  # two fit on a multiprocessor, which takes the next as soon as one ends


@dataclasses.dataclass(frozen=True)
class DecodeTiling:
    """How the kernel is cut; the results depend on nothing here but how many pieces a row of some length has.

    Attributes:
        most_pieces: pieces that a row has at most; with one, the kernel writes the result itself and nothing is merged.
        least_pieces: pieces that a row has at least, as long as it has as many pages.
        piece_pages: a row with more than `least_pieces` pieces has them no longer than this, unless that made more
            than `most_pieces`.
        stages: pages in flight per pair of warpgroups.
        pairs: pairs of a loading and a multiplying warpgroup per block, 1 or 2.
        whole_pages: a row of no more pages is one piece whatever `least_pieces` says.
        blocks: blocks of the grid at most; those that do not fit on the GPU at once follow as others end.
    """

    most_pieces: int
    least_pieces: int
    piece_pages: int
    stages: int
    pairs: int
    whole_pages: int = 0
    blocks: int = MULTIPROCESSORS

    @classmethod
    def choose(
        cls, *, rows: int, kv_heads: int, columns: int, head_dim: int, sliding_window: int | None
    ) -> "DecodeTiling":
        """What serves rows of any lengths in a table of `columns` pages."""
        if sliding_window is not None:
            columns = min(columns, (sliding_window + 2 * PAGE - 2) // PAGE)
        columns = max(columns, 1)
        slots = MULTIPROCESSORS * (2 if head_dim <= 128 else 1)
        least = max(slots // (rows * kv_heads), 1)
        whole = WHOLE_PAGES if least == 2 else 0
        if columns <= whole:
            least = 1
        most = max(least, min(-(-columns // PIECE_PAGES), MOST_PARTIALS // rows))
        most, least = min(most, columns), min(least, columns)
        if head_dim == 64:
            return cls(most, least, PIECE_PAGES, 4, 1, whole, BLOCKS_OF_NARROW_HEADS)
        pairs = 1 if head_dim == 256 else 2
        return cls(most, least, PIECE_PAGES, 2, pairs, whole)


class RowCut(NamedTuple):
    """Pieces of one row, or of each of many."""

    low: jax.Array  # first visible token
    first_page: jax.Array  # column of the table that holds it
    pages: jax.Array  # visible pages
    share: jax.Array  # pages of every piece but the last
    pieces: jax.Array  # at least 1, of no pages where the row has none

    @classmethod
    def of(cls, length: jax.Array, rule: ScoreRule, tiling: DecodeTiling) -> "RowCut":
        """The cut of rows with `length` tokens, int32."""
        window = rule.sliding_window
        low = length * 0 if window is None else jnp.maximum(length - window, 0)
        first_page = lax.div(low, PAGE)
        pages = lax.div(length + (PAGE - 1), PAGE) - first_page
        if tiling.most_pieces == 1:
            return cls(low, first_page, pages, pages, jnp.ones_like(pages))
        wanted = lax.div(pages + (tiling.piece_pages - 1), tiling.piece_pages)
        wanted = jnp.minimum(jnp.maximum(wanted, tiling.least_pieces), tiling.most_pieces)
        if tiling.whole_pages:
            wanted = jnp.where(pages <= tiling.whole_pages, 1, wanted)
        share = jnp.maximum(lax.div(pages + (wanted - 1), wanted), 1)
        return cls(low, first_page, pages, share, jnp.maximum(lax.div(pages + (share - 1), share), 1))


def piece_order(kv_lens: Int[Array, " rows"], rule: ScoreRule, tiling: DecodeTiling) -> Int32[Array, " places"]:
    """1 + `row * most_pieces + piece` of all rows' pieces, longest rows first, then 0, at least once.

    The same for all layers of a step with the same rule, so that XLA computes it once. Sums over pairs of rows instead
    of a sort: a sort and a running sum would be several kernels each.
    """
    lengths = kv_lens.astype(jnp.int32)
    cut = RowCut.of(lengths, rule, tiling)
    row = jnp.arange(lengths.shape[0], dtype=jnp.int32)
    pages = cut.pages
    before = (pages[:, None] > pages) | ((pages[:, None] == pages) & (row[:, None] < row))
    first = jnp.sum(jnp.where(before, cut.pieces[:, None], 0), axis=0)
    place = jnp.arange(lengths.shape[0] * tiling.most_pieces + 1, dtype=jnp.int32)[:, None]
    holds = (place >= first) & (place < first + cut.pieces)
    # One row at most holds a place.
    return jnp.sum(jnp.where(holds, row * tiling.most_pieces + place - first + 1, 0), axis=1)
