"""Decode attention in plain JAX: loops over blocks of pages, as long as the rows need.

A GPU takes all rows in one loop. A CPU takes them one after another: it gains nothing from the batch, spends no work
on the blocks of longer rows, and what a row gets depends, bit for bit, on nothing beside it. The grid of blocks is
fixed in the row, and blocks that a row does not see leave its state untouched.
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


def decode_attention_xla(
    q: Float[Array, "batch heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads dim"]:
    """See `decode_attention`; time grows with the visible keys, memory does not."""
    if jax.default_backend() == "gpu":
        return _attend_rows(q, k, v, page_table, kv_lens, rule, sinks)

    def add_row(row: Array, out: Array) -> Array:
        one_q, one_table, one_len = (lax.dynamic_slice_in_dim(x, row, 1) for x in (q, page_table, kv_lens))
        attended = _attend_rows(one_q, k, v, one_table, one_len, rule, sinks)
        return lax.dynamic_update_slice_in_dim(out, attended, row, 0)

    return lax.fori_loop(0, q.shape[0], add_row, jnp.zeros_like(q))


def _attend_rows(
    q: Float[Array, "rows heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "rows heads dim"]:
    """Attention of rows that walk one loop, from the first block that any of them sees to the longest's end."""
    rows, heads, dim = q.shape
    tokens, kv_heads, _ = k.page_shape
    pages = pages_per_block(tokens, BLOCK_TOKENS)
    block = pages * tokens
    table = padded_table(page_table, pages)
    positions = kv_lens - 1
    grouped = q.astype(jnp.float32).reshape(rows, kv_heads, heads // kv_heads, dim)
    precision = product_precision(q.dtype)

    def add_block(index: Array, state: OnlineSoftmax) -> OnlineSoftmax:
        ids = lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)
        keys = k.take(ids).reshape(rows, block, kv_heads, dim)
        values = v.take(ids).reshape(rows, block, kv_heads, dim)
        visible = rule.visible(positions[:, None], index * block + jnp.arange(block))
        return state.add(grouped, keys, values, visible[:, None], rule, precision)

    end = (jnp.max(kv_lens) + block - 1) // block
    # Padding rows see nothing, so they must not pull the first block down to 0.
    first = jnp.min(jnp.where(kv_lens > 0, rule.first_visible(positions) // block, end))
    state = OnlineSoftmax.empty(rows, kv_heads, heads // kv_heads, dim)
    state = lax.fori_loop(first, end, add_block, state)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, heads // kv_heads)
    return state.result(sinks).reshape(q.shape).astype(q.dtype)
