"""The best experts of each token, for Hopper GPUs, written with Mosaic GPU.

    grid: one block (one warpgroup) for each 64 tokens

    logits[64 tokens, experts] -- TMA --> smem --> registers, a token's row in four threads
    top_k times: highest logit of each row, its lowest index; that logit becomes -inf
    ids, weights <-- registers

A row's ids are those of `jax.lax.top_k`, ties going to the lower index. A row with a NaN gets ids of experts that
exist, and no other row notices.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks

ROWS = 64
MAX_EXPERTS = 256  # 128 registers of a thread
MATRIX = plgpu.Layout.WGMMA
LOG2_E = blocks.LOG2_E
LOWEST = float(jnp.finfo(jnp.float32).min)

Ref = Any


def selection_refusal(num_experts: int) -> str | None:
    """Why the kernel cannot select among so many experts on any GPU; None when it can."""
    if num_experts % 8 or num_experts > MAX_EXPERTS:
        return f"{num_experts} experts are no multiple of 8 up to {MAX_EXPERTS}"
    return None


def select_mosaic(
    logits: Float[Array, "tokens experts"], top_k: int, *, over_all: bool, renormalize: bool, interpret: Any = None
) -> tuple[Int[Array, "tokens top_k"], Float[Array, "tokens top_k"]]:
    """The highest logits' indices and their softmax in float32.

    Args:
        over_all: the softmax is over all experts, otherwise over the selected ones.
        renormalize: the weights of a token are divided by their sum.
    """
    tokens, experts = logits.shape
    rows = min(tokens, ROWS)
    num_blocks = -(-tokens // ROWS)
    shape = (num_blocks * ROWS, top_k)
    kernel = plgpu.kernel(
        functools.partial(_block, rows=rows, tokens=tokens, top_k=top_k, over_all=over_all, renormalize=renormalize),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32)],
        scratch_types={"logits_smem": plgpu.SMEM((ROWS, experts), jnp.float32), "ready": plgpu.Barrier()},
        grid=(num_blocks,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="experts_select",
    )
    ids, weights = kernel(logits.astype(jnp.float32))
    return ids[:tokens], weights[:tokens]


def _block(
    logits_ref: Ref,
    ids_ref: Ref,
    weights_ref: Ref,
    *,
    rows: int,
    tokens: int,
    top_k: int,
    over_all: bool,
    renormalize: bool,
    logits_smem: Ref,
    ready: Ref,
) -> None:
    start = jnp.minimum(lax.axis_index("block") * ROWS, tokens - rows)
    plgpu.copy_gmem_to_smem(logits_ref.at[pl.ds(start, rows)], logits_smem.at[pl.ds(0, rows)], ready)
    plgpu.barrier_wait(ready)
    left = blocks.gpu.load(logits_smem, layout=MATRIX, optimized=False)
    left = jnp.where(left < LOWEST, LOWEST, left)  # so that only what was selected is at -inf
    shape = left.shape
    last = shape[1] - 1
    expert = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=MATRIX)

    def wide(row: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(row, shape, [0])

    tops: list[jax.Array] = []
    total = None
    out_rows = pl.ds(start, ROWS)
    for j in range(top_k):
        top = left.max(axis=1)
        if j == 0 and over_all:
            total = jnp.exp2((left - wide(top)) * LOG2_E).sum(axis=1)
        place = jnp.where(left == wide(top), last - expert, 0).max(axis=1)
        ids_ref[out_rows, j] = last - place
        left = jnp.where(expert == wide(last - place), -jnp.inf, left)
        tops.append(top)
    weights = [jnp.exp2((top - tops[0]) * LOG2_E) for top in tops]
    if total is not None:
        weights = [weight / total for weight in weights]
    if renormalize:
        selected = functools.reduce(lambda a, b: a + b, weights) + 1e-20
        weights = [weight / selected for weight in weights]
    for j, weight in enumerate(weights):
        weights_ref[out_rows, j] = weight
