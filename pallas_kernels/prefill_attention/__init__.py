"""Attention of chunks of new tokens, ragged over sequences, over their paged keys and values."""

import jax
from jaxtyping import Array, Float, Int
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    check_pages,
    check_vectors,
)
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention.reference import prefill_attention_reference
from tokenspeed_jax.pallas_kernels.prefill_attention.xla import prefill_attention_xla
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

__all__ = ["prefill_attention"]


def prefill_attention(
    q: Float[Array, "tokens heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    *,
    scale: float,
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
        scale, sliding_window, soft_cap: see `ScoreRule`.
        implementation: None takes the fastest that serves the call.

    Returns:
        The attended values, in `q`'s dtype.

    Raises:
        ValueError: shapes that do not fit, or an implementation that is unknown or cannot serve the call (the
            message says why).
    """
    rule = ScoreRule(scale, sliding_window, soft_cap)
    check_implementation(implementation)
    check_pages(q, k, v)
    rows = page_table.shape[0]
    check_vectors(page_table, {"kv_lens": (kv_lens, rows), "query_starts": (query_starts, rows + 1)})
    if implementation == "reference":
        return prefill_attention_reference(q, k, v, page_table, query_starts, kv_lens, rule)
    with jax.named_scope("prefill_attention"):
        return prefill_attention_xla(q, k, v, page_table, query_starts, kv_lens, rule)
