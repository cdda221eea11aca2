"""Latent decode attention in plain JAX: loops over blocks of pages, as long as the rows need.

All heads share the cached rows, so this is attention with one KV head whose values are the first channels of its
keys. As in `decode_attention`, a GPU takes all rows in one loop and a CPU one row after another.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.online_softmax import (
    OnlineSoftmax,
    padded_table,
    pages_per_block,
    product_precision,
)
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

BLOCK_TOKENS = 64


def latent_decode_attention_xla(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    latent_dim: int,
    rule: ScoreRule,
) -> Float[Array, "batch heads latent_dim"]:
    """See `latent_decode_attention`; time grows with the visible rows, memory does not."""
    if jax.default_backend() == "gpu":
        return _attend_rows(q, rows, page_table, kv_lens, latent_dim, rule)

    def add_row(row: Array, out: Array) -> Array:
        one_q, one_table, one_len = (lax.dynamic_slice_in_dim(x, row, 1) for x in (q, page_table, kv_lens))
        attended = _attend_rows(one_q, rows, one_table, one_len, latent_dim, rule)
        return lax.dynamic_update_slice_in_dim(out, attended, row, 0)

    return lax.fori_loop(0, q.shape[0], add_row, jnp.zeros((*q.shape[:2], latent_dim), q.dtype))


def _attend_rows(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    latent_dim: int,
    rule: ScoreRule,
) -> Float[Array, "batch heads latent_dim"]:
    """Attention of rows that walk one loop, to the longest's end."""
    batch, heads, row_dim = q.shape
    pages = pages_per_block(rows.tokens_per_page, BLOCK_TOKENS)
    block = pages * rows.tokens_per_page
    table = padded_table(page_table, pages)
    positions = kv_lens - 1
    grouped = q.astype(jnp.float32)[:, None]
    precision = product_precision(q.dtype)

    def add_block(index: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        ids = lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys = rows.take(ids).reshape(batch, block, 1, row_dim)
        visible = rule.visible(positions[:, None], index * block + jnp.arange(block))
        return state.add(grouped, keys, keys[..., :latent_dim], visible[:, None], rule, precision)

    end = (jnp.max(kv_lens) + block - 1) // block
    state = lax.fori_loop(0, end, add_block, OnlineSoftmax.empty(batch, 1, heads, latent_dim))
    return state.result()[:, 0].astype(q.dtype)
