"""Latent decode attention for Hopper GPUs, written with Mosaic GPU: split-KV over pairs of pages, heads as matrix rows.

    grid: (split, row, tile of 64 heads); one block = three warpgroups = one multiprocessor

    loader warpgroup              shared memory, w = 0, 1            compute warpgroup w, o = the other
    ----------------              -----------------------            ----------------------------------
    q[row, heads] ------- TMA --> q [64, L + R] (used rows) ------>  waits q once
    page ids <- page_table
    waits near_free[w]
    page w, half w of L - TMA --> c[w], half w ------------------->  waits near_ready[w]; S = q c[w]^T (wgmma)
    waits far_free[w]
    page w, the rest ---- TMA --> c[w], half o and R ------------->  waits far_ready[w];  S += ...
                                  tops[w] <----------------------->  own highest scores; both meet; common top
                                  c[w], first 64 of R <------------  P, now that S has read the keys
                                                                     O *= ...; O += P c[w][:, half w] (wgmma)
                                                                     both meet
                                  c[o] --------------------------->  O += P[o] c[o][:, half w] (wgmma)
    ... next pair of pages                                           arrives near_free[w], far_free[o]

                                  q, columns of half w <-----------  at the end, once both are done with q: O / sum
    out[split, row, heads] <----  TMA, 64 columns at a time

A cached row (L latent channels, R positional ones) is key and value at once, so a page is loaded once and read twice.
The output of 64 heads has more columns than one warpgroup has registers for: warpgroup w keeps half w of them, and the
scores of page w. Queries and one pair of pages fill shared memory, so the next pair comes in pieces, each as soon as
its place is free: half w of page w is read by warpgroup w alone, and is free while the other halves are still used.

With several splits a small XLA fusion merges the outputs by their log weights. They are rounded to q's dtype before:
shared memory is full, and each is weighted by at most 1.

What a row does not see of its pages gets weight 0, not skipped: it must be finite. An odd last page is its own partner.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64
COMPUTE_WARPGROUPS = 2
ROW_PIECE = 8  # rows of one swizzled tile: heads are padded to whole tiles
MAX_ROW_DIM = 576  # channels of a cached row that shared memory has room for
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
# More steps than any row takes. Addresses that seem to depend on step / _NEVER, which is 0, are computed where they
# are used; all of them known before the loop would take more registers than there are.
_NEVER = 1 << 24
SPLIT_OVERHEAD_PAIRS = 2  # what starting and merging a split costs, in pairs of pages that it could have read

Ref = Any


def shape_refusal(
    *, num_heads: int, latent_dim: int, rope_dim: int, tokens_per_page: int, dtype: str, cache_dtype: str
) -> str | None:
    """Why the kernel cannot serve this geometry on any GPU; None when it can."""
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


def choose_splits(*, rows: int, head_tiles: int, columns: int) -> int:
    """The number of splits that wastes least of the GPU for a full table, one block on a multiprocessor."""

    pairs = -(-columns // COMPUTE_WARPGROUPS)

    def cost(splits: int) -> int:
        waves = -(-rows * head_tiles * splits // MULTIPROCESSORS)
        return waves * (-(-pairs // splits) + (SPLIT_OVERHEAD_PAIRS if splits > 1 else 0))

    return min(range(1, min(pairs, MULTIPROCESSORS) + 1), key=cost)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is static in one compiled kernel."""

    latent_dim: int
    splits: int
    rule: ScoreRule
    first_row: int
    interpreted: bool


