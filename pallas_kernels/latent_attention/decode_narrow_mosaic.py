"""Latent decode attention with few heads for Hopper GPUs, written with Mosaic GPU: cached tokens as matrix rows.

    grid: (split, row); one block = three warpgroups = one multiprocessor

    loader warpgroup              shared memory                   compute warpgroup w: every second page
    ----------------              -------------                   --------------------------------------
    q[row] -------------- TMA --> q [H, L + R]  ----------------> waits q once
    page ids <- page_table
    waits free[w]
    page ---------------- TMA --> c[w] [64, L + R] -------------> waits ready[w]; S = c[w] q^T (wgmma, [64, H])
                                  p[w] [H, 64] <----------------  P = exp2(S - top)
                                                                  O *= ...; O += c[w][:, :L]^T p[w]^T (wgmma, [L, H])
    ... next page, other slot                                     arrives free[w]

                                  c[w], used as [H, L] <--------  at the end: (O / sum)^T
    out[split, w, row] <--- TMA - c[w]

A cached row (L latent channels, R positional ones) is key and value at once, so a page is loaded once and read twice.
With up to 32 heads the scores of a page are few and the output of all channels fits one warpgroup's registers: the two
warpgroups work as two splits, each with its own page in flight, and never meet. A small XLA fusion merges the outputs
by their log weights. They are rounded to q's dtype before, and each is weighted by at most 1.

What a row does not see of its pages gets weight 0, not skipped: it must be finite.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.latent_attention.splits import NEVER, DecodeKernel, merged
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64
COMPUTE_WARPGROUPS = 2
MAX_HEADS = 32  # more would not fit the registers
REDUCED = 32  # values of each head that meet in shared memory: four warps', in eight lanes
ROW_PIECE = 8  # rows of one swizzled tile
HEADS_PIECE = 16  # heads are padded to a multiple, so that two forms of the kernel serve them all

Ref = Any


class ColumnState(NamedTuple):
    """Running softmax of all heads, in registers: see `mosaic_blocks.RowState`, heads being columns.

    Attributes:
        top: highest score of each head so far, in base-2 units.
        weight: sums of exp2(score - top), of each head and place in a page.
        values: sum of exp2(score - top) * latent.
    """

    top: jax.Array
    weight: jax.Array
    values: jax.Array


@functools.partial(jax.jit, static_argnames=("latent_dim", "rule", "splits", "interpret"))
def latent_decode_narrow_mosaic(
    q: Float[Array, "batch heads row_dim"],
    rows: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    latent_dim: int,
    rule: ScoreRule,
    *,
    splits: int,
    interpret: Any = None,
) -> Float[Array, "batch heads latent_dim"]:
    """See `latent_decode_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU.

    Args:
        splits: blocks that share one row.
    """
    batch, heads, row_dim = q.shape
    padded = -(-heads // HEADS_PIECE) * HEADS_PIECE
    parts = COMPUTE_WARPGROUPS
    scratch = {
        "q_smem": blocks.swizzled(padded, row_dim, dtype=q.dtype),
        "rows_smem": blocks.swizzled(parts, PAGE, row_dim, dtype=q.dtype),
        "p_smem": blocks.swizzled(parts, padded, PAGE, dtype=q.dtype),
        "reduction_smem": plgpu.SMEM((parts, REDUCED * padded), jnp.float32),
        "q_ready": plgpu.Barrier(),
        "ready": plgpu.Barrier(num_barriers=parts),
        "free": plgpu.Barrier(num_barriers=parts),
    }
    static = DecodeKernel(latent_dim, splits, rule, rows.first_row, interpret is not None)
    kernel = plgpu.kernel(
        functools.partial(_block, static=static),
        out_type=[
            jax.ShapeDtypeStruct((splits, parts, batch, padded, latent_dim), q.dtype),
            jax.ShapeDtypeStruct((splits, parts, batch, padded), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(splits, batch),
        grid_names=("split", "row"),
        num_threads=parts + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="latent_decode_attention_narrow",
    )
    q = jnp.pad(q, ((0, 0), (0, padded - heads), (0, 0)))
    out, log_weight = kernel(q, rows.typed(), page_table.astype(jnp.int32), kv_lens.astype(jnp.int32))
    shape = (splits * parts, batch, padded)
    return merged(out.reshape(*shape, latent_dim), log_weight.reshape(shape))[:, :heads].astype(q.dtype)


def _block(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    lens_ref: Ref,
    out_ref: Ref,
    log_ref: Ref,
    *,
    static: DecodeKernel,
    **scratch: Ref,
) -> None:
    split, row = (lax.axis_index(name) for name in ("split", "row"))
    length = lens_ref[row]
    pages = lax.div(length + (PAGE - 1), PAGE)
    share = lax.div(pages + (static.splits - 1), static.splits)
    begin = split * share
    count = jnp.maximum(jnp.minimum(share, pages - begin), 0)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _compute() -> None:
        plgpu.set_max_registers(232, action="increase")
        place = (split, warpgroup, row)
        _attend(out_ref.at[place], log_ref.at[place], warpgroup, begin, count, length, static, scratch)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load_pages(q_ref.at[row], rows_ref, table_ref.at[row], begin, count, static, scratch)


def _load_pages(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    begin: jax.Array,
    count: jax.Array,
    static: DecodeKernel,
    scratch: dict[str, Ref],
) -> None:
    plgpu.copy_gmem_to_smem(q_ref, scratch["q_smem"], scratch["q_ready"])

    def load(step: jax.Array, page: jax.Array) -> jax.Array:
        slot = lax.rem(step, COMPUTE_WARPGROUPS)
        # The next id is fetched before the wait, which hides its latency.
        following = table_ref[begin + jnp.minimum(step + 1, count - 1)]
        pl.when(step >= COMPUTE_WARPGROUPS)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
        plgpu.copy_gmem_to_smem(
            rows_ref.at[page + static.first_row, :, 0], scratch["rows_smem"].at[slot], scratch["ready"].at[slot]
        )
        return following

    @pl.when(count > 0)
    def _pages() -> None:
        lax.fori_loop(0, count, load, table_ref[begin])

    @pl.loop(jnp.maximum(count - COMPUTE_WARPGROUPS, 0), count)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch["free"].at[lax.rem(step, COMPUTE_WARPGROUPS)])


def _attend(
    out_ref: Ref,
    log_ref: Ref,
    own: jax.Array,
    begin: jax.Array,
    count: jax.Array,
    length: jax.Array,
    static: DecodeKernel,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: every second page."""
    heads = scratch["q_smem"].shape[0]
    column = plgpu.Layout.WGMMA.reduce(0)
    state = ColumnState(
        plgpu.layout_cast(jnp.full((heads,), blocks.MASKED, jnp.float32), column),
        plgpu.layout_cast(jnp.zeros((PAGE, heads), jnp.float32), plgpu.Layout.WGMMA),
        plgpu.layout_cast(jnp.zeros((static.latent_dim, heads), jnp.float32), plgpu.Layout.WGMMA),
    )
    plgpu.barrier_wait(scratch["q_ready"])

    def step_through(step: jax.Array, state: ColumnState) -> ColumnState:
        start = (begin + step * COMPUTE_WARPGROUPS + own) * PAGE
        return _added(state, own, lax.div(step, NEVER), length - start, static, scratch)

    steps = lax.div(count + (COMPUTE_WARPGROUPS - 1) - own, COMPUTE_WARPGROUPS)
    state = lax.fori_loop(0, steps, step_through, state)
    weight = _over_tokens("add", state.weight, own, static, scratch)
    taken = weight > 0
    weight = jnp.where(taken, weight, 1.0)
    log_ref[...] = jnp.where(taken, state.top + jnp.log(weight) * blocks.LOG2_E, blocks.MASKED)
    values = (state.values / lax.broadcast_in_dim(weight, state.values.shape, [1])).astype(out_ref.dtype)
    # All warps met in the sum: the own slot is no longer read, and holds the output on its way.
    page, latents = scratch["rows_smem"].at[own], pl.ds(0, static.latent_dim)
    stage = page.at[pl.ds(0, heads), latents].transpose((1, 0))
    stage[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    for first in range(0, heads, ROW_PIECE):  # TMA copies what is contiguous, and shared memory is tiled
        piece = pl.ds(first, ROW_PIECE)
        plgpu.copy_smem_to_gmem(page.at[piece, latents], out_ref.at[piece])
    plgpu.wait_smem_to_gmem(0)


def _over_tokens(
    operation: str, values: jax.Array, own: jax.Array, static: DecodeKernel, scratch: dict[str, Ref]
) -> jax.Array:
    """Sum or maximum over the tokens of a page.

    All four warps of the warpgroup take part, and meet in shared memory. Mosaic would have both warpgroups meet in the
    same place, where neither waits for the other; so each brings its own.
    """
    if static.interpreted:
        return values.max(axis=0) if operation == "max" else values.sum(axis=0)
    result = blocks.gpu.ShapeDtypeStruct(values.shape[1:], values.dtype, layout=plgpu.Layout.WGMMA.reduce(0))

    def reduce(_: Any, values: Any, meeting: Any) -> Any:
        return values.reduce(operation, 0, meeting)

    inlined = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, blocks.gpu.RefType()), return_type=result)
    reduced: Any = inlined(reduce)
    return reduced(values, scratch["reduction_smem"].at[own])


def _added(
    state: ColumnState,
    own: jax.Array,
    zero: jax.Array,
    visible: jax.Array,
    static: DecodeKernel,
    scratch: dict[str, Ref],
) -> ColumnState:
    """The state after the page in the own slot, of which the first `visible` rows count."""
    page, p_smem = scratch["rows_smem"].at[own + zero], scratch["p_smem"].at[own + zero]
    heads = scratch["q_smem"].shape[0]
    plgpu.barrier_wait(scratch["ready"].at[own])

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, page, scratch["q_smem"].transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(multiply, blocks.gpu.ACC((PAGE, heads), jnp.float32))
    scores = scores * (static.rule.scale * blocks.LOG2_E)
    token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
    scores = jnp.where(token < visible, scores, blocks.MASKED)
    top = jnp.maximum(state.top, _over_tokens("max", scores, own, static, scratch))
    keep = jnp.exp2(state.top - top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [1]))
    weight = state.weight * lax.broadcast_in_dim(keep, scores.shape, [1]) + p
    p_smem.transpose((1, 0))[...] = plgpu.layout_cast(p.astype(p_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    kept = state.values * lax.broadcast_in_dim(keep, state.values.shape, [1])
    latents = page.at[:, pl.ds(0, static.latent_dim)]
    if static.interpreted:  # its accumulators cannot be initialised
        values = kept + jnp.dot(latents[...].T, p_smem[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
    else:

        def accumulate(acc: Ref) -> None:
            plgpu.wgmma(acc, latents.transpose((1, 0)), p_smem.transpose((1, 0)))

        values = pl.run_state(accumulate)(blocks.gpu.ACC.init(kept))
    plgpu.barrier_arrive(scratch["free"].at[own])
    return ColumnState(top, weight, values)
