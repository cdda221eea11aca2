"""The walk over a step's chunks for Hopper GPUs, written with Mosaic GPU: a row's state stays in registers throughout.

    XLA, all chunks at once: the terms of every chunk (`ChunkTerms`), 16-bit what is multiplied, transposed what is not

    grid: (row, head, 64 of the state's rows); one block = two warpgroups

    loader warpgroup                         shared memory, `STAGES` slots          compute warpgroup
    ----------------                         -----------------------------          -----------------
    initial[row, head, part] ------- TMA --> tile [64, K] (float32) ------------->  S [64, K], float32 registers
    waits free[slot]
    corrections, updates of a chunk  TMA --> w [64, K], u [64, 64] -------------->  waits ready[slot]
    reads, products, keys of it ---- TMA --> q, k [64, K], p [64, 64]               D^T = u - S w^T          (wgmma)
    ... next chunk, next slot                                                       O^T = S q^T + D^T p^T    (wgmma)
                                                                                    S = S * decay + D^T k    (wgmma)
                                                                                    arrives free[slot]
    out[chunk, head, part] <-------- TMA --- out [64, 64] (transposed) <----------  O^T
    states[body or final] <--------- TMA --- tile [64, K] <-----------------------  S, at the end of body and tail

With values as the rows of every product the state and the updates are left operands, which come from registers: the
accumulator of one product is the operand of the next. The float32 state is multiplied as the sum of two 16-bit numbers;
the updates are rounded to 16 bits, as the operands that XLA prepared are.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.chunked_states import CHUNK, ChunkTerms
from tokenspeed_jax.pallas_kernels.chunks import Chunks
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows

TILE = blocks.ROWS  # rows of the state (channels of the value) a block holds
STAGES = 2
KEY_DIMS = (64, 128)
PARTS = 2  # of a row: body and tail

Ref = Any


def state_scan_refusal(*, key_dim: int, value_dim: int, dtype: jnp.dtype | str) -> str | None:
    """Why the kernel cannot serve inputs of this shape on any GPU; None when it can."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"values of {jnp.dtype(dtype)} are not bfloat16, the range and precision that its products have"
    if key_dim not in KEY_DIMS:
        return f"key dim {key_dim} is none of {KEY_DIMS}"
    if value_dim % TILE:
        return f"value dim {value_dim} is no multiple of {TILE}"
    return None


def state_scan_mosaic(
    terms_of: Callable[[Any], ChunkTerms],
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    dtype: jnp.dtype,
    *,
    interpret: Any = None,
) -> RecurrentResult:
    """As `walk_chunks`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    chunks = Chunks.cut(rows, num_tokens, CHUNK)
    terms = terms_of(jax.tree.map(chunks.gather, inputs))
    bodies = (rows.body_lengths + CHUNK - 1) // CHUNK
    numbers = jnp.arange(rows.num_rows)
    begins, ends = (jnp.searchsorted(chunks.rows, numbers, side=side) for side in ("left", "right"))
    bounds = jnp.stack([begins, begins + bodies, ends]).astype(jnp.int32)
    out, states = _scan(terms, initial_states.astype(jnp.float32), bounds, dtype=jnp.dtype(dtype), interpret=interpret)
    return RecurrentResult(chunks.restore(jnp.transpose(out, (0, 3, 1, 2))), states[0], states[1])


@functools.partial(jax.jit, static_argnames=("dtype", "interpret"))
def _scan(
    terms: ChunkTerms,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    bounds: Int[Array, "3 rows"],
    *,
    dtype: jnp.dtype,
    interpret: Any,
) -> tuple[Float[Array, "chunks heads value_dim size"], Float[Array, "2 rows heads value_dim key_dim"]]:
    """Outputs and the states at the ends of bodies and rows.

    Args:
        bounds: of each row, its first chunk, the first of its tail and the first of the next row.
    """
    rows, heads, value_dim, key_dim = initial_states.shape
    chunks = terms.reads.shape[0]
    operands = {"q": terms.reads, "p": terms.products, "k": terms.keys}
    if terms.corrections is not None:
        operands["w"] = -terms.corrections
    names = tuple(operands)
    scratch = {
        f"{name}_smem": blocks.swizzled(STAGES, *operand.shape[2:], dtype=dtype) for name, operand in operands.items()
    }
    kernel = plgpu.kernel(
        functools.partial(_block, names=names, interpreted=interpret is not None),
        out_type=(
            jax.ShapeDtypeStruct((chunks, heads, value_dim, CHUNK), dtype),
            jax.ShapeDtypeStruct((PARTS, *initial_states.shape), jnp.float32),
        ),
        scratch_types=scratch
        | {
            "u_smem": blocks.swizzled(STAGES, TILE, CHUNK, dtype=dtype),
            "out_smem": blocks.swizzled(TILE, CHUNK, dtype=dtype),
            "tile": plgpu.SMEM((TILE, key_dim), jnp.float32),
            "tile_ready": plgpu.Barrier(),
            "ready": plgpu.Barrier(num_arrivals=len(names) + 1, num_barriers=STAGES),
            "free": plgpu.Barrier(num_barriers=STAGES),
        },
        grid=(rows, heads, value_dim // TILE),
        grid_names=("row", "head", "part"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="state_scan",
    )
    updates = jnp.swapaxes(terms.updates, 2, 3).astype(dtype)
    decay = terms.decay[:, :, 0] if terms.decay.shape[3] > 1 else terms.decay[:, :, 0, 0]
    return kernel(initial_states, bounds, decay, updates, *(x.astype(dtype) for x in operands.values()))


def _block(
    initial_ref: Ref,
    bounds_ref: Ref,
    decay_ref: Ref,
    updates_ref: Ref,
    *refs: Ref,
    names: tuple[str, ...],
    interpreted: bool,
    **scratch: Ref,
) -> None:
    operands, (out_ref, states_ref) = dict(zip(names, refs[:-2], strict=True)), refs[-2:]
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    bounds = tuple(bounds_ref[i, row] for i in range(PARTS + 1))
    values = pl.ds(part * TILE, TILE)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute() -> None:
        decay = functools.partial(_decay, decay_ref, head)
        out, states = out_ref.at[:, head, values], states_ref.at[:, row, head, values]
        _walk(decay, out, states, bounds, interpreted, scratch)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _load() -> None:
        plgpu.copy_gmem_to_smem(initial_ref.at[row, head, values], scratch["tile"], scratch["tile_ready"])
        sources = {name: ref.at[:, head] for name, ref in operands.items()}
        _load_chunks(sources | {"u": updates_ref.at[:, head, values]}, bounds, scratch)


def _load_chunks(sources: dict[str, Ref], bounds: tuple[jax.Array, ...], scratch: dict[str, Ref]) -> None:
    count = bounds[-1] - bounds[0]

    @pl.loop(0, count)
    def _chunk(step: jax.Array) -> None:
        slot = lax.rem(step, STAGES)
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
        for name, ref in sources.items():
            plgpu.copy_gmem_to_smem(
                ref.at[bounds[0] + step], scratch[f"{name}_smem"].at[slot], scratch["ready"].at[slot]
            )

    @pl.loop(jnp.maximum(count - STAGES, 0), count)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch["free"].at[lax.rem(step, STAGES)])


def _decay(decay_ref: Ref, head: jax.Array, shape: tuple[int, int], chunk: jax.Array) -> jax.Array:
    """A chunk's decay, for a state of this shape."""
    if len(decay_ref.shape) == 2:
        return decay_ref[chunk, head]
    per_column = plgpu.Layout.WGMMA.reduce(0)
    return lax.broadcast_in_dim(
        blocks.gpu.load(decay_ref.at[chunk, head], layout=per_column, optimized=False), shape, [1]
    )


