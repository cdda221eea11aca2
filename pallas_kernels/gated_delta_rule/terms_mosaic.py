"""Terms of all chunks of the gated delta rule with one gate a head, for Hopper GPUs, written with Mosaic GPU.

    XLA: running sums of the gates and the strengths of every chunk and head  [chunks, heads, 64]

    grid: (chunk, head); one block = one warpgroup, two blocks share a multiprocessor; no loop

    q[chunk's tokens, key head] -- TMA ----> q [64, K]     waits ready;  tokens of other rows in k become zeros
    k[chunk's tokens, key head] -- TMA ----> k [64, K]     P = (q k^T) * decays                            (wgmma)
    v[chunk's tokens, head] ------ TMA ----> v [64, V]     A = (k k^T) * decays * strength, below the diagonal
                                             t, x [64, 64] T = (I + A)^-1 * strengths, by doubling         (wgmma)
    products[chunk, head] <------- TMA ----- p [64, 64]
    corrections[chunk, head] <---- TMA ----- q [64, K]     -T * decay to token, times k                    (wgmma)
                                                           waits v_ready
    updates[chunk, head] <-------- TMA ----- v [64, V]     T v                                             (wgmma)

The inverse of a unit lower triangle of 2n rows is made of the inverses of its halves: with A = [[A1, 0], [L, A2]] the
part below them is -A2^-1 L A1^-1. All pairs of halves of one size are one product, masked; from 2 rows to 64 that is
five doublings, with 16-bit operands of float16's precision: entries of the inverse stay near 1.

Chunks are read where their tokens lie. Nothing is gathered before, and no term but these three is written.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from tokenspeed_jax.pallas_kernels.gated_delta_rule.chunk_table import ChunkTable
from tokenspeed_jax.pallas_kernels.gated_delta_rule.token_lines import (
    COLUMNS,
    TOKENS,
    Product,
    TokenLines,
    add_products,
    gpu,
    zeros,
)
from tokenspeed_jax.pallas_kernels.mosaic_blocks import swizzled

LOG2_E = math.log2(math.e)
LOWEST_GATE = -128.0  # base 2: what float32 holds as nothing
WGMMA = plgpu.Layout.WGMMA
SQUARE = (TOKENS, TOKENS)

Ref = Any


class DeltaRuleTerms(NamedTuple):
    """What the walk over the chunks needs beside queries and keys; undefined in chunks of no row.

    Attributes:
        products: queries with keys of the chunk, under their decays; zero above the diagonal.
        updates: what each token adds along its key, if the state before the chunk is zero.
        corrections: what the state before the chunk adds to that: minus what it predicts.
        sums: running sums of the gates, base 2, from the chunk's begin.
    """

    products: Float[Array, "chunks heads size size"]
    updates: Float[Array, "chunks heads size value_dim"]
    corrections: Float[Array, "chunks heads size key_dim"]
    sums: Float32[Array, "chunks heads size"]


@functools.partial(jax.jit, static_argnames="interpret")
def delta_rule_terms_mosaic(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    v: Float[Array, "tokens heads value_dim"],
    log_decay: Float32[Array, "tokens heads"],
    beta: Float32[Array, "tokens heads"],
    table: ChunkTable,
    *,
    interpret: Any = None,
) -> DeltaRuleTerms:
    """The terms of every chunk in `table`; q, k and v of one 16-bit dtype."""
    (heads, value_dim), key_dim, chunks, dtype = v.shape[1:], q.shape[2], table.capacity, q.dtype
    interpreted = interpret is not None
    sums, strengths = _by_chunk(log_decay, beta, table)
    # Each is needed as one number a row and as one a column, and one array cannot be loaded in two layouts.
    scalars = jnp.stack([sums, sums, strengths, strengths], axis=2)
    kernel = plgpu.kernel(
        functools.partial(_block, repeats=heads // q.shape[1], interpreted=interpreted),
        out_type=(
            jax.ShapeDtypeStruct((chunks, heads, TOKENS, TOKENS), dtype),
            jax.ShapeDtypeStruct((chunks, heads, TOKENS, value_dim), dtype),
            jax.ShapeDtypeStruct((chunks, heads, TOKENS, key_dim), dtype),
        ),
        scratch_types={
            "q": TokenLines.scratch(key_dim, dtype=dtype, interpreted=interpreted),
            "k": TokenLines.scratch(key_dim, dtype=dtype, interpreted=interpreted),
            "p": swizzled(TOKENS, TOKENS, dtype=dtype),
            "ready": plgpu.Barrier(num_arrivals=2 * (key_dim // COLUMNS)),
            "v": TokenLines.scratch(value_dim, dtype=dtype, interpreted=interpreted),
            "t": swizzled(TOKENS, TOKENS, dtype=jnp.dtype(jnp.float16)),
            "x": swizzled(TOKENS, TOKENS, dtype=jnp.dtype(jnp.float16)),
            "v_ready": plgpu.Barrier(num_arrivals=value_dim // COLUMNS),
        },
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        interpret=interpret,
        kernel_name="delta_rule_terms",
    )
    products, updates, corrections = kernel(table.begins, table.lengths, q, k, scalars, v)
    return DeltaRuleTerms(products, updates, corrections, sums)


def _by_chunk(
    log_decay: Float32[Array, "tokens heads"], beta: Float32[Array, "tokens heads"], table: ChunkTable
) -> tuple[Float32[Array, "chunks heads size"], Float32[Array, "chunks heads size"]]:
    """Running sums of the gates, base 2, and strengths; a gate of 0 and no strength beyond a chunk's tokens."""
    slot = jnp.arange(TOKENS)
    held = (slot < table.lengths[:, None])[..., None]
    token = table.begins[:, None] + slot

    def cut(x: Float32[Array, "tokens heads"]) -> Float32[Array, "chunks heads size"]:
        return jnp.swapaxes(jnp.where(held, x.astype(jnp.float32).at[token].get(mode="clip"), 0.0), 1, 2)

    return jnp.cumsum(cut(jnp.maximum(log_decay * LOG2_E, LOWEST_GATE)), axis=2), cut(beta)


