"""Multi-head latent attention over one paged cache of latents that all heads share (arXiv 2405.04434, section 2.1).

A cached row is a token's latent beside its positional key. Decode reads it *absorbed*: the expansion to keys has gone
into the query, the one to values is left to the caller. Prefill *expands* the cached rows to keys and values of all
heads. Both give the same attention.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    check_vectors,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.latent_attention.decode_mosaic import latent_decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.decode_mosaic import shape_refusal as decode_shape_refusal
from tokenspeed_jax.pallas_kernels.latent_attention.decode_xla import latent_decode_attention_xla
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_mosaic import latent_prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_mosaic import shape_refusal as prefill_shape_refusal
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_xla import latent_prefill_attention_xla
from tokenspeed_jax.pallas_kernels.latent_attention.reference import (
    latent_decode_attention_reference,
    latent_prefill_attention_reference,
)
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

__all__ = ["decode_mosaic_refusal", "latent_decode_attention", "latent_prefill_attention", "prefill_mosaic_refusal"]


def decode_mosaic_refusal(
    *, num_heads: int, latent_dim: int, rope_dim: int, tokens_per_page: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve these layers on the default device; None when it can."""
    return hopper_refusal() or decode_shape_refusal(
        num_heads=num_heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        tokens_per_page=tokens_per_page,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def prefill_mosaic_refusal(
    *, nope_dim: int, rope_dim: int, value_dim: int, tokens_per_page: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve prefill of these layers on the default device; None when it can."""
    return hopper_refusal() or prefill_shape_refusal(
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=value_dim,
        tokens_per_page=tokens_per_page,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def latent_decode_attention(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    *,
    latent_dim: int,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "batch heads latent_dim"]:
    """Each row's query, at position `kv_lens - 1`, attends to the latents of its pages up to itself.

    The step's own rows are in the pages already. Softmax in float32.

    Args:
        q: one query per row and head: `nope channels @ key expansion` (latent_dim), then the positional channels.
        rows: pages `[tokens, 1, latent_dim + positional channels]`.
        page_table: kernel page ids, column c for tokens `[c * tokens_per_page, (c + 1) * tokens_per_page)`. 0 is the
            null page, allowed only beyond the row's length.
        kv_lens: tokens of each row, this step's included; 0 marks a padding row, whose output is zeros.
        latent_dim: channels of a row that are its value.
        scale: factor on q.k.
        implementation: None takes the fastest that serves the call.

    Returns:
        The attended latents in `q`'s dtype; a head's value expansion makes its output of them.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    row_dim = _check_rows(rows, latent_dim)
    if q.ndim != 3 or q.shape[2] != row_dim:
        raise ValueError(f"q has shape {q.shape}, expected [batch, heads, {row_dim}]")
    batch, heads, _ = q.shape
    check_vectors(page_table, {"kv_lens": (kv_lens, batch)})
    if page_table.shape[0] != batch:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, q has {batch}")
    implementation = choose_implementation(
        implementation,
        decode_mosaic_refusal(
            num_heads=heads,
            latent_dim=latent_dim,
            rope_dim=row_dim - latent_dim,
            tokens_per_page=rows.tokens_per_page,
            dtype=q.dtype.name,
            cache_dtype=rows.dtype,
        ),
    )
    functions = {
        "reference": latent_decode_attention_reference,
        "xla": latent_decode_attention_xla,
        "mosaic": latent_decode_attention_mosaic,
    }
    with jax.named_scope("latent_decode_attention"):
        return functions[implementation](q, rows, page_table, kv_lens, latent_dim, ScoreRule(scale))


def latent_prefill_attention(
    q: Float[Array, "tokens heads query_dim"],
    key: Float[Array, "heads nope_dim latent_dim"],
    value: Float[Array, "heads value_dim latent_dim"],
    rows: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    *,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """The last tokens of each row attend to the keys and values expanded from the row's latents.

    Which tokens belong to which row, and what each sees, is as in `prefill_attention`.

    Args:
        q: a head's `nope_dim` channels, then the positional ones.
        key, value: the expansions of a latent to each head's key channels and value.
        rows: pages `[tokens, 1, latent_dim + positional channels]`.
        page_table, query_starts: see `prefill_attention`.
        kv_lens: tokens of each row, this step's included; 0 for a row to leave out, whose tokens get zeros.
        scale: factor on q.k.
        implementation: None takes the fastest that serves the call.

    Returns:
        The attended values in `q`'s dtype; zeros for padding tokens.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    heads, nope_dim, latent_dim = key.shape
    row_dim = _check_rows(rows, latent_dim)
    if value.ndim != 3 or (value.shape[0], value.shape[2]) != (heads, latent_dim):
        raise ValueError(f"expansions of keys {key.shape} and of values {value.shape} do not fit together")
    query_dim = nope_dim + row_dim - latent_dim
    if q.ndim != 3 or q.shape[1:] != (heads, query_dim):
        raise ValueError(f"q has shape {q.shape}, expected [tokens, {heads}, {query_dim}]")
    count = page_table.shape[0]
    check_vectors(page_table, {"kv_lens": (kv_lens, count), "query_starts": (query_starts, count + 1)})
    implementation = choose_implementation(
        implementation,
        prefill_mosaic_refusal(
            nope_dim=nope_dim,
            rope_dim=row_dim - latent_dim,
            value_dim=value.shape[1],
            tokens_per_page=rows.tokens_per_page,
            dtype=q.dtype.name,
            cache_dtype=rows.dtype,
        ),
    )
    functions = {
        "reference": latent_prefill_attention_reference,
        "xla": latent_prefill_attention_xla,
        "mosaic": latent_prefill_attention_mosaic,
    }
    with jax.named_scope("latent_prefill_attention"):
        return functions[implementation](q, key, value, rows, page_table, query_starts, kv_lens, ScoreRule(scale))


def _check_rows(rows: PageView, latent_dim: int) -> int:
    _, heads, row_dim = rows.page_shape
    if heads != 1 or row_dim < latent_dim or not jnp.issubdtype(jnp.dtype(rows.dtype), jnp.floating):
        raise ValueError(
            f"pages of {rows.dtype}{rows.page_shape} hold no latents of {latent_dim} channels, one row a token"
        )
    return row_dim
