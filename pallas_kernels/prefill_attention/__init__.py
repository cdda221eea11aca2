"""Attention of chunks of new tokens, ragged over sequences, over their paged keys and values."""

import jax
from jaxtyping import Array, Float, Int

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
from tokenspeed_jax.pallas_kernels.prefill_attention.mosaic import prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.prefill_attention.reference import prefill_attention_reference
from tokenspeed_jax.pallas_kernels.prefill_attention.xla import prefill_attention_xla
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

__all__ = ["mosaic_refusal", "prefill_attention"]


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
    return refusal


def prefill_attention(
    q: Float[Array, "tokens heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    *,
    scale: float,
    sinks: Float[Array, " heads"] | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens heads dim"]:
    """The last tokens of each row attend to the keys of the row's pages, each up to its own position.

    Row r owns the tokens `[query_starts[r], query_starts[r + 1])`, the last ones of its `kv_lens[r]` tokens: token j
    of them has position `kv_lens[r] - (query_starts[r + 1] - query_starts[r]) + j`. The step's own keys and values
    are in the pages already. Softmax in float32.

    Args:
        q: the step's tokens, any float dtype.
        k, v: pages `[tokens, kv heads, dim]`; query head i reads KV head `i // (heads // kv heads)`.
        page_table: kernel page ids, column c for tokens `[c * tokens_per_page, (c + 1) * tokens_per_page)`. 0 is the
            null page, allowed only where no token of the row sees anything: below the window, beyond the length.
        query_starts: ascending token offsets, one more than rows; padding rows are empty, and tokens from
            `query_starts[-1]` on are padding, whose output is zeros.
        kv_lens: tokens of each row, this step's included.
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
    rows = page_table.shape[0]
    check_vectors(page_table, {"kv_lens": (kv_lens, rows), "query_starts": (query_starts, rows + 1)})
    implementation = choose_implementation(
        implementation,
        mosaic_refusal(
            num_heads=q.shape[1],
            num_kv_heads=k.page_shape[1],
            head_dim=q.shape[2],
            tokens_per_page=k.tokens_per_page,
            dtype=q.dtype.name,
            kv_dtype=k.dtype,
        ),
    )
    functions = {
        "reference": prefill_attention_reference,
        "xla": prefill_attention_xla,
        "mosaic": prefill_attention_mosaic,
    }
    with jax.named_scope("prefill_attention"):
        return functions[implementation](q, k, v, page_table, query_starts, kv_lens, rule, sinks)
