"""Decode attention in Triton, called through jax-triton: split-KV over pages, a page of one KV head at a time.

    grid: (row, KV head, split); one block = 4 warps

    q[row, heads of the KV head] ----> registers [M, D], M = 16 rows or more, the group's used
    page id <- page_table              copied ahead, `stages` deep, by the compiler's pipeline (cp.async)
    k[page, :, head] ----------------> shared [64 tokens, D] ------> S = q k^T, softmax weights of the page
    v[page, :, head] ----------------> shared [64 tokens, D] ------> O += P v
    ... next page
    out[split, row, head], log weight <--- O / sum, log2(sum) + maximum

Each split owns a contiguous run of the row's visible pages. With several splits the partial outputs are float32 and a
small XLA fusion merges them by their log weights, where a sink joins the denominator once. Tokens beyond the length or
below the window are not read.
"""

# Without the package, pyright takes `import triton` for this file.
# pyright: reportAttributeAccessIssue=false

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jaxtyping import Array, Float, Float32, Int

from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule
from tokenspeed_jax.pallas_kernels.triton_calls import triton_call

LOG2_E = 1.4426950408889634
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
SPLIT_OVERHEAD_PAGES = 3  # what starting and merging a split costs, in pages that it could have read
LOWEST = -1e30  # a maximum that no score goes below and that differences of stay finite


@dataclasses.dataclass(frozen=True)
class TritonDecodeTiling:
    """How the kernel is cut; the results do not depend on `stages` and `warps`.

    Attributes:
        splits: blocks that share one row and KV head.
        stages: depth of the compiler's pipeline over pages.
        warps: of one block.
    """

    splits: int
    stages: int = 4
    warps: int = 4

    @classmethod
    def choose(cls, *, rows: int, kv_heads: int, columns: int, head_dim: int) -> "TritonDecodeTiling":
        """The number of splits that wastes least of the GPU for a full table."""
        slots = MULTIPROCESSORS * (2 if head_dim <= 128 else 1)

        def cost(splits: int) -> int:
            waves = -(-rows * kv_heads * splits // slots)
            return waves * (-(-columns // splits) + (SPLIT_OVERHEAD_PAGES if splits > 1 else 0))

        return cls(min(range(1, min(columns, slots) + 1), key=cost), 4 if head_dim <= 128 else 3)


@functools.partial(jax.jit, static_argnames=("rule", "tiling"))
def decode_attention_triton(
    q: Float[Array, "batch heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "batch columns"],
    kv_lens: Int[Array, " batch"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
    *,
    tiling: TritonDecodeTiling | None = None,
) -> Float[Array, "batch heads dim"]:
    """See `decode_attention`."""
    batch, heads, dim = q.shape
    kv_heads = k.page_shape[1]
    group = heads // kv_heads
    columns = page_table.shape[1]
    if tiling is None:
        tiling = TritonDecodeTiling.choose(rows=batch, kv_heads=kv_heads, columns=columns, head_dim=dim)
    shape = (tiling.splits, batch, kv_heads, group)
    out_type = jnp.float32 if tiling.splits > 1 else q.dtype
    out, log_weight = triton_call(
        q,
        k.typed(),
        v.typed(),
        page_table.astype(jnp.int32),
        kv_lens.astype(jnp.int32),
        q if sinks is None else sinks,
        kernel=decode_kernel,
        out_type=(jax.ShapeDtypeStruct((*shape, dim), out_type), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(batch, kv_heads, tiling.splits),
        name="decode_attention",
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        columns=columns,
        **constants(rule, kv_heads=kv_heads, group=group, head_dim=dim, page=k.tokens_per_page),
        FIRST_K=k.first_row,
        FIRST_V=v.first_row,
        SINKS=sinks is not None and tiling.splits == 1,
    )
    if tiling.splits == 1:
        return out.reshape(q.shape)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(kv_heads, group)
    return _merge(out, log_weight, sinks).reshape(q.shape).astype(q.dtype)


def constants(rule: ScoreRule, *, kv_heads: int, group: int, head_dim: int, page: int) -> dict[str, Any]:
    """What the kernel is compiled for, apart from where the pages begin; neither rows nor columns."""
    return {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "TILE": max(16, triton.next_power_of_2(group)),
        "DIM": head_dim,
        "PAGE": page,
        "SCALE": rule.scale,
        "WINDOW": rule.sliding_window or 0,
        "SOFT_CAP": rule.soft_cap or 0.0,
    }


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
        total += jnp.exp2(sinks * LOG2_E - top)
    return (out * weight[..., None]).sum(axis=0) / total[..., None]


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    lens_ptr,
    sinks_ptr,
    out_ptr,
    log_ptr,
    columns,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST_K: tl.constexpr,
    FIRST_V: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lens_ptr + row)
    low = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else length * 0
    first_page = low // PAGE
    pages = tl.cdiv(length, PAGE) - first_page
    share = tl.cdiv(pages, tl.num_programs(2))
    begin = first_page + split * share
    end = tl.minimum(begin + share, first_page + pages)

    member, column, token = tl.arange(0, TILE), tl.arange(0, DIM), tl.arange(0, PAGE)
    real = member < GROUP
    place = (row * KV_HEADS + head) * GROUP + member
    q = tl.load(q_ptr + place[:, None] * DIM + column[None, :], mask=real[:, None], other=0.0)
    within = token[:, None] * (KV_HEADS * DIM) + head * DIM + column[None, :]
    page_size: tl.constexpr = PAGE * KV_HEADS * DIM

    top = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    out = tl.zeros([TILE, DIM], tl.float32)
    for page in range(begin, end):
        page_id = tl.load(table_ptr + row * columns + page).to(tl.int64)
        position = page * PAGE + token
        seen = (position >= low) & (position < length)
        k = tl.load(k_ptr + (page_id + FIRST_K) * page_size + within, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k))
        if SOFT_CAP > 0:
            # tanh(x) = 1 - 2 / (1 + e^2x)
            tanh = 1 - 2 / (1 + tl.exp2(scores * (2 * SCALE / SOFT_CAP * 1.4426950408889634)))
            scores = tanh * (SOFT_CAP * 1.4426950408889634)
        else:
            scores = scores * (SCALE * 1.4426950408889634)
        scores = tl.where(seen[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.where(seen[None, :], tl.exp2(scores - new_top[:, None]), 0.0)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + (page_id + FIRST_V) * page_size + within, mask=seen[:, None], other=0.0)
        out = tl.dot(weights.to(v.dtype), v, acc=out * rescale[:, None])
        top = new_top

    if SINKS:
        sink = tl.load(sinks_ptr + head * GROUP + member, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.exp2(sink - new_top)
        out = out * rescale[:, None]
        top = new_top
    result = out / tl.where(total > 0, total, 1.0)[:, None]
    target = split * tl.num_programs(0) * (KV_HEADS * GROUP) + place
    tl.store(out_ptr + target[:, None] * DIM + column[None, :], result.to(out_ptr.dtype.element_ty), mask=real[:, None])
    tl.store(log_ptr + target, tl.where(total > 0, top + tl.log2(total), -1e30), mask=real)
