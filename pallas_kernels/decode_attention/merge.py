"""Merges the pieces of split rows of decode attention, with Mosaic GPU.

grid: (row, KV head, 32 columns of the values); one warpgroup, one element of a tile per thread and register

partials [slot, KV head, heads of the group, dim + 64]: a piece's normalised output, then the log2 of its weight,
the same in 64 columns so that each thread finds the weight of its own element beside it

values [8 pieces, heads, 32] --- TMA ---> ring of boxes ---> online softmax over pieces, 8 at a time, in registers
logs   [8 pieces, heads, 32] --- TMA --->                    (a piece that the row does not have counts nothing)
out[row, KV head]            <-- TMA --- out tile <--------  sum / weight

Rows of one piece are in `out` already, and their blocks end at once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from tokenspeed_jax.pallas_kernels.decode_attention.pieces import DecodeTiling, RowCut
from tokenspeed_jax.pallas_kernels.mosaic_blocks import CHUNK, MASKED
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

COLUMNS = 32  # a row of a tile is one line of memory
HEADS = 4  # heads of a tile are a multiple: a warpgroup has 128 threads
BOX_ELEMENTS = 32  # heads x pieces of one copy
STAGES = 6

Ref = Any


def partial_shape(
    rows: int, kv_heads: int, group: int, head_dim: int, tiling: DecodeTiling
) -> tuple[int, int, int, int]:
    """Shape of the partials; slot `row * most_pieces + piece`, and room for a whole box behind the last."""
    heads = -(-group // HEADS) * HEADS
    return rows * tiling.most_pieces + _box_pieces(heads, tiling) - 1, kv_heads, heads, head_dim + CHUNK


def _box_pieces(heads: int, tiling: DecodeTiling) -> int:
    return max(1, min(BOX_ELEMENTS // heads, tiling.most_pieces))


def merge_pieces(
    out: Float[Array, "rows kv_heads group dim"],
    partials: Float32[Array, "slots kv_heads heads columns"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    tiling: DecodeTiling,
    *,
    interpret: Any = None,
) -> Float[Array, "rows kv_heads group dim"]:
    """The rows' outputs, in place of `out`.

    Args:
        out: right already for rows of one piece, which stay as they are.
        partials: see `partial_shape`; slots of pieces that a row does not have may hold anything.
        kv_lens: int32.
    """
    rows, kv_heads, group, dim = out.shape
    heads = partials.shape[2]
    box = _box_pieces(heads, tiling)
    stages = min(-(-tiling.most_pieces // box), STAGES)
    kernel = plgpu.kernel(
        functools.partial(_merge_row, rule=rule, tiling=tiling, group=group),
        out_type=(),
        scratch_types={
            "values_smem": plgpu.SMEM((stages, box, heads, COLUMNS), jnp.float32),
            "logs_smem": plgpu.SMEM((stages, box, heads, COLUMNS), jnp.float32),
            "out_smem": plgpu.SMEM((heads, COLUMNS), out.dtype),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        },
        grid=(rows, kv_heads, dim // COLUMNS),
        grid_names=("row", "head", "columns"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="merge_decode_pieces",
    )
    merged = jax.new_ref(out)
    kernel(partials, kv_lens, merged)
    return jax.freeze(merged)


def _merge_row(
    partials_ref: Ref,
    lens_ref: Ref,
    out_ref: Ref,
    *,
    rule: ScoreRule,
    tiling: DecodeTiling,
    group: int,
    values_smem: Ref,
    logs_smem: Ref,
    out_smem: Ref,
    ready: Ref,
) -> None:
    row, head, column = (lax.axis_index(name) for name in ("row", "head", "columns"))
    stages, box, heads, _ = values_smem.shape
    pieces = RowCut.of(lens_ref[row], rule, tiling).pieces
    boxes = jnp.where(pieces == 1, 0, lax.div(pieces + (box - 1), box))
    dim = partials_ref.shape[-1] - CHUNK
    own = pl.ds(column * COLUMNS, COLUMNS)

    def load(i: int | jax.Array, slot: int | jax.Array) -> None:
        slots = pl.ds(row * tiling.most_pieces + i * box, box)
        plgpu.copy_gmem_to_smem(partials_ref.at[slots, head, :, own], values_smem.at[slot], ready.at[slot])
        logs = pl.ds(dim, COLUMNS)
        plgpu.copy_gmem_to_smem(partials_ref.at[slots, head, :, logs], logs_smem.at[slot], ready.at[slot])

    for i in range(stages):
        pl.when(i < boxes)(functools.partial(load, i, i))

    def add(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, weight, out = state
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(ready.at[slot])
        exists = [jnp.full((heads, COLUMNS), i * box + j, jnp.int32) < pieces for j in range(box)]
        logs = [jnp.where(exists[j], logs_smem[slot, j], MASKED) for j in range(box)]
        values = [jnp.where(exists[j], values_smem[slot, j], 0.0) for j in range(box)]
        # Plain reads must be fenced from the copy that follows.
        plgpu.commit_smem()
        pl.when(i + stages < boxes)(functools.partial(load, i + stages, slot))
        higher = functools.reduce(jnp.maximum, logs, top)
        keep = jnp.exp2(top - higher)
        weight, out = weight * keep, out * keep
        for log, value in zip(logs, values, strict=True):
            share = jnp.exp2(log - higher)
            weight, out = weight + share, out + share * value
        return higher, weight, out

    def tile(value: float) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED((heads, COLUMNS), vec_size=1)
        return plgpu.layout_cast(jnp.full((heads, COLUMNS), value, jnp.float32), layout)

    _, weight, out = lax.fori_loop(0, boxes, add, (tile(MASKED), tile(0.0), tile(0.0)))

    @pl.when(boxes > 0)
    def _store() -> None:
        out_smem[...] = (out / weight).astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, group)], out_ref.at[row, head, :, own])
        plgpu.wait_smem_to_gmem(0)
