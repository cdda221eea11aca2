"""The order in which implementations visit tokens: sorted by expert, each expert's tokens padded to whole tiles.

With tiles of 4 slots, expert 0 chosen five times, expert 1 never and expert 2 once:

    tile          0                1                2                3 (dead)
    expert        0                0                2                2
    slots         t0 t3 t4 t7      t8 -- -- --      t3 -- -- --      -- -- -- --

A slot is one (token, choice) pair; "--" are padding slots, which compute something that nobody reads.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

MIN_TILE_ROWS = 8
MAX_TILE_ROWS = 128
# The Mosaic kernels' tiles: choices of an even load per expert, up to which a tile has so many rows. Most experts that
# draw more than the even load should still need one tile; but each row, empty or not, is copied to every block of
# columns: with 16 rows instead of 8 at a load of 4 the products take 2% longer.
MOSAIC_TILE_ROWS = ((4, 8), (8, 16), (16, 32), (32, 64), (96, 128))
MOSAIC_MOST_ROWS = 192  # of tiles beyond
# Weight blocks and columns of each that their products take at a time, the widest first that fits and fills the GPU.
MOSAIC_COLUMNS = ((2, 128), (1, 192), (2, 64), (1, 64))
PAIRWISE_CHOICES = 512  # up to here comparing all pairs of choices costs less than a sort


class ExpertTiles(NamedTuple):
    """A step's slots in tiles.

    Attributes:
        expert_of_tile: the one expert of each tile; dead tiles repeat the last live tile's.
        token_of_slot: the token that each slot computes; 0 for padding slots.
        slot_of_choice: where each token's choices stand.
        num_live: tiles that hold a token; they come first.
    """

    expert_of_tile: Int[Array, " tiles"]
    token_of_slot: Int[Array, " tiles*rows"]
    slot_of_choice: Int[Array, "tokens top_k"]
    num_live: Int[Array, ""]

    @classmethod
    def of(cls, expert_ids: Int[Array, "tokens top_k"], num_experts: int, tile_rows: int) -> "ExpertTiles":
        """Places the choices expert by expert; within an expert they keep the tokens' order."""
        tokens, top_k = expert_ids.shape
        flat = expert_ids.reshape(-1)
        tiles = tile_capacity(tokens * top_k, num_experts, tile_rows)
        counts = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
        tile_ends = jnp.cumsum(-(-counts // tile_rows))
        first_slots = (tile_ends - (-(-counts // tile_rows))) * tile_rows
        slot_of_choice = first_slots[flat] + _ranks(flat, counts)
        token_of_slot = (
            jnp.zeros((tiles * tile_rows,), jnp.int32).at[slot_of_choice].set(jnp.arange(flat.size) // top_k)
        )
        num_live = tile_ends[-1]
        live_tile = jnp.minimum(jnp.arange(tiles), num_live - 1)
        expert_of_tile = jnp.searchsorted(tile_ends, live_tile, side="right", method="compare_all")
        return cls(expert_of_tile.astype(jnp.int32), token_of_slot, slot_of_choice.reshape(expert_ids.shape), num_live)


def _ranks(flat: Int[Array, " choices"], counts: Int[Array, " experts"]) -> Int[Array, " choices"]:
    """How many earlier choices each choice's expert has."""
    places = jnp.arange(flat.size)
    if flat.size <= PAIRWISE_CHOICES:
        earlier = (flat[None, :] == flat[:, None]) & (places[None, :] < places[:, None])
        return jnp.sum(earlier, axis=1, dtype=jnp.int32)
    order = jnp.argsort(flat, stable=True)
    ranks = places - (jnp.cumsum(counts) - counts)[flat[order]]
    return jnp.zeros_like(ranks).at[order].set(ranks)


def tile_capacity(choices: int, num_experts: int, tile_rows: int) -> int:
    """Tiles that any load needs at most: every expert that is chosen may leave one row short of a tile."""
    chosen = min(num_experts, choices)
    return min(choices, (choices + chosen * (tile_rows - 1)) // tile_rows)


def tile_rows_for(choices: int, num_experts: int) -> int:
    """A tile's rows for a step of so many choices in the portable form: one tile holds an even load."""
    rows = MIN_TILE_ROWS
    while rows < MAX_TILE_ROWS and rows * num_experts < choices:
        rows *= 2
    return rows


def mosaic_tile_rows(choices: int, num_experts: int) -> int:
    """A tile's rows for a step of so many choices in the Mosaic kernels, from the table above."""
    return next((rows for load, rows in MOSAIC_TILE_ROWS if choices <= load * num_experts), MOSAIC_MOST_ROWS)