def _across(x: Float[Array, " size"]) -> Float[Array, "size size"]:
    """One number a column."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, SQUARE, [1]), WGMMA)


def _down(x: Float[Array, " size"]) -> Float[Array, "size size"]:
    """One number a row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, SQUARE, [0]), WGMMA)


def _block(
    begins_ref: Ref,
    lengths_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    scalars_ref: Ref,
    v_ref: Ref,
    p_out: Ref,
    u_out: Ref,
    w_out: Ref,
    *,
    repeats: int,
    interpreted: bool,
    **scratch: Ref,
) -> None:
    chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
    length = lengths_ref[chunk]
    q, k, v = (TokenLines.of(scratch[name], interpreted) for name in ("q", "k", "v"))
    p = scratch["p"]

    @pl.when(length > 0)
    def _live() -> None:
        begin = begins_ref[chunk]
        key_head = lax.div(head, repeats)
        k.load(k_ref.at[:, key_head], begin, scratch["ready"])
        q.load(q_ref.at[:, key_head], begin, scratch["ready"])
        v.load(v_ref.at[:, head], begin, scratch["v_ready"])
        row, column = (plgpu.broadcasted_iota(jnp.int32, SQUARE, axis, layout=WGMMA) for axis in (0, 1))
        layouts = (WGMMA.reduce(1), WGMMA.reduce(0), WGMMA.reduce(1), WGMMA.reduce(0))
        summed, sums, strength, strengths = (
            gpu.load(scalars_ref.at[chunk, head, i], layout=layout, optimized=False) for i, layout in enumerate(layouts)
        )
        decays = jnp.where(column <= row, jnp.exp2(_down(summed) - _across(sums)), 0.0)
        plgpu.barrier_wait(scratch["ready"])
        pl.when(length < TOKENS)(functools.partial(k.clear, length))
        keys = [tile.transpose((1, 0)) for tile in k.tiles]
        reads = [Product(0, tile, key) for tile, key in zip(q.tiles, keys, strict=True)]
        writes = [Product(1, tile, key) for tile, key in zip(k.tiles, keys, strict=True)]
        reading, writing = add_products((zeros(*SQUARE), zeros(*SQUARE)), reads + writes, interpreted)
        p[...] = (reading * decays).astype(p.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(p, p_out.at[chunk, head])
        a = jnp.where(column < row, writing * decays * _down(strength), 0.0)
        inverse = _unit_lower_inverse(a, row ^ column, scratch["t"], scratch["x"], interpreted) * _across(strengths)
        read = (inverse * -_across(jnp.exp2(sums))).astype(p.dtype)
        plgpu.barrier_wait(scratch["v_ready"])
        pl.when(length < TOKENS)(functools.partial(v.clear, length))
        _multiply_into(q.tiles, read, k.tiles, interpreted)
        q.store(w_out.at[chunk, head])
        _multiply_into(v.tiles, inverse.astype(p.dtype), v.tiles, interpreted)
        v.store(u_out.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)


def _multiply_into(targets: tuple[Ref, ...], left: jax.Array, rights: tuple[Ref, ...], interpreted: bool) -> None:
    """target = left @ right for each chunk of columns; a target may be its right operand."""
    products = [Product(i, left, right) for i, right in enumerate(rights)]
    results = add_products(tuple(zeros(*SQUARE) for _ in rights), products, interpreted)
    plgpu.commit_smem()  # every warp has read before any writes
    for target, value in zip(targets, results, strict=True):
        target[...] = value.astype(target.dtype)
    plgpu.commit_smem()


def _unit_lower_inverse(
    a: Float32[Array, "size size"], differing: jax.Array, t: Ref, x: Ref, interpreted: bool
) -> Float32[Array, "size size"]:
    """(I + a)^-1 for a strictly lower triangle; `differing` is row XOR column, which tells the halves apart."""
    a = plgpu.layout_cast(a, WGMMA)
    inverse = plgpu.layout_cast(jnp.where(differing == 0, 1.0, jnp.where(differing == 1, -a, 0.0)), WGMMA)
    half = 2
    while half < TOKENS:
        within = (differing >= half) & (differing < 2 * half)
        low = plgpu.layout_cast(jnp.where(within, a, 0.0).astype(t.dtype), WGMMA)
        t[...] = inverse.astype(t.dtype)
        plgpu.commit_smem()
        (through,) = add_products((zeros(*SQUARE),), (Product(0, low, t),), interpreted)
        x[...] = through.astype(x.dtype)
        plgpu.commit_smem()
        (inverse,) = add_products((inverse,), (Product(0, (-inverse).astype(t.dtype), x),), interpreted)
        half *= 2
    return inverse
