"""Decode attention as its definition reads: every page gathered, one float32 softmax per query head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule, softmax_with_sinks


@functools.partial(jax.jit, static_argnames=("rule",))
def decode_attention_reference(
    q: Float[Array, "batch heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "batch heads dim"]:
    """See `decode_attention`; costs memory and time for the whole table."""
    batch, heads, dim = q.shape
    kv_heads = k.page_shape[1]
    keys = k.take(page_table).astype(jnp.float32).reshape(batch, -1, kv_heads, dim)
    values = v.take(page_table).astype(jnp.float32).reshape(batch, -1, kv_heads, dim)
    visible = rule.visible((kv_lens - 1)[:, None], jnp.arange(keys.shape[1]))
    grouped = q.astype(jnp.float32).reshape(batch, kv_heads, heads // kv_heads, dim)
    products = jnp.einsum("bhgd,bkhd->bhgk", grouped, keys, precision=lax.Precision.HIGHEST)
    scores = jnp.where(visible[:, None, None], rule.score(products), -jnp.inf)
    weights = jnp.where(visible[:, None, None], softmax_with_sinks(scores, sinks), 0.0)
    values = jnp.where(visible[:, :, None, None], values, 0.0)
    out = jnp.einsum("bhgk,bkhd->bhgd", weights, values, precision=lax.Precision.HIGHEST)
    return out.reshape(q.shape).astype(q.dtype)
