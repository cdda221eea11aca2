"""Prefill attention as its definition reads: every token gathers its whole row, one float32 softmax per head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule, softmax_with_sinks


def token_rows(
    query_starts: Int[Array, " rows_and_end"], kv_lens: Int[Array, " rows"], num_tokens: int
) -> tuple[Int[Array, " tokens"], Int[Array, " tokens"], Bool[Array, " tokens"]]:
    """Row, position in its row, and whether it is real, of each token of the step."""
    tokens = jnp.arange(num_tokens)
    row = jnp.searchsorted(query_starts, tokens, side="right") - 1
    row = jnp.clip(row, 0, kv_lens.shape[0] - 1)
    position = kv_lens[row] - query_starts[row + 1] + tokens
    return row, position, tokens < query_starts[-1]


@functools.partial(jax.jit, static_argnames=("rule",))
def prefill_attention_reference(
    q: Float[Array, "tokens heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "tokens heads dim"]:
    """See `prefill_attention`; costs memory for tokens x table width."""
    num_tokens, heads, dim = q.shape
    kv_heads = k.page_shape[1]
    row, position, real = token_rows(query_starts, kv_lens, num_tokens)
    keys = k.take(page_table[row]).astype(jnp.float32).reshape(num_tokens, -1, kv_heads, dim)
    values = v.take(page_table[row]).astype(jnp.float32).reshape(num_tokens, -1, kv_heads, dim)
    visible = rule.visible(position[:, None], jnp.arange(keys.shape[1])) & real[:, None]
    grouped = q.astype(jnp.float32).reshape(num_tokens, kv_heads, heads // kv_heads, dim)
    products = jnp.einsum("thgd,tkhd->thgk", grouped, keys, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible[:, None, None], rule.score(products), -jnp.inf)
    weights = jnp.where(visible[:, None, None], softmax_with_sinks(scores, sinks), 0.0)
    values = jnp.where(visible[:, :, None, None], values, 0.0)
    out = jnp.einsum("thgk,tkhd->thgd", weights, values, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
