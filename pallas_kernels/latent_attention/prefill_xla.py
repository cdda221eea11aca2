"""Latent prefill attention in plain JAX: tiles of queries, each with its own loop over blocks of pages.

A block's latents are expanded to keys and values of all heads once per tile, so tiles are long where that pays. A tile
walks the blocks up to its last query's own position, on a grid fixed in its row, so what a row gets depends on neither
the table's width nor the rows beside it. Tiles run one after another: with all its heads, one has work for a GPU.
"""

import dataclasses

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


@dataclasses.dataclass(frozen=True)
class ExpansionTiling:
    """How prefill is cut: queries in one tile, keys in one block; the expansion of a block is shared by a tile."""

    tile_tokens: int
    block_tokens: int

    @classmethod
    def choose(cls) -> "ExpansionTiling":
        """Tiles that fill a GPU; on a CPU small ones, since short rows pay for whole tiles."""
        return cls(256, 512) if jax.default_backend() == "gpu" else cls(32, 128)


def latent_prefill_attention_xla(
    q: Float[Array, "tokens heads query_dim"],
    key: Float[Array, "heads nope_dim latent_dim"],
    value: Float[Array, "heads value_dim latent_dim"],
    rows: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    *,
    tiling: ExpansionTiling | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """See `latent_prefill_attention`; time grows with the rows that the tiles see, memory does not."""
    tiling = ExpansionTiling.choose() if tiling is None else tiling
    num_tokens, heads, _ = q.shape
    tiles = QueryTiles.cut(query_starts, kv_lens, num_tokens, tiling.tile_tokens)
    token = jnp.arange(tiling.tile_tokens)
    # Tiles of rows without keys have zeros already; there may be one for each row that decodes in this step.
    busy = (tiles.length > 0) & (tiles.position + tiles.length > 0)
    order = jnp.argsort(~busy, stable=True)

    def add_tile(index: Array, out: Array) -> Array:
        """Writes one tile's outputs; a partial tile writes only its own tokens."""
        row, start, length, position = (column[order[index]] for column in tiles[:4])
        queries = q.at[start + token].get(mode="clip").swapaxes(0, 1)
        result = _tile_output(queries, key, value, rows, page_table[row], length, position, rule, tiling)
        target = jnp.where(token < length, start + token, num_tokens)
        return out.at[target].set(result.swapaxes(0, 1).astype(q.dtype), mode="drop")

    out = jnp.zeros((num_tokens, heads, value.shape[1]), q.dtype)
    return lax.fori_loop(0, busy.sum(dtype=jnp.int32), add_tile, out)


def _tile_output(
    queries: Float[Array, "heads tile query_dim"],
    key: Float[Array, "heads nope_dim latent_dim"],
    value: Float[Array, "heads value_dim latent_dim"],
    rows: PageView,
    table: Int[Array, " columns"],
    length: Int[Array, ""],
    position: Int[Array, ""],
    rule: ScoreRule,
    tiling: ExpansionTiling,
) -> Float32[Array, "heads tile value_dim"]:
    """Attention of one tile; tokens beyond its length hold what nobody reads."""
    heads, tile_tokens, _ = queries.shape
    latent_dim = key.shape[2]
    pages = pages_per_block(rows.tokens_per_page, tiling.block_tokens)
    block = pages * rows.tokens_per_page
    table = padded_table(table[None], pages)[0]
    token = jnp.arange(tile_tokens)
    precision = product_precision(queries.dtype)
    grouped = queries.astype(jnp.float32)[None]

    def add_block(index: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        ids = lax.dynamic_slice_in_dim(table, index * pages, pages)
        places = index * block + jnp.arange(block)
        # Rows beyond the sequence may hold anything, NaN included, which expansion would spread.
        written = (places < position + length)[:, None]
        cached = jnp.where(written, rows.take(ids).reshape(block, -1).astype(queries.dtype), 0)
        latent, shared = cached[:, :latent_dim], cached[:, latent_dim:]
        keys = jnp.einsum("kl,hnl->khn", latent, key, precision=precision)
        shared = jnp.broadcast_to(shared[:, None], (block, heads, shared.shape[-1]))
        keys = jnp.concatenate([keys, shared], axis=-1)[None]
        values = jnp.einsum("kl,hvl->khv", latent, value, precision=precision)[None]
        visible = rule.visible((position + token)[:, None], places) & (token < length)[:, None]
        return state.add(grouped, keys, values, visible[None], rule, precision)

    end = (position + length + block - 1) // block
    state = lax.fori_loop(0, end, add_block, OnlineSoftmax.empty(1, heads, tile_tokens, value.shape[1]))
    return state.result()[0]
