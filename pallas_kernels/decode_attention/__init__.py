"""Attention of one new token per sequence over its paged keys and values."""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.decode_attention.mosaic import MAX_GROUP, decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.decode_attention.reference import decode_attention_reference
from tokenspeed_jax.pallas_kernels.decode_attention.xla import decode_attention_xla
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    check_pages,
    check_sinks,
    check_vectors,
    choose_implementation,
    hopper_refusal,
    shape_refusal,
)
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule
from tokenspeed_jax.pallas_kernels.triton_calls import triton_missing

__all__ = ["decode_attention", "mosaic_refusal"]


def mosaic_refusal(
    *, num_heads: int, num_kv_heads: int, head_dim: int, tokens_per_page: int, dtype: str, kv_dtype: str
) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve these layers on the default device; None when it can."""
    refusal = hopper_refusal() or shape_refusal(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tokens_per_page=tokens_per_page,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    if refusal is None and num_heads // num_kv_heads > MAX_GROUP:
        return f"{num_heads // num_kv_heads} query heads per KV head exceed {MAX_GROUP}"
    return refusal


def decode_attention(
    q: Float[Array, "batch heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    *,
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch heads dim"]:
    """Each row's query, at position `kv_lens - 1`, attends to the keys of its pages up to itself.

    The step's own keys and values are in the pages already. Softmax in float32.

    Args:
        q: one query per row, any float dtype.
        k, v: pages `[tokens, kv heads, dim]`; query head i reads KV head `i // (heads // kv heads)`.
        page_table: kernel page ids, column c for tokens `[c * tokens_per_page, (c + 1) * tokens_per_page)`. 0 is the
            null page, allowed only where the row sees nothing: below its window or beyond its length.
        kv_lens: tokens of each row, this step's included; 0 marks a padding row, whose output is zeros.
        sinks: a logit per query head that joins the softmax's denominator and brings no value, any float dtype.
        scale, sliding_window, soft_cap: see `ScoreRule`.
        implementation: None takes the fastest that serves the call.

    Returns:
        The attended values, in `q`'s dtype.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    rule = ScoreRule(scale, sliding_window, soft_cap)
    check_implementation(implementation)
    check_pages(q, k, v)
    check_sinks(sinks, q.shape[1])
    rows = q.shape[0]
    check_vectors(page_table, {"kv_lens": (kv_lens, rows)})
    if page_table.shape[0] != rows:
        raise ValueError(f"page_table has {page_table.shape[0]} rows, q has {rows}")
    refusal = mosaic_refusal(
        num_heads=q.shape[1],
        num_kv_heads=k.page_shape[1],
        head_dim=q.shape[2],
        tokens_per_page=k.tokens_per_page,
        dtype=q.dtype.name,
        kv_dtype=k.dtype,
    )
    # The Triton kernel serves the same layers and is not the faster one: it runs where a call names it.
    implementation = choose_implementation(implementation, refusal, triton_refusal=refusal or triton_missing())
    functions = {
        "reference": decode_attention_reference,
        "xla": decode_attention_xla,
        "mosaic": decode_attention_mosaic,
        "triton": _in_triton,
    }
    with jax.named_scope("decode_attention"):
        return functions[implementation](q, k, v, page_table, kv_lens, rule, sinks)


def _in_triton(*arguments: Any) -> Float[Array, "batch heads dim"]:
    # Imported by the first call, since it imports an optional package.
    from tokenspeed_jax.pallas_kernels.decode_attention.triton import decode_attention_triton

    return decode_attention_triton(*arguments)