def _walk(
    decay: Callable[..., jax.Array],
    out_ref: Ref,
    states_ref: Ref,
    bounds: tuple[jax.Array, ...],
    interpreted: bool,
    scratch: dict[str, Ref],
) -> None:
    tile, out_smem = scratch["tile"], scratch["out_smem"]
    plgpu.barrier_wait(scratch["tile_ready"])

    def visit(chunk: jax.Array, state: jax.Array) -> jax.Array:
        slot = lax.rem(chunk - bounds[0], STAGES)
        factor = decay(tile.shape, chunk)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        held = {name: ref.at[slot] for name, ref in scratch.items() if name in _HELD}
        state, out = (_interpreted_chunk if interpreted else _chunk)(state, factor, held)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_smem[...] = out.astype(out_smem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[chunk])
        return state

    def walk_part(part: jax.Array, state: jax.Array) -> jax.Array:
        first = jnp.where(part == 0, bounds[0], bounds[1])
        state = lax.fori_loop(first, jnp.where(part == 0, bounds[1], bounds[2]), visit, state)
        plgpu.wait_smem_to_gmem(0)
        tile[...] = state
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, states_ref.at[part])
        return state

    lax.fori_loop(0, PARTS, walk_part, plgpu.layout_cast(tile[...], plgpu.Layout.WGMMA))
    plgpu.wait_smem_to_gmem(0)


_HELD = ("q_smem", "p_smem", "k_smem", "w_smem", "u_smem")


def _halves(state: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Two 16-bit numbers whose sum is the state, to 16 binary digits."""
    high = state.astype(dtype)
    return high, (state - high.astype(jnp.float32)).astype(dtype)


def _chunk(state: jax.Array, decay: jax.Array, held: dict[str, Ref]) -> tuple[jax.Array, jax.Array]:
    """(state before a chunk) -> (state after it, its transposed outputs)."""
    q, p, k, u = (held[f"{name}_smem"] for name in "qpku")
    halves = _halves(state, q.dtype)
    updates = plgpu.layout_cast(u[...], plgpu.Layout.WGMMA)
    if "w_smem" in held:

        def correct(acc: Ref) -> None:
            for half in halves:
                plgpu.wgmma(acc, half, held["w_smem"].transpose((1, 0)))

        updates = pl.run_state(correct)(blocks.gpu.ACC.init(updates.astype(jnp.float32))).astype(q.dtype)

    def read(acc: Ref) -> jax.Array:
        for half in halves:
            plgpu.wgmma(acc, half, q.transpose((1, 0)))
        plgpu.wgmma(acc, updates, p.transpose((1, 0)))
        return acc[...]

    out = pl.run_scoped(read, blocks.gpu.ACC(u.shape, jnp.float32))
    state = pl.run_state(lambda acc: plgpu.wgmma(acc, updates, k))(blocks.gpu.ACC.init(state * decay))
    return state, out


def _interpreted_chunk(state: jax.Array, decay: jax.Array, held: dict[str, Ref]) -> tuple[jax.Array, jax.Array]:
    """As `_chunk`, for the CPU interpreter, whose wgmma takes no registers."""
    product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
    q, p, k, u = (held[f"{name}_smem"][...] for name in "qpku")
    halves = _halves(state, q.dtype)
    updates = u
    if "w_smem" in held:
        w = held["w_smem"][...]
        updates = (u.astype(jnp.float32) + sum(product(half, w.T) for half in halves)).astype(q.dtype)
    out = sum(product(half, q.T) for half in halves) + product(updates, p.T)
    state = state * decay + product(updates, k)
    plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
    return state, out
