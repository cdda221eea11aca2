"""Latent decode attention for Hopper GPUs, written with Mosaic GPU: split-KV over pages, heads as matrix rows.

    grid: (split, row, tile of 64 heads); one block = three warpgroups = one multiprocessor

    loader warpgroup                 shared memory                       compute warpgroups 0 and 1
    ----------------                 -------------                       --------------------------
    q[row, heads] -------- TMA ----> q [64, L + R]  (used rows) -------> wait q once
    page id <- page_table
    waits free[slot] (both)
    rows[page] ----------- TMA ----> c[slot] [64 tokens, L + R] ------>  wait ready[slot]; S = q c^T (wgmma)
                                                                         online softmax, each for itself
                                                                         O += P c[:, own half of L] (wgmma)
    ... next page, next slot                                             arrive free[slot]

                                     q, columns of the own half <------  at the end, once both are done with q: O / sum
    out[split, row, heads] <- TMA -- q [64, L]                           64 columns at a time

A cached row (L latent channels, R positional ones) is key and value at once, so a page is loaded once and read twice.
The output of 64 heads has more columns than one warpgroup has registers for: each of the two keeps half of them. Both
compute all scores, which costs half as much again as the products that are needed, and in return neither ever waits
for the other: one's softmax falls into the other's products.

With several splits a small XLA fusion merges the outputs by their log weights. They are rounded to q's dtype before:
shared memory is full, and each is weighted by at most 1.

A page's rows beyond the length get weight 0, not skipped: they must be finite.
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
STAGES = 2  # pages in flight; with the queries they fill shared memory
ROW_PIECE = 8  # rows of one swizzled tile: heads are padded to whole tiles
MAX_ROW_DIM = 576  # channels of a cached row that shared memory has room for
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
SPLIT_OVERHEAD_PAGES = 3  # what starting and merging a split costs, in pages that it could have read

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
    if latent_dim % half or rope_dim % blocks.CHUNK or latent_dim + rope_dim > MAX_ROW_DIM:
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

    def cost(splits: int) -> int:
        waves = -(-rows * head_tiles * splits // MULTIPROCESSORS)
        return waves * (-(-columns // splits) + (SPLIT_OVERHEAD_PAGES if splits > 1 else 0))

    return min(range(1, min(columns, MULTIPROCESSORS) + 1), key=cost)


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
    scratch: dict[str, Any] = {
        # In chunks of columns, so that TMA can store each of them when they hold the output.
        "q_smem": blocks.swizzled(row_dim // blocks.CHUNK, blocks.ROWS, blocks.CHUNK, dtype=q.dtype),
        "rows_smem": blocks.swizzled(STAGES, PAGE, row_dim, dtype=q.dtype),
        "q_ready": plgpu.Barrier(num_arrivals=row_dim // blocks.CHUNK),
        "q_read": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS),
        "ready": plgpu.Barrier(num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=COMPUTE_WARPGROUPS, num_barriers=STAGES),
    }
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
    pages = lax.div(length + (PAGE - 1), PAGE)
    share = lax.div(pages + (static.splits - 1), static.splits)
    begin = split * share
    steps = jnp.maximum(jnp.minimum(share, pages - begin), 0)
    warpgroup = lax.axis_index("warpgroup")
    log_ref = log_ref_and_none[0] if log_ref_and_none else None

    # One branch per half: which columns a warpgroup owns must be known when the kernel is compiled.
    for half in range(COMPUTE_WARPGROUPS):

        @pl.when(warpgroup == half)
        def _compute(half: int = half) -> None:
            plgpu.set_max_registers(232, action="increase")
            _attend(out_ref, log_ref if half == 0 else None, place, half, begin, steps, length, static, scratch)

    @pl.when(warpgroup == COMPUTE_WARPGROUPS)
    def _load() -> None:
        plgpu.set_max_registers(40, action="decrease")
        _load_pages(q_ref.at[row, tile], rows_ref, table_ref.at[row], begin, steps, static, scratch)


def _load_pages(
    q_ref: Ref,
    rows_ref: Ref,
    table_ref: Ref,
    begin: jax.Array,
    steps: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> None:
    last_column = table_ref.shape[0] - 1
    for i in range(scratch["q_smem"].shape[0]):
        chunk = scratch["q_smem"].at[i, pl.ds(0, q_ref.shape[0])]
        plgpu.copy_gmem_to_smem(q_ref.at[:, pl.ds(i * blocks.CHUNK, blocks.CHUNK)], chunk, scratch["q_ready"])

    def load(step: jax.Array, page: jax.Array) -> jax.Array:
        slot = lax.rem(step, STAGES)
        # The next id is fetched before the wait, which hides its latency.
        following = table_ref[jnp.minimum(begin + step + 1, last_column)]
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
        plgpu.copy_gmem_to_smem(
            rows_ref.at[page + static.first_row, :, 0], scratch["rows_smem"].at[slot], scratch["ready"].at[slot]
        )
        return following

    lax.fori_loop(0, steps, load, table_ref[jnp.minimum(begin, last_column)])

    @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch["free"].at[lax.rem(step, STAGES)])


def _attend(
    out_ref: Ref,
    log_ref: Ref | None,
    place: tuple[jax.Array, ...],
    half: int,
    begin: jax.Array,
    steps: jax.Array,
    length: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: all scores, and its own half of the output's columns."""
    columns = static.latent_dim // COMPUTE_WARPGROUPS
    q_smem = scratch["q_smem"]
    plgpu.barrier_wait(scratch["q_ready"])

    def step_through(step: jax.Array, state: blocks.RowState) -> blocks.RowState:
        slot = lax.rem(step, STAGES)
        start = (begin + step) * PAGE
        plgpu.barrier_wait(scratch["ready"].at[slot])
        page = scratch["rows_smem"].at[slot]
        state = blocks.add_block(
            state,
            q_smem,
            page,
            page.at[:, pl.ds(half * columns, columns)],
            rule=static.rule,
            mask=lambda scores: blocks.visible_columns(scores, jnp.int32(0), length - start),
            keys_read=lambda: None,
            await_values=lambda: None,
            interpreted=static.interpreted,
        )
        plgpu.barrier_arrive(scratch["free"].at[slot])
        return state

    state = lax.fori_loop(0, steps, step_through, blocks.empty_state(columns))
    # The queries make way for the output.
    plgpu.barrier_arrive(scratch["q_read"])
    plgpu.barrier_wait(scratch["q_read"])
    heads = pl.ds(0, out_ref.shape[-2])
    for i, chunk in enumerate(blocks.outputs(state)):
        index = half * (columns // blocks.CHUNK) + i
        q_smem.at[index][...] = chunk.astype(q_smem.dtype)
        plgpu.commit_smem()
        own = pl.ds(index * blocks.CHUNK, blocks.CHUNK)
        plgpu.copy_smem_to_gmem(q_smem.at[index, heads], out_ref.at[(*place, slice(None), own)])
    if log_ref is not None:
        scratch["log_smem"][...] = blocks.log_weights(state)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["log_smem"].at[heads], log_ref.at[place])
    plgpu.wait_smem_to_gmem(0)
