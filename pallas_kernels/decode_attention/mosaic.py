"""Decode attention for Hopper GPUs, written with Mosaic GPU: split-KV over pages, one TMA per page and KV head.

    grid: (split, row, KV head); one block = two warpgroups, two blocks share a multiprocessor

    loader warpgroup                 shared memory                       compute warpgroup
    ----------------                 -------------                       -----------------
    q[row, head] --------- TMA ----> q [64, D]   (group's rows used) --> waits q once
    page id <- page_table
    waits k_free[slot]
    k[page, :, head] ----- TMA ----> k[slot] [64 tokens, D] ---------->  waits k_ready[slot]; S = q k^T (wgmma)
    waits v_free[slot]                                                   arrives k_free[slot]; online softmax
    v[page, :, head] ----- TMA ----> v[slot] [64 tokens, D] ---------->  waits v_ready[slot]; O += P v (wgmma)
    ... next page, next slot                                             arrives v_free[slot]

                                     out [64, 64] <-- registers          at the end: O / sum, 64 columns at a time
    out[split, row, head] <- TMA --- (group's rows)

A sink joins a head's denominator exactly once: with one split at the end of its block, with several in the merge.

The query heads of one KV head are the rows of the matrix product; up to 64 of them cost the same, and the product
stays well below the time that its page takes to arrive. Each split owns a contiguous run of the row's visible pages,
computed from `kv_lens`, so a short row in a wide table costs its own pages only. With several splits the partial
outputs are float32 and a small XLA fusion merges them by their log weights.

A page's rows beyond the length or below the window get weight 0, not skipped: they must be finite.
"""

import dataclasses
import functools
from collections.abc import Sequence
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
MAX_GROUP = blocks.ROWS  # query heads of one KV head are rows of one product
ROW_PIECE = 8  # rows of one swizzled tile: query groups are padded to whole tiles
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
SPLIT_OVERHEAD_PAGES = 3  # what starting and merging a split costs, in pages that it could have read

Ref = Any


