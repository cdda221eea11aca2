"""Latent prefill attention for Hopper GPUs: keys and values of some heads expanded, a piece at a time, and attended to.

    for each group of heads, for each piece of the rows' cached tokens:
        latents [keys, L + R] <- pages                                 gathered, what is unwritten zeroed  (pieces.py)
        keys and values [keys, heads * (N + V)] <- latents             one product of XLA
        out, state <- all queries' attention to the piece              one launch               (expanded_mosaic.py)

Each cached token is expanded once for each head, however many queries see it. The memory that this takes is bounded:
it depends on the queries, not on the rows' lengths.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.latent_attention.expanded_mosaic import (
    BLOCK,
    GRANULE,
    TILE,
    State,
    Windows,
    attend_expanded,
)
from tokenspeed_jax.pallas_kernels.latent_attention.pieces import ExpansionTiling, RowBlocks, cut_windows
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

MAX_QUERY_DIM = 192  # channels of a head's queries and keys that shared memory has room for
MAX_VALUE_DIM = 128  # channels of a head's values that registers have room for


def shape_refusal(
    *, nope_dim: int, rope_dim: int, value_dim: int, tokens_per_page: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why the kernel cannot serve this geometry on any GPU; None when it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16, which the matrix units take"
    if jnp.dtype(cache_dtype) != jnp.dtype(dtype):
        return f"pages of {cache_dtype} differ from queries of {dtype}"
    dims = (nope_dim, rope_dim, value_dim)
    if any(dim % blocks.CHUNK or not dim for dim in dims):
        return f"{nope_dim} + {rope_dim} channels of keys, {value_dim} of values are not multiples of {blocks.CHUNK}"
    if nope_dim + rope_dim > MAX_QUERY_DIM or value_dim > MAX_VALUE_DIM:
        return (
            f"{nope_dim} + {rope_dim} channels of keys, {value_dim} of values are more than {MAX_QUERY_DIM} and "
            f"{MAX_VALUE_DIM}"
        )
    if not tokens_per_page or BLOCK % tokens_per_page:
        return f"pages hold {tokens_per_page} tokens, no divisor of the {BLOCK} of a block"
    return None


@functools.partial(jax.jit, static_argnames=("rule", "tiling", "interpret"))
def latent_prefill_attention_mosaic(
    q: Float[Array, "tokens heads query_dim"],
    key: Float[Array, "heads nope_dim latent_dim"],
    value: Float[Array, "heads value_dim latent_dim"],
    rows: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    *,
    tiling: ExpansionTiling | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens heads value_dim"]:
    """See `latent_prefill_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    num_tokens, heads, _ = q.shape
    latent_dim = key.shape[2]
    if tiling is None:
        tiling = ExpansionTiling.choose(
            heads=heads,
            rows=kv_lens.shape[0],
            columns=page_table.shape[1],
            page=rows.tokens_per_page,
            bytes_per_key=(key.shape[1] + value.shape[1]) * q.dtype.itemsize,
        )
    padded = max(-(-num_tokens // GRANULE) * GRANULE, blocks.ROWS)
    q = jnp.pad(q, ((0, padded - num_tokens), (0, 0), (0, 0)))
    row_blocks = RowBlocks.of(query_starts, kv_lens)
    windows = cut_windows(query_starts, kv_lens, row_blocks, padded)
    count, group = tiling.piece_blocks, tiling.group_heads
    most = kv_lens.shape[0] * -(-page_table.shape[1] * rows.tokens_per_page // BLOCK)
    out = jax.new_ref(jnp.zeros((padded, heads, value.shape[1]), q.dtype))
    state = _empty_state(windows, group, value.shape[1]) if most > count else None
    # Traced and lowered once for all groups of heads.
    attend = jax.jit(
        functools.partial(attend_expanded, rule=rule, latent_dim=latent_dim, group_heads=group, interpret=interpret)
    )

    def step(first_head: int, piece: Int[Array, ""]) -> None:
        own = slice(first_head, first_head + group)
        cached = row_blocks.cached(rows, page_table, piece * count, count)
        # One product for both: XLA would make one of two, and then copy the parts.
        expansion = jnp.concatenate([key[own].reshape(-1, latent_dim), value[own].reshape(-1, latent_dim)])
        attend(
            q,
            jnp.einsum("kl,el->ke", cached[:, :latent_dim], expansion),
            cached,
            windows._replace(base=windows.base - piece * count),
            jnp.int32(first_head),
            out,
            state,
        )

    for first_head in range(0, heads, group):
        if most <= count:
            step(first_head, jnp.int32(0))
        else:
            pieces = jnp.maximum((row_blocks.starts[-1] + count - 1) // count, 1).astype(jnp.int32)
            lax.fori_loop(0, pieces, lambda piece, _, first_head=first_head: step(first_head, piece), None)
    return jax.freeze(out)[:num_tokens]


def _empty_state(windows: Windows, group: int, value_dim: int) -> State:
    shape = (windows.start.shape[0], group, TILE)
    return State(*(jax.new_ref(jnp.zeros(s, jnp.float32)) for s in ((*shape, value_dim), shape, shape)))
