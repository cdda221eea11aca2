"""Latent attention over paged caches: a row's single new token reads the latents absorbed, a chunk of tokens expanded.

For one token the expansion of every cached row would cost far more than the attention itself, so it goes into the
query and the output instead. A chunk shares the expansion among its tokens and saves on every product. A step with
chunks may hold decoding rows as well; each row gets the form that suits it, whatever stands beside it.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import LatentAttentionSpec, LatentExpansion
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from tokenspeed_jax.pallas_kernels.pages import PageView


def attend_latent_pages(
    q: Float[Array, "tokens heads query_dim"],
    cached: PageView,
    expansion: LatentExpansion,
    layer: LatentAttentionSpec,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"] | None,
    kv_lens: Int[Array, " rows"],
    *,
    implementation: Implementation | None,
) -> Float[Array, "tokens heads value_dim"]:
    """Attention of the last tokens of each row over its pages, the step's own rows included.

    Args:
        q: a head's `nope_dim` channels, then its `rope_dim` channels.
        cached: pages `[tokens, 1, latent_dim + rope_dim]`, after the step's rows were written.
        query_starts: where each row's tokens begin, as in `prefill_attention`; None when every row has exactly one.
        kv_lens: tokens of each row, this step's included; 0 for a padding row.
        implementation: attention kernels to use; None takes the fastest that serves the call.

    Returns:
        Zeros for padding tokens.
    """
    if query_starts is None:
        return _absorbed(q, cached, expansion, layer, page_table, kv_lens, implementation)
    last = query_starts[1:] - 1
    single = query_starts[1:] - query_starts[:-1] == 1
    chunks = latent_prefill_attention(
        q,
        expansion.key,
        expansion.value,
        cached,
        page_table,
        query_starts,
        jnp.where(single, 0, kv_lens),
        scale=layer.scale,
        implementation=implementation,
    )
    singles = q.at[last].get(mode="clip")
    decoded = _absorbed(singles, cached, expansion, layer, page_table, jnp.where(single, kv_lens, 0), implementation)
    return chunks.at[jnp.where(single, last, q.shape[0])].set(decoded, mode="drop")


def _absorbed(
    q: Float[Array, "rows heads query_dim"],
    cached: PageView,
    expansion: LatentExpansion,
    layer: LatentAttentionSpec,
    page_table: Int[Array, "rows columns"],
    kv_lens: Int[Array, " rows"],
    implementation: Implementation | None,
) -> Float[Array, "rows heads value_dim"]:
    q_nope, q_rope = jnp.split(q, (layer.nope_dim,), axis=-1)
    absorbed = jnp.concatenate([jnp.einsum("rhn,hnl->rhl", q_nope, expansion.key), q_rope], axis=-1)
    latents = latent_decode_attention(
        absorbed,
        cached,
        page_table,
        kv_lens,
        latent_dim=layer.latent_dim,
        scale=layer.scale,
        implementation=implementation,
    )
    return jnp.einsum("rhl,hvl->rhv", latents, expansion.value)