@functools.partial(jax.jit, static_argnames=("latent_dim", "rule", "splits", "interpret"))
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
        splits: blocks that share one row and tile of heads.
    """
    batch, heads, row_dim = q.shape
    columns = page_table.shape[1]
    head_tiles = -(-heads // blocks.ROWS)
    tile_heads = min(-(-heads // ROW_PIECE) * ROW_PIECE, blocks.ROWS)
    splits = choose_splits(rows=batch, head_tiles=head_tiles, columns=columns) if splits is None else splits
    tiled = jnp.pad(q, ((0, 0), (0, head_tiles * tile_heads - heads), (0, 0)))
    tiled = tiled.reshape(batch, head_tiles, tile_heads, row_dim)
    shape = (splits, batch, head_tiles, tile_heads)
    out_type: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct((*shape, latent_dim), q.dtype)]
    scratch = _scratch(row_dim, latent_dim, q.dtype)
    if splits > 1:
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        scratch["log_smem"] = plgpu.SMEM((blocks.ROWS,), jnp.float32)
    static = _Kernel(latent_dim, splits, rule, rows.first_row, interpret is not None)
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
        kernel_name="latent_decode_attention",
    )
    results = kernel(tiled, rows.typed(), page_table.astype(jnp.int32), kv_lens.astype(jnp.int32))
    out = _merge(*results).astype(q.dtype) if splits > 1 else results[0][0]
    return out.reshape(batch, -1, latent_dim)[:, :heads]


def _scratch(row_dim: int, latent_dim: int, dtype: jnp.dtype) -> dict[str, Any]:
    chunks, near = row_dim // blocks.CHUNK, latent_dim // COMPUTE_WARPGROUPS // blocks.CHUNK
    pair = COMPUTE_WARPGROUPS
    return {
        # In chunks of 64 columns: TMA copies what is contiguous, and shared memory is swizzled.
        "q_smem": blocks.swizzled(chunks, blocks.ROWS, blocks.CHUNK, dtype=dtype),
        "rows_smem": blocks.swizzled(pair, chunks, PAGE, blocks.CHUNK, dtype=dtype),
        "tops_smem": plgpu.SMEM((pair, blocks.ROWS), jnp.float32),
        "q_ready": plgpu.Barrier(num_arrivals=chunks),
        "near_ready": plgpu.Barrier(num_arrivals=near, num_barriers=pair),
        "far_ready": plgpu.Barrier(num_arrivals=chunks - near, num_barriers=pair),
        "near_free": plgpu.Barrier(num_barriers=pair),
        "far_free": plgpu.Barrier(num_barriers=pair),
        "tops_met": plgpu.Barrier(num_arrivals=pair),
        "weights_met": plgpu.Barrier(num_arrivals=pair),
    }


def _merge(
    out: Float[Array, "splits batch tiles heads dim"], log_weight: Float32[Array, "splits batch tiles heads"]
) -> Float32[Array, "batch tiles heads dim"]:
    """Joins the splits' outputs; one that took no page has weight exactly 0 unless none took any."""
    weight = jnp.exp2(log_weight - log_weight.max(axis=0))
    return (out.astype(jnp.float32) * weight[..., None]).sum(axis=0) / weight.sum(axis=0)[..., None]


