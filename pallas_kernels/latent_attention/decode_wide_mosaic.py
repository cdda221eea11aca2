"""Latent decode attention with many heads for Hopper GPUs, written with Mosaic GPU: heads as matrix rows.

    grid: (split, row, tile of 64 heads); one block = three warpgroups = one multiprocessor

    loader warpgroup              shared memory, w = 0, 1            compute warpgroup w, o = the other
    ----------------              -----------------------            ----------------------------------
    q[row, heads] ------- TMA --> q [64, L + R] (used rows) ------>  waits q once
    page ids <- page_table
    waits near_free[w]
    page w, half w of L - TMA --> c[w], half w ------------------->  waits near_ready[w]; S = q c[w]^T (wgmma)
    waits far_free[w]
    page w, the rest ---- TMA --> c[w], half o and R[w] ---------->  waits far_ready[w];  S += ...
    ... next pair of pages                                           then, each its own way:

    compute warpgroup 0                      shared memory           compute warpgroup 1
    -------------------                      -------------           -------------------
    top = highest of S and all before -----> tops[0] ------------->  waits top_known; top = highest of S and that
    P = exp2(S - top) ---------------------> R[0]                    P = exp2(S - top)
    O *= ...; O += P c[0][:, half 0]         R[1] <----------------  O *= ...
    frees near[0]                            R[0] ---------------->  waits weights_known[0]; O += P[0] c[0][:, half 1]
    waits weights_known[1] <---------------- R[1], tops[1]           frees far[0]
    O *= ...; O += P[1] c[1][:, half 0]                              O *= ...; O += P c[1][:, half 1]
    frees far[1]                                                     frees near[1]

    out[split, row, heads] <--- TMA -------- q <-------------------  at the end, once both are done with q: O / sum

A cached row (L latent channels, R positional ones) is key and value at once, so a page is loaded once and read twice.
The output of 64 heads has more columns than one warpgroup has registers for: warpgroup w keeps half w of them, and the
scores of page w. Queries and one pair of pages fill shared memory: the weights take the place of the positional
channels once the scores have read these, and the next pair comes in pieces, each as soon as its place is free. The
highest score goes from warpgroup 0 to warpgroup 1 and on to the next pair's warpgroup 0, so neither waits for the
other before it has products of its own to make.

With several splits a small XLA fusion merges the outputs by their log weights. They are rounded to q's dtype before:
shared memory is full, and each is weighted by at most 1.

What a row does not see of its pages gets weight 0, not skipped: it must be finite. An odd last page is its own partner.
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
from tokenspeed_jax.pallas_kernels.latent_attention.splits import NEVER, DecodeKernel, merged
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64
COMPUTE_WARPGROUPS = 2
ROW_PIECE = 8  # rows of one swizzled tile: heads are padded to whole tiles

Ref = Any


@functools.partial(jax.jit, static_argnames=("latent_dim", "rule", "splits", "interpret"))
def latent_decode_wide_mosaic(
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
        splits: blocks that share one row and tile of heads.
    """
    batch, heads, row_dim = q.shape
    head_tiles = -(-heads // blocks.ROWS)
    tile_heads = min(-(-heads // ROW_PIECE) * ROW_PIECE, blocks.ROWS)
    tiled = jnp.pad(q, ((0, 0), (0, head_tiles * tile_heads - heads), (0, 0)))
    tiled = tiled.reshape(batch, head_tiles, tile_heads, row_dim)
    shape = (splits, batch, head_tiles, tile_heads)
    out_type: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct((*shape, latent_dim), q.dtype)]
    scratch = _scratch(row_dim, latent_dim, q.dtype)
    if splits > 1:
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        scratch["log_smem"] = plgpu.SMEM((blocks.ROWS,), jnp.float32)
    static = DecodeKernel(latent_dim, splits, rule, rows.first_row, interpret is not None)
    kernel = plgpu.kernel(
        functools.partial(_block, static=static),
        out_type=out_type,
        scratch_types=scratch,
        grid=shape[:3],
        grid_names=("split", "row", "tile"),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="latent_decode_attention_wide",
    )
    results = kernel(tiled, rows.typed(), page_table.astype(jnp.int32), kv_lens.astype(jnp.int32))
    out = merged(*results).astype(q.dtype) if splits > 1 else results[0][0]
    return out.reshape(batch, -1, latent_dim)[:, :heads]


def _scratch(row_dim: int, latent_dim: int, dtype: jnp.dtype) -> dict[str, Any]:
    pair, half, rope = COMPUTE_WARPGROUPS, latent_dim // COMPUTE_WARPGROUPS, row_dim - latent_dim
    return {
        "q_smem": blocks.swizzled(pair, blocks.ROWS, half, dtype=dtype),
        "q_rope_smem": blocks.swizzled(blocks.ROWS, rope, dtype=dtype),
        "rows_smem": blocks.swizzled(pair, pair, PAGE, half, dtype=dtype),
        "rope_smem": blocks.swizzled(pair, PAGE, rope, dtype=dtype),
        "tops_smem": plgpu.SMEM((pair, blocks.ROWS), jnp.float32),
        "sums_smem": plgpu.SMEM((pair, blocks.ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=pair + 1),
        "near_ready": plgpu.Barrier(num_barriers=pair),
        "far_ready": plgpu.Barrier(num_arrivals=2, num_barriers=pair),
        "near_free": plgpu.Barrier(num_barriers=pair),
        "far_free": plgpu.Barrier(num_barriers=pair),
        "top_known": plgpu.Barrier(),
        "weights_known": plgpu.Barrier(num_barriers=pair),
        "met": plgpu.Barrier(num_arrivals=pair),
    }


def _block(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    lens_ref: Ref,
    out_ref: Ref,
    *log_ref_and_none: Ref,
    static: DecodeKernel,
    **scratch: Ref,
) -> None:
    split, row, tile = place = tuple(lax.axis_index(name) for name in ("split", "row", "tile"))
    length = lens_ref[row]
    pairs = lax.div(length + (2 * PAGE - 1), 2 * PAGE)
    share = lax.div(pairs + (static.splits - 1), static.splits)
    begin = split * share
    steps = jnp.maximum(jnp.minimum(share, pairs - begin), 0)
    warpgroup = lax.axis_index("warpgroup")
    log_ref = log_ref_and_none[0] if log_ref_and_none else None

    # One branch for each: which columns a warpgroup owns must be known when the kernel is compiled.
    for own in range(COMPUTE_WARPGROUPS):

        @pl.when(warpgroup == own)
        def _compute(own: int = own) -> None:
            plgpu.set_max_registers(232, action="increase")
            _attend(out_ref, log_ref if own == 0 else None, place, own, begin, steps, length, static, scratch)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load_pages(q_ref.at[row, tile], rows_ref, table_ref.at[row], begin, steps, length, static, scratch)


def _half(own: int, static: DecodeKernel) -> Any:
    half = static.latent_dim // COMPUTE_WARPGROUPS
    return pl.ds(own * half, half)


def _load_pages(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    begin: jax.Array,
    steps: jax.Array,
    length: jax.Array,
    static: DecodeKernel,
    scratch: dict[str, Ref],
) -> None:
    heads, row_dim = q_ref.shape
    rope = pl.ds(static.latent_dim, row_dim - static.latent_dim)
    for own in range(COMPUTE_WARPGROUPS):
        target = scratch["q_smem"].at[own, pl.ds(0, heads)]
        plgpu.copy_gmem_to_smem(q_ref.at[:, _half(own, static)], target, scratch["q_ready"])
    plgpu.copy_gmem_to_smem(q_ref.at[:, rope], scratch["q_rope_smem"].at[pl.ds(0, heads)], scratch["q_ready"])
    last_page = jnp.maximum(lax.div(length - 1, PAGE), 0)

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        column = (begin + step) * COMPUTE_WARPGROUPS
        return tuple(table_ref[jnp.minimum(column + i, last_page)] for i in range(COMPUTE_WARPGROUPS))

    def load(step: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The next ids are fetched before the waits, which hide their latency.
        following = page_ids(jnp.minimum(step + 1, steps - 1))
        for own, page in enumerate(pages):
            for part in ("near", "far"):
                pl.when(step > 0)(functools.partial(plgpu.barrier_wait, scratch[f"{part}_free"].at[own]))
                half = own if part == "near" else 1 - own
                page_ref, ready = rows_ref.at[page + static.first_row, :, 0], scratch[f"{part}_ready"].at[own]
                target = scratch["rows_smem"].at[own, half]
                plgpu.copy_gmem_to_smem(page_ref.at[:, _half(half, static)], target, ready)
                if part == "far":
                    target = scratch["rope_smem"].at[own]
                    plgpu.copy_gmem_to_smem(page_ref.at[:, rope], target, ready)
        return following

    @pl.when(steps > 0)
    def _pairs() -> None:
        lax.fori_loop(0, steps, load, page_ids(jnp.int32(0)))
        for name in ("near_free", "far_free"):
            for own in range(COMPUTE_WARPGROUPS):
                plgpu.barrier_wait(scratch[name].at[own])


def _attend(
    out_ref: Ref,
    log_ref: Ref | None,
    place: tuple[jax.Array, ...],
    own: int,
    begin: jax.Array,
    steps: jax.Array,
    length: jax.Array,
    static: DecodeKernel,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: the scores of one page of each pair, and half of the output's columns."""
    q_smem = scratch["q_smem"].at[own]
    plgpu.barrier_wait(scratch["q_ready"])

    def step_through(step: jax.Array, state: blocks.RowState) -> blocks.RowState:
        start = ((begin + step) * COMPUTE_WARPGROUPS + own) * PAGE
        zero = lax.div(step, NEVER)
        scores = _scores(own, zero, static, scratch) * (static.rule.scale * blocks.LOG2_E)
        scores = blocks.visible_columns(scores, jnp.int32(0), length - start)
        return (_first_added, _second_added)[own](state, scores, zero, static, scratch)

    row = plgpu.Layout.WGMMA.reduce(1)
    half = static.latent_dim // COMPUTE_WARPGROUPS
    state = blocks.RowState(
        plgpu.layout_cast(jnp.full((blocks.ROWS,), blocks.MASKED, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((blocks.ROWS,), jnp.float32), row),
        (plgpu.layout_cast(jnp.zeros((blocks.ROWS, half), jnp.float32), plgpu.Layout.WGMMA),),
    )
    state = lax.fori_loop(0, steps, step_through, state)
    # Past this meeting both are done with the queries, which make way for the output.
    scratch["sums_smem"].at[own][...] = state.weight
    plgpu.barrier_arrive(scratch["met"])
    plgpu.barrier_wait(scratch["met"])
    state = state._replace(weight=state.weight + _shown(scratch["sums_smem"].at[1 - own]))
    heads = pl.ds(0, out_ref.shape[-2])
    (values,) = blocks.outputs(state)
    q_smem[...] = values.astype(q_smem.dtype)
    if log_ref is not None:
        scratch["log_smem"][...] = blocks.log_weights(state)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem.at[heads], out_ref.at[(*place, slice(None), _half(own, static))])
    if log_ref is not None:
        plgpu.copy_smem_to_gmem(scratch["log_smem"].at[heads], log_ref.at[place])
    plgpu.wait_smem_to_gmem(0)


def _shown(values: Ref) -> jax.Array:
    """One value per row that the other warpgroup has put up."""
    return plgpu.layout_cast(values[...], plgpu.Layout.WGMMA.reduce(1))


def _scores(own: int, zero: jax.Array, static: DecodeKernel, scratch: dict[str, Ref]) -> jax.Array:
    """Products of all queries with the keys of the own page."""
    q_smem, page = scratch["q_smem"], scratch["rows_smem"].at[own + zero]

    def multiply(acc: Ref) -> jax.Array:
        plgpu.barrier_wait(scratch["near_ready"].at[own])
        plgpu.wgmma(acc, q_smem.at[own + zero], page.at[own].transpose((1, 0)))
        plgpu.barrier_wait(scratch["far_ready"].at[own])
        plgpu.wgmma(acc, q_smem.at[1 - own + zero], page.at[1 - own].transpose((1, 0)))
        plgpu.wgmma(acc, scratch["q_rope_smem"], scratch["rope_smem"].at[own + zero].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, blocks.gpu.ACC((blocks.ROWS, PAGE), jnp.float32))


def _scaled(values: jax.Array, factor: jax.Array) -> jax.Array:
    return values * lax.broadcast_in_dim(factor, values.shape, [0])


def _weighted(scores: jax.Array, top: jax.Array) -> jax.Array:
    return jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))


def _multiplied(
    values: jax.Array, p: jax.Array | None, page: jax.Array, half: int, static: DecodeKernel, scratch: dict[str, Ref]
) -> jax.Array:
    """values + weights @ half of a page, done; the weights are `p`, or where the other warpgroup put them."""

    def weights() -> Any:
        return scratch["rope_smem"].at[page, :, pl.ds(0, PAGE)] if p is None else p

    if static.interpreted:  # its accumulators cannot be initialised
        rows = scratch["rows_smem"][page, half]
        values = values + jnp.dot(weights()[...], rows, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
        return values

    def accumulate(acc: Ref) -> None:
        plgpu.wgmma(acc, weights(), scratch["rows_smem"].at[page, half])

    return pl.run_state(accumulate)(blocks.gpu.ACC.init(values))


def _first_added(
    state: blocks.RowState, scores: jax.Array, zero: jax.Array, static: DecodeKernel, scratch: dict[str, Ref]
) -> blocks.RowState:
    """Warpgroup 0's state after a pair of pages, of which `scores` are the first one's."""
    top = jnp.maximum(state.top, scores.max(axis=1))
    scratch["tops_smem"].at[0][...] = top
    plgpu.barrier_arrive(scratch["top_known"])
    keep = jnp.exp2(state.top - top)
    p = _weighted(scores, top)
    weight = state.weight * keep + p.sum(axis=1)
    p = p.astype(scratch["rope_smem"].dtype)
    scratch["rope_smem"].at[0, :, pl.ds(0, PAGE)][...] = p
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["weights_known"].at[0])
    values, weight, p = lax.optimization_barrier((_scaled(state.values[0], keep), weight, p))
    values = _multiplied(values, p, zero, 0, static, scratch)
    plgpu.barrier_arrive(scratch["near_free"].at[0])
    plgpu.barrier_wait(scratch["weights_known"].at[1])
    last = _shown(scratch["tops_smem"].at[1])
    keep = jnp.exp2(top - last)
    values = lax.optimization_barrier(_scaled(values, keep))
    values = _multiplied(values, None, 1 + zero, 0, static, scratch)
    plgpu.barrier_arrive(scratch["far_free"].at[1])
    return blocks.RowState(last, weight * keep, (values,))


def _second_added(
    state: blocks.RowState, scores: jax.Array, zero: jax.Array, static: DecodeKernel, scratch: dict[str, Ref]
) -> blocks.RowState:
    """Warpgroup 1's state after a pair of pages, of which `scores` are the second one's."""
    own_top = scores.max(axis=1)
    plgpu.barrier_wait(scratch["top_known"])
    first = _shown(scratch["tops_smem"].at[0])
    top = jnp.maximum(first, own_top)
    scratch["tops_smem"].at[1][...] = top
    p = _weighted(scores, top)
    weight = state.weight * jnp.exp2(state.top - top) + p.sum(axis=1)
    p = p.astype(scratch["rope_smem"].dtype)
    scratch["rope_smem"].at[1, :, pl.ds(0, PAGE)][...] = p
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["weights_known"].at[1])
    values = _scaled(state.values[0], jnp.exp2(state.top - first))
    values, weight, p = lax.optimization_barrier((values, weight, p))
    plgpu.barrier_wait(scratch["weights_known"].at[0])
    values = _multiplied(values, None, zero, 1, static, scratch)
    plgpu.barrier_arrive(scratch["far_free"].at[0])
    values = lax.optimization_barrier(_scaled(values, jnp.exp2(first - top)))
    values = _multiplied(values, p, 1 + zero, 1, static, scratch)
    plgpu.barrier_arrive(scratch["near_free"].at[1])
    return blocks.RowState(top, weight, (values,))
