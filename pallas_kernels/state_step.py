"""One token of a recurrence with a matrix state for Hopper GPUs, written with Mosaic GPU: states stay in their plane.

    grid: (row, head, 64 of the state's rows); one block = one warpgroup, four or more share a multiprocessor

    plane (float32)              shared memory            registers
    ---------------              -------------            ---------
    S[source, head, part] -TMA-> S [64, K] swizzled       meanwhile loads q, k [K], v [64], decay, strength
                                                          waits for S; zeros instead where source <= 0
                                                          S = S * decay
                                                          d = strength (v - S k)     (v in a recurrence without)
                                                          S = S + d k^T;  o = S q
    S[target, head, part] <-TMA- S [64, K]  <-----------  the whole tile is in registers before any of it is stored
    out[row, head, part]  <-TMA- o [64]     <-----------

Memory sets the pace: a state is read once and written once. A block's tile is read before it is written, and no two
rows share a target, so source and target may be the same block. Rows of padding (target <= 0) touch no state and
store zeros as output.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView

TILE = 64  # rows of the state (channels of the value) a block holds
SWIZZLED_LINES = 8  # TMA can swizzle only what starts at a whole tile
KEY_DIMS = (64, 128)
# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any


def state_step_refusal(states: BlockView) -> str | None:
    """Why the kernel cannot serve these states on any GPU; None when it can."""
    _, value_dim, key_dim = states.shape
    piece = SWIZZLED_LINES * key_dim * states.itemsize
    if jnp.dtype(states.dtype) != jnp.float32:
        return f"states of {states.dtype} are not float32"
    if key_dim not in KEY_DIMS:
        return f"key dim {key_dim} is none of {KEY_DIMS}"
    if value_dim % TILE:
        return f"value dim {value_dim} is no multiple of {TILE}"
    if states.stride_bytes % piece or states.offset_bytes % piece:
        return (
            f"blocks every {states.stride_bytes} bytes from {states.offset_bytes} do not start at multiples of {piece}"
        )
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def state_step_mosaic(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    log_decay: Float[Array, "tokens heads"] | Float[Array, "tokens heads key_dim"],
    beta: Float[Array, "tokens heads"] | None,
    states: BlockView,
    source_blocks: Int[Array, " tokens"],
    target_blocks: Int[Array, " tokens"],
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """The gated delta rule's step, or linear attention's where `beta` is None; `interpret` runs it on a CPU."""
    tokens, heads, value_dim = v.shape
    key_dim = q.shape[2]
    line = key_dim * states.itemsize
    plane = jax.new_ref(_lines(states))
    kernel = plgpu.kernel(
        functools.partial(
            _block,
            lines_per_block=states.stride_bytes // line,
            first_line=states.first_row * (states.stride_bytes // line) + states.offset_bytes // line,
            repeats=heads // q.shape[1],
            corrected=beta is not None,
        ),
        out_type=jax.ShapeDtypeStruct(v.shape, v.dtype),
        scratch_types={
            "tile": plgpu.SMEM((TILE, key_dim), jnp.float32),
            "out_smem": plgpu.SMEM((TILE,), v.dtype),
            "ready": plgpu.Barrier(),
        },
        grid=(tokens, heads, value_dim // TILE),
        grid_names=("row", "head", "part"),
        interpret=interpret,
        kernel_name="state_step",
    )
    strength = () if beta is None else (beta,)
    blocks = (x.astype(jnp.int32) for x in (source_blocks, target_blocks))
    out = kernel(plane, q, k, v, log_decay, *strength, *blocks)
    raw = lax.bitcast_convert_type(jax.freeze(plane), jnp.uint8).reshape(states.plane.shape)
    return out, dataclasses.replace(states, plane=raw)


def _lines(states: BlockView) -> Float[Array, "lines key_dim"]:
    """The whole plane as lines of one state row each; free on a GPU."""
    return lax.bitcast_convert_type(states.plane.reshape(-1, states.shape[2], states.itemsize), jnp.float32)


def _block(
    plane: Ref,
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    decay_ref: Ref,
    *refs: Ref,
    lines_per_block: int,
    first_line: int,
    repeats: int,
    corrected: bool,
    tile: Ref,
    out_smem: Ref,
    ready: Ref,
) -> None:
    beta_refs, (source_ref, target_ref, out_ref) = refs[:-3], refs[-3:]
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    value_dim = v_ref.shape[2]
    source, target = source_ref[row], target_ref[row]
    per_row, per_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
    values = pl.ds(part * TILE, TILE)

    def lines_of(block: jax.Array) -> Any:
        first = first_line + block * lines_per_block + head * value_dim + part * TILE
        return pl.ds(pl.multiple_of(first, SWIZZLED_LINES), TILE)

    def column(ref: Ref, index: jax.Array) -> jax.Array:
        return gpu.load(ref.at[row, index], layout=per_column, optimized=False).astype(jnp.float32)

    @pl.when(target > 0)
    def _live() -> None:
        # A row without history reads the null block, whose contents do not count.
        plgpu.copy_gmem_to_smem(plane.at[lines_of(jnp.maximum(source, 0))], tile, ready)
        key, query = column(k_ref, lax.div(head, repeats)), column(q_ref, lax.div(head, repeats))
        update = gpu.load(v_ref.at[row, head, values], layout=per_row, optimized=False).astype(jnp.float32)
        shape = tile.shape
        if len(decay_ref.shape) == 3:
            decay = lax.broadcast_in_dim(jnp.exp(column(decay_ref, head)), shape, [1])
        else:
            decay = jnp.exp(decay_ref[row, head])
        plgpu.barrier_wait(ready)
        state = plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA)
        state = jnp.where(lax.broadcast_in_dim(source, shape, []) > 0, state, 0.0) * decay
        if corrected:
            seen = (state * lax.broadcast_in_dim(key, shape, [1])).sum(axis=1)
            update = (update - seen) * beta_refs[0][row, head]
        state = state + lax.broadcast_in_dim(update, shape, [0]) * lax.broadcast_in_dim(key, shape, [1])
        tile[...] = state
        out_smem[...] = (state * lax.broadcast_in_dim(query, shape, [1])).sum(axis=1).astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, plane.at[lines_of(target)])

    @pl.when(target <= 0)
    def _padding() -> None:
        out_smem[...] = plgpu.layout_cast(jnp.zeros((TILE,), out_smem.dtype), per_row)
        plgpu.commit_smem()

    plgpu.copy_smem_to_gmem(out_smem, out_ref.at[row, head, values])
    plgpu.wait_smem_to_gmem(0)
