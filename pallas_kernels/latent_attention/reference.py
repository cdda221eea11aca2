"""Latent attention as its definition reads: every page gathered, one float32 softmax per query head."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

_EXACT = lax.Precision.HIGHEST


@functools.partial(jax.jit, static_argnames=("latent_dim", "rule"))
def latent_decode_attention_reference(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    latent_dim: int,
    rule: ScoreRule,
) -> Float[Array, "batch heads latent_dim"]:
    """See `latent_decode_attention`; costs memory and time for the whole table."""
    batch = q.shape[0]
    keys = rows.take(page_table).astype(jnp.float32).reshape(batch, -1, q.shape[2])
    visible = rule.visible((kv_lens - 1)[:, None], jnp.arange(keys.shape[1]))
    products = jnp.einsum("bhd,bkd->bhk", q.astype(jnp.float32), keys, precision=_EXACT)
    scores = jnp.where(visible[:, None], rule.score(products), -jnp.inf)
    weights = jnp.where(visible[:, None], jax.nn.softmax(scores, axis=-1), 0.0)
    values = jnp.where(visible[:, :, None], keys[..., :latent_dim], 0.0)
    return jnp.einsum("bhk,bkd->bhd", weights, values, precision=_EXACT).astype(q.dtype)


@functools.partial(jax.jit, static_argnames=("rule",))
def latent_prefill_attention_reference(
    q: Float[Array, "tokens heads query_dim"],
    key: Float[Array, "heads nope_dim latent_dim"],
    value: Float[Array, "heads value_dim latent_dim"],
    rows: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
) -> Float[Array, "tokens heads value_dim"]:
    """See `latent_prefill_attention`; costs memory and time for every token times the whole table."""
    latent_dim, nope_dim = key.shape[2], key.shape[1]
    token = jnp.arange(q.shape[0])
    row = jnp.searchsorted(query_starts[1:], token, side="right")
    owned = row < kv_lens.shape[0]
    row = jnp.where(owned, row, 0)
    position = kv_lens[row] - query_starts[row + 1] + token
    cached = rows.take(page_table).astype(jnp.float32).reshape(kv_lens.shape[0], -1, rows.page_shape[2])
    visible = rule.visible(position[:, None], jnp.arange(cached.shape[1])) & owned[:, None]
    cached = jnp.where(visible[:, :, None], cached[row], 0.0)
    latent, shared = cached[..., :latent_dim], cached[..., latent_dim:]
    q_nope, q_rope = q[..., :nope_dim].astype(jnp.float32), q[..., nope_dim:].astype(jnp.float32)
    keys = jnp.einsum("tkl,hnl->tkhn", latent, key.astype(jnp.float32), precision=_EXACT)
    products = jnp.einsum("thn,tkhn->thk", q_nope, keys, precision=_EXACT)
    products += jnp.einsum("thr,tkr->thk", q_rope, shared, precision=_EXACT)
    scores = jnp.where(visible[:, None], rule.score(products), -jnp.inf)
    weights = jnp.where(visible[:, None], jax.nn.softmax(scores, axis=-1), 0.0)
    values = jnp.einsum("tkl,hvl->tkhv", latent, value.astype(jnp.float32), precision=_EXACT)
    return jnp.einsum("thk,tkhv->thv", weights, values, precision=_EXACT).astype(q.dtype)
