"""Prefill attention in plain JAX: tiles of queries, each with its own loop over blocks of pages.

Keys and values are gathered once per tile and block, for all tokens and heads of the tile. A tile walks the blocks
between the first key that its first query sees and its last query's own position, on a grid fixed in its row, so
what a row gets depends on neither the table's width nor the rows beside it.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from tokenspeed_jax.pallas_kernels.online_softmax import (
    OnlineSoftmax,
    padded_table,
    pages_per_block,
    product_precision,
)
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention.tiles import QueryTiles
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

TILE_TOKENS = 32
BLOCK_TOKENS = 128


def prefill_attention_xla(
    q: Float[Array, "tokens heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads dim"]:
    """See `prefill_attention`; time grows with the keys that the tiles see, memory with the tiles done at once."""
    num_tokens = q.shape[0]
    tiles = QueryTiles.cut(query_starts, kv_lens, num_tokens, TILE_TOKENS)
    padded_q = jnp.pad(q.astype(jnp.float32), ((0, TILE_TOKENS), (0, 0), (0, 0)))
    token = jnp.arange(TILE_TOKENS)

    def add_tiles(first: Array, out: Array, together: int) -> Array:
        """Writes the outputs of `together` tiles; a partial tile writes only its own tokens."""
        row, start, length, position = (lax.dynamic_slice_in_dim(column, first, together) for column in tiles[:4])
        result = _tile_outputs(padded_q, k, v, page_table[row], start, length, position, rule, q.dtype, sinks)
        target = jnp.where(token < length[:, None], start[:, None] + token, num_tokens)
        return out.at[target].set(result.astype(q.dtype), mode="drop")

    out = jnp.zeros(q.shape, q.dtype)
    if jax.default_backend() == "gpu":
        # A GPU is filled by all tiles in one batch; their loop is as long as the longest tile's.
        return add_tiles(jnp.int32(0), out, tiles.row.shape[0])
    return lax.fori_loop(0, tiles.count, lambda index, out: add_tiles(index, out, 1), out)


def _tile_outputs(
    padded_q: Float32[Array, "padded heads dim"],
    k: PageView,
    v: PageView,
    table: Int[Array, "tiles columns"],
    start: Int[Array, " tiles"],
    length: Int[Array, " tiles"],
    position: Int[Array, " tiles"],
    rule: ScoreRule,
    dtype: jnp.dtype,
    sinks: Float[Array, " heads"] | None,
) -> Float32[Array, "tiles tile heads dim"]:
    """Attention of some tiles; rows of a tile beyond its length hold what nobody reads."""
    num_tiles = start.shape[0]
    tokens, kv_heads, dim = k.page_shape
    heads = padded_q.shape[1]
    pages = pages_per_block(tokens, BLOCK_TOKENS)
    block = pages * tokens
    table = padded_table(table, pages)
    token = jnp.arange(TILE_TOKENS)
    queries = padded_q[start[:, None] + token]
    groups = heads // kv_heads
    grouped = queries.reshape(num_tiles, TILE_TOKENS, kv_heads, groups, dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_tiles, kv_heads, groups * TILE_TOKENS, dim)
    query_positions = position[:, None] + token
    precision = product_precision(dtype)

    def add_block(index: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        ids = lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys = k.take(ids).reshape(num_tiles, block, kv_heads, dim)
        values = v.take(ids).reshape(num_tiles, block, kv_heads, dim)
        visible = rule.visible(query_positions[:, :, None], index * block + jnp.arange(block))
        visible &= (token < length[:, None])[:, :, None]
        visible = jnp.broadcast_to(visible[:, None], (num_tiles, groups, TILE_TOKENS, block))
        visible = visible.reshape(num_tiles, groups * TILE_TOKENS, block)
        return state.add(grouped, keys, values, visible, rule, precision)

    live = length > 0
    end = jnp.max(jnp.where(live, position + length + block - 1, 0)) // block
    first = jnp.min(jnp.where(live, rule.first_visible(position), end * block)) // block
    state = OnlineSoftmax.empty(num_tiles, kv_heads, groups * TILE_TOKENS, dim)
    state = lax.fori_loop(jnp.minimum(first, end), end, add_block, state)
    if sinks is not None:
        sinks = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, groups), TILE_TOKENS, axis=1)
    out = state.result(sinks).reshape(num_tiles, kv_heads, groups, TILE_TOKENS, dim)
    return out.transpose(0, 3, 1, 2, 4).reshape(num_tiles, TILE_TOKENS, heads, dim)