def _block(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    lens_ref: Ref,
    out_ref: Ref,
    *log_ref_and_none: Ref,
    static: _Kernel,
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


def _chunks_of(own: int, static: _Kernel, scratch: dict[str, Ref]) -> tuple[range, tuple[int, ...]]:
    """Chunks of columns of page `own` that its warpgroup alone reads, and the others."""
    half = static.latent_dim // COMPUTE_WARPGROUPS // blocks.CHUNK
    near = range(own * half, (own + 1) * half)
    return near, tuple(i for i in range(scratch["q_smem"].shape[0]) if i not in near)


def _load_pages(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    begin: jax.Array,
    steps: jax.Array,
    length: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> None:
    for i in range(scratch["q_smem"].shape[0]):
        chunk = scratch["q_smem"].at[i, pl.ds(0, q_ref.shape[0])]
        plgpu.copy_gmem_to_smem(q_ref.at[:, pl.ds(i * blocks.CHUNK, blocks.CHUNK)], chunk, scratch["q_ready"])
    last_page = jnp.maximum(lax.div(length - 1, PAGE), 0)

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        column = (begin + step) * COMPUTE_WARPGROUPS
        return tuple(table_ref[jnp.minimum(column + i, last_page)] for i in range(COMPUTE_WARPGROUPS))

    def load(step: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # The next ids are fetched before the waits, which hide their latency.
        following = page_ids(jnp.minimum(step + 1, steps - 1))
        for part, name in enumerate(("near", "far")):
            for own, page in enumerate(pages):
                pl.when(step > 0)(functools.partial(plgpu.barrier_wait, scratch[f"{name}_free"].at[own]))
                for i in _chunks_of(own, static, scratch)[part]:
                    plgpu.copy_gmem_to_smem(
                        rows_ref.at[page + static.first_row, :, 0, pl.ds(i * blocks.CHUNK, blocks.CHUNK)],
                        scratch["rows_smem"].at[own, i],
                        scratch[f"{name}_ready"].at[own],
                    )
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
    static: _Kernel,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: the scores of one page of each pair, and half of the output's columns."""
    q_smem = scratch["q_smem"]
    near, _ = _chunks_of(own, static, scratch)
    plgpu.barrier_wait(scratch["q_ready"])

    def step_through(step: jax.Array, state: blocks.RowState) -> blocks.RowState:
        start = ((begin + step) * COMPUTE_WARPGROUPS + own) * PAGE
        zero = lax.div(step, _NEVER)
        scores = _scores(own, zero, static, scratch) * (static.rule.scale * blocks.LOG2_E)
        scores = blocks.visible_columns(scores, jnp.int32(0), length - start)
        other_top = _exchanged(scores.max(axis=1), own, scratch)
        top = jnp.maximum(jnp.maximum(state.top, scores.max(axis=1)), other_top)
        return _added(state, scores, top, own, zero, static, scratch)

    state = lax.fori_loop(0, steps, step_through, blocks.empty_state(len(near) * blocks.CHUNK))
    # Past this exchange both are done with the queries, which make way for the output.
    state = state._replace(weight=state.weight + _exchanged(state.weight, own, scratch))
    heads = pl.ds(0, out_ref.shape[-2])
    for i, chunk in zip(near, blocks.outputs(state), strict=True):
        q_smem.at[i][...] = chunk.astype(q_smem.dtype)
        plgpu.commit_smem()
        columns = pl.ds(i * blocks.CHUNK, blocks.CHUNK)
        plgpu.copy_smem_to_gmem(q_smem.at[i, heads], out_ref.at[(*place, slice(None), columns)])
    if log_ref is not None:
        log_smem = scratch["log_smem"]
        log_smem[...] = blocks.log_weights(state)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(log_smem.at[heads], log_ref.at[place])
    plgpu.wait_smem_to_gmem(0)


def _exchanged(values: jax.Array, own: int, scratch: dict[str, Ref]) -> jax.Array:
    """Shows the other warpgroup one value per row, and returns its values."""
    tops_smem = scratch["tops_smem"]
    tops_smem.at[own][...] = values
    plgpu.barrier_arrive(scratch["tops_met"])
    plgpu.barrier_wait(scratch["tops_met"])
    return plgpu.layout_cast(tops_smem.at[1 - own][...], plgpu.Layout.WGMMA.reduce(1))


def _scores(own: int, zero: jax.Array, static: _Kernel, scratch: dict[str, Ref]) -> jax.Array:
    """Products of all queries with the keys of the own page."""
    page, q_smem = scratch["rows_smem"].at[own + zero], scratch["q_smem"]

    def multiply(acc: Ref) -> jax.Array:
        for name, chunks in zip(("near_ready", "far_ready"), _chunks_of(own, static, scratch), strict=True):
            plgpu.barrier_wait(scratch[name].at[own])
            for i in chunks:
                plgpu.wgmma(acc, q_smem.at[i + zero], page.at[i].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(multiply, blocks.gpu.ACC((blocks.ROWS, PAGE), jnp.float32))


def _added(
    state: blocks.RowState,
    scores: jax.Array,
    top: jax.Array,
    own: int,
    zero: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> blocks.RowState:
    """The state after a pair of pages, of which `scores` are the own one's; `top` is common to both warpgroups."""
    pages, other = scratch["rows_smem"], 1 - own
    near, _ = _chunks_of(own, static, scratch)
    shared = static.latent_dim // blocks.CHUNK  # the chunk of positional channels, which S was the last to read
    keep = jnp.exp2(state.top - top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    weight = state.weight * keep + p.sum(axis=1)
    p = p.astype(pages.dtype)
    pages.at[own, shared][...] = p
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["weights_met"])
    kept = tuple(chunk * lax.broadcast_in_dim(keep, chunk.shape, [0]) for chunk in state.values)
    kept, weight, p = lax.optimization_barrier((kept, weight, p))

    def release() -> None:
        plgpu.barrier_arrive(scratch["near_free"].at[own])
        plgpu.barrier_arrive(scratch["far_free"].at[other])

    if static.interpreted:  # its wgmma takes only refs
        plgpu.barrier_wait(scratch["weights_met"])
        p_other = pages[other, shared]
        values = tuple(
            chunk
            + jnp.dot(p, pages[own, i], preferred_element_type=jnp.float32)
            + jnp.dot(p_other, pages[other, i], preferred_element_type=jnp.float32)
            for i, chunk in zip(near, kept, strict=True)
        )
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
        release()
        return blocks.RowState(top, weight, values)

    def accumulate(accs: tuple[Ref, ...]) -> None:
        for i, acc in zip(near, accs, strict=True):
            plgpu.wgmma(acc, p, pages.at[own + zero, i])
        plgpu.barrier_wait(scratch["weights_met"])
        for i, acc in zip(near, accs, strict=True):
            plgpu.wgmma(acc, pages.at[other + zero, shared], pages.at[other + zero, i])
        plgpu.wgmma_wait(len(near))
        plgpu.barrier_arrive(scratch["near_free"].at[own])

    values = pl.run_state(accumulate)(tuple(blocks.gpu.ACC.init(chunk) for chunk in kept))
    plgpu.barrier_arrive(scratch["far_free"].at[other])
    return blocks.RowState(top, weight, values)
