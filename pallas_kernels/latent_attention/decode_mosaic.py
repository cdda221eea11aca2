"""Latent decode attention for Hopper GPUs: what its two Mosaic kernels serve, and which of them serves a call.

Up to 32 heads their output fits the registers of one warpgroup, and cached tokens are the matrix rows
(`decode_narrow_mosaic.py`); with more, heads are (`decode_wide_mosaic.py`). Both split rows over multiprocessors.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.latent_attention.decode_narrow_mosaic import MAX_HEADS, latent_decode_narrow_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.decode_wide_mosaic import (
    COMPUTE_WARPGROUPS,
    PAGE,
    latent_decode_wide_mosaic,
)
from tokenspeed_jax.pallas_kernels.latent_attention.splits import choose_splits
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

MAX_ROW_DIM = 576  # channels of a cached row that shared memory has room for


def shape_refusal(
    *, num_heads: int, latent_dim: int, rope_dim: int, tokens_per_page: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why no kernel can serve this geometry on any GPU; None when it can."""
    half = COMPUTE_WARPGROUPS * blocks.CHUNK
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16, which the matrix units take"
    if jnp.dtype(cache_dtype) != jnp.dtype(dtype):
        return f"pages of {cache_dtype} differ from queries of {dtype}"
    if latent_dim % half or rope_dim % blocks.CHUNK or not rope_dim or latent_dim + rope_dim > MAX_ROW_DIM:
        return (
            f"rows of {latent_dim} + {rope_dim} channels are not multiples of {half} and {blocks.CHUNK}, together at "
            f"most {MAX_ROW_DIM}"
        )
    if tokens_per_page != PAGE:
        return f"pages hold {tokens_per_page} tokens, the kernel takes {PAGE}"
    if num_heads > blocks.ROWS and num_heads % blocks.ROWS:
        return f"{num_heads} heads are more than {blocks.ROWS} and no multiple of it"
    return None


def latent_decode_attention_mosaic(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    latent_dim: int,
    rule: ScoreRule,
    *,
    splits: int | None = None,
    interpret: Any = None,
) -> Float[Array, "batch heads latent_dim"]:
    """See `latent_decode_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU.

    Args:
        splits: blocks that share one row (and tile of 64 heads, if there are many).
    """
    batch, heads, _ = q.shape
    narrow = heads <= MAX_HEADS
    if splits is None:
        head_tiles = 1 if narrow else -(-heads // blocks.ROWS)
        splits = choose_splits(rows=batch, head_tiles=head_tiles, columns=page_table.shape[1])
    kernel = latent_decode_narrow_mosaic if narrow else latent_decode_wide_mosaic
    return kernel(q, rows, page_table, kv_lens, latent_dim, rule, splits=splits, interpret=interpret)