@dataclasses.dataclass(frozen=True)
class DecodeTiling:
    """How the kernel is cut; the results do not depend on `stages`.

    Attributes:
        splits: blocks that share one row and KV head.
        stages: pages in flight per block.
    """

    splits: int
    stages: int

    @classmethod
    def choose(cls, *, rows: int, kv_heads: int, columns: int, head_dim: int) -> "DecodeTiling":
        """The number of splits that wastes least of the GPU for a full table."""
        per_multiprocessor = 2 if head_dim <= 128 else 1
        slots = MULTIPROCESSORS * per_multiprocessor

        def cost(splits: int) -> int:
            waves = -(-rows * kv_heads * splits // slots)
            return waves * (-(-columns // splits) + (SPLIT_OVERHEAD_PAGES if splits > 1 else 0))

        stages = {64: 4, 128: 2, 256: 2}[head_dim]
        return cls(min(range(1, min(columns, slots) + 1), key=cost), stages)


@functools.partial(jax.jit, static_argnames=("rule", "tiling", "interpret"))
def decode_attention_mosaic(
    q: Float[Array, "batch heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
    *,
    tiling: DecodeTiling | None = None,
    interpret: Any = None,
) -> Float[Array, "batch heads dim"]:
    """See `decode_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    batch, heads, dim = q.shape
    kv_heads = k.page_shape[1]
    groups = heads // kv_heads
    columns = page_table.shape[1]
    if tiling is None:
        tiling = DecodeTiling.choose(rows=batch, kv_heads=kv_heads, columns=columns, head_dim=dim)
    padded = -(-groups // ROW_PIECE) * ROW_PIECE
    grouped = q.reshape(batch, kv_heads, groups, dim)
    if padded != groups:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - groups), (0, 0)))
    partial = tiling.splits > 1
    out_dtype = jnp.dtype(jnp.float32 if partial else q.dtype)
    shape = (tiling.splits, batch, kv_heads, padded)
    out_type: list[jax.ShapeDtypeStruct] = [jax.ShapeDtypeStruct((*shape, dim), out_dtype)]
    scratch: dict[str, Any] = {
        "q_smem": blocks.swizzled(blocks.ROWS, dim, dtype=q.dtype),
        "k_smem": blocks.swizzled(tiling.stages, PAGE, dim, dtype=q.dtype),
        "v_smem": blocks.swizzled(tiling.stages, PAGE, dim, dtype=q.dtype),
        "out_smem": plgpu.SMEM((blocks.ROWS, blocks.CHUNK), out_dtype),
        "q_ready": plgpu.Barrier(),
        "k_ready": plgpu.Barrier(num_barriers=tiling.stages),
        "v_ready": plgpu.Barrier(num_barriers=tiling.stages),
        "k_free": plgpu.Barrier(num_barriers=tiling.stages),
        "v_free": plgpu.Barrier(num_barriers=tiling.stages),
    }
    if partial:
        out_type.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        scratch["log_smem"] = plgpu.SMEM((blocks.ROWS,), jnp.float32)
    kernel_sinks = [] if sinks is None or partial else [sinks]
    kernel = plgpu.kernel(
        functools.partial(
            _block,
            rule=rule,
            tiling=tiling,
            first_rows=(k.first_row, v.first_row),
            sink_heads=groups if kernel_sinks else 0,
            interpreted=interpret is not None,
        ),
        out_type=out_type,
        scratch_types=scratch,
        grid=(tiling.splits, batch, kv_heads),
        grid_names=("split", "row", "head"),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_attention",
    )
    indices = page_table.astype(jnp.int32), kv_lens.astype(jnp.int32)
    results = kernel(grouped, k.typed(), v.typed(), *indices, *kernel_sinks)
    out = results[0][..., :groups, :]
    if not partial:
        return out.reshape(q.shape)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, groups)
    return _merge(out, results[1][..., :groups], sinks).reshape(q.shape).astype(q.dtype)


def _merge(
    out: Float32[Array, "splits batch heads group dim"],
    log_weight: Float32[Array, "splits batch heads group"],
    sinks: Float32[Array, "heads group"] | None,
) -> Float32[Array, "batch heads group dim"]:
    """Joins the splits' outputs; one that took no page has weight exactly 0 unless none took any."""
    top = log_weight.max(axis=0)
    weight = jnp.exp2(log_weight - top)
    total = weight.sum(axis=0)
    if sinks is not None:
        total += jnp.exp2(sinks * blocks.LOG2_E - top)
    return (out * weight[..., None]).sum(axis=0) / total[..., None]


def _block(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    lens_ref: Ref,
    *sinks_and_results: Ref,
    rule: ScoreRule,
    tiling: DecodeTiling,
    first_rows: tuple[int, int],
    sink_heads: int,
    interpreted: bool,
    **scratch: Ref,
) -> None:
    split, row, head = (lax.axis_index(name) for name in ("split", "row", "head"))
    length = lens_ref[row]
    low = jnp.int32(0) if rule.sliding_window is None else jnp.maximum(length - rule.sliding_window, 0)
    first_page = lax.div(low, PAGE)
    pages = lax.div(length + (PAGE - 1), PAGE) - first_page
    share = lax.div(pages + (tiling.splits - 1), tiling.splits)
    begin = first_page + split * share
    steps = jnp.maximum(jnp.minimum(share, first_page + pages - begin), 0)
    place = (split, row, head)

    sinks_ref, *results = sinks_and_results if sink_heads else (None, *sinks_and_results)

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute() -> None:
        sinks = None if sinks_ref is None else _group_sinks(sinks_ref, head, sink_heads)
        _attend(results, sinks, place, begin, steps, low, length, rule, tiling, interpreted, scratch)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _load() -> None:
        _load_pages(q_ref, k_ref, v_ref, table_ref, place, begin, steps, tiling, first_rows, scratch)


def _load_pages(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    place: tuple[jax.Array, jax.Array, jax.Array],
    begin: jax.Array,
    steps: jax.Array,
    tiling: DecodeTiling,
    first_rows: tuple[int, int],
    scratch: dict[str, Ref],
) -> None:
    _, row, head = place
    last_column = table_ref.shape[1] - 1
    group = q_ref.shape[2]
    plgpu.copy_gmem_to_smem(q_ref.at[row, head], scratch["q_smem"].at[pl.ds(0, group)], scratch["q_ready"])

    def load(step: jax.Array, page: jax.Array) -> jax.Array:
        slot = lax.rem(step, tiling.stages)
        # The next id is fetched before the wait, which hides its latency.
        following = table_ref[row, jnp.minimum(begin + step + 1, last_column)]
        for name, ref, first_row in (("k", k_ref, first_rows[0]), ("v", v_ref, first_rows[1])):
            pl.when(step >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch[f"{name}_free"].at[slot]))
            plgpu.copy_gmem_to_smem(
                ref.at[page + first_row, :, head], scratch[f"{name}_smem"].at[slot], scratch[f"{name}_ready"].at[slot]
            )
        return following

    lax.fori_loop(0, steps, load, table_ref[row, jnp.minimum(begin, last_column)])

    @pl.loop(jnp.maximum(steps - tiling.stages, 0), steps)
    def _drain(step: jax.Array) -> None:
        slot = lax.rem(step, tiling.stages)
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])


def _group_sinks(sinks_ref: Ref, head: jax.Array, group: int) -> jax.Array:
    """The sinks of one KV head's query heads, in the rows of those heads; any value in the rows of none."""
    row = plgpu.broadcasted_iota(jnp.int32, (blocks.ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    loaded = [sinks_ref[head * group + i].astype(jnp.float32) for i in range(group)]
    return functools.reduce(lambda sinks, i: jnp.where(row == i, loaded[i], sinks), range(1, group), loaded[0])


def _attend(
    results: Sequence[Ref],
    sinks: jax.Array | None,
    place: tuple[jax.Array, jax.Array, jax.Array],
    begin: jax.Array,
    steps: jax.Array,
    low: jax.Array,
    length: jax.Array,
    rule: ScoreRule,
    tiling: DecodeTiling,
    interpreted: bool,
    scratch: dict[str, Ref],
) -> None:
    out_ref, *log_refs = results
    group, dim = out_ref.shape[-2:]
    plgpu.barrier_wait(scratch["q_ready"])

    def step_through(step: jax.Array, state: blocks.RowState) -> blocks.RowState:
        slot = lax.rem(step, tiling.stages)
        start = (begin + step) * PAGE
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        state = blocks.add_block(
            state,
            scratch["q_smem"],
            scratch["k_smem"].at[slot],
            scratch["v_smem"].at[slot],
            rule=rule,
            mask=lambda scores: blocks.visible_columns(scores, low - start, length - start),
            keys_read=lambda: plgpu.barrier_arrive(scratch["k_free"].at[slot]),
            await_values=lambda: plgpu.barrier_wait(scratch["v_ready"].at[slot]),
            interpreted=interpreted,
        )
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return state

    state = lax.fori_loop(0, steps, step_through, blocks.empty_state(dim))
    if sinks is not None:
        state = blocks.join_sinks(state, sinks)
    out_smem = scratch["out_smem"]
    for i, chunk in enumerate(blocks.outputs(state)):
        out_smem[...] = chunk.astype(out_smem.dtype)
        plgpu.commit_smem()
        columns = pl.ds(i * blocks.CHUNK, blocks.CHUNK)
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, group)], out_ref.at[(*place, slice(None), columns)])
        plgpu.wait_smem_to_gmem(0)
    for log_ref in log_refs:
        scratch["log_smem"][...] = blocks.log_weights(state)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["log_smem"].at[pl.ds(0, group)], log_ref.at[place])
        plgpu.wait_smem_to_gmem(0)
