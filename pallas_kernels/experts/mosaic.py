"""The experts' products for Hopper GPUs, written with Mosaic GPU: two grouped products over tiles of one expert each.

    grid: one persistent block per multiprocessor; its items are (tile, block of output columns), columns fastest

    loader warpgroup                 shared memory                       compute warpgroups (1 to 3, 64 rows each)
    ----------------                 -------------                       -----------------------------------------
    expert <- expert_of_tile
    waits free[slot] (all)
    x[tile rows, chunk] -- TMA ----> x[slot] [64 a warpgroup, 64] ---->  waits ready[slot]
    w[expert, columns, chunk] TMA -> w[slot] [2, columns, 64] -------->  acc_i += x w_i^T (wgmma), twice
    ... next chunk, next slot;                                           one product in flight; arrives free[slot]
    then the next item, while
    the last one is stored           out [64, columns] <-- registers     activation(acc_0, acc_1) or both, rounded
                                     out ------------- TMA ----------->  result[tile rows, columns]

The first product's two weight blocks are the same columns of gate and up, so that the activation needs no other block
and its inputs never leave the registers; the second product's are neighbours. One kernel copies the tokens into tiles
before (`dispatch.py`), one sums each token's choices after (`combination.py`). A tile has from 8 to 192 rows: the
matrix units take 64 in any case, and what they compute of rows that no copy filled is not stored. A warpgroup whose 64
rows hold no token passes the item by. With few tokens the time is that of reading the weights, once for each tile, and
no expert without a tile is read.
"""

import dataclasses
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
from tokenspeed_jax.pallas_kernels.experts.activations import GatedActivation
from tokenspeed_jax.pallas_kernels.experts.combination import combination_refusal, combine_mosaic
from tokenspeed_jax.pallas_kernels.experts.dispatch import (
    MAX_HIDDEN,
    MAX_TOP_K,
    MOST_TABLED_EXPERTS,
    PlacedTiles,
    dispatch_mosaic,
    dispatch_xla,
)
from tokenspeed_jax.pallas_kernels.experts.tiles import MOSAIC_COLUMNS, mosaic_tile_rows, tile_capacity
from tokenspeed_jax.pallas_kernels.experts.weights import ExpertWeights
from tokenspeed_jax.pallas_kernels.experts.xla import combine, expert_mlp_xla

CHUNK = 64  # input channels per stage: one 128-byte swizzle of 16-bit values
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the number of blocks depends on it
SHARED_BYTES = 226 * 1024  # of a multiprocessor, without what barriers take
MAX_STAGES = 8
# Registers of a compute thread and of a loading one, by the number of compute warpgroups.
REGISTERS = {2: (232, 40), 3: (160, 24)}

Ref = Any


@dataclasses.dataclass(frozen=True)
class ProductTiling:
    """How one grouped product is cut.

    Attributes:
        rows: of a tile; above 64, 64 for each compute warpgroup.
        weight_blocks: products per item, each of its own columns of the weights.
        columns: of one weight block.
        stages: chunks of input channels in flight.
    """

    rows: int
    weight_blocks: int
    columns: int
    stages: int

    @classmethod
    def choose(cls, rows: int, outputs: int, *, gated: bool, tiles: int) -> "ProductTiling":
        """The widest blocks that divide the outputs and still occupy the GPU, with all stages that fit.

        Args:
            outputs: columns of the result.
            tiles: how many tiles there are at most.
        """
        fitting = [
            (count, columns)
            for count, columns in MOSAIC_COLUMNS
            if (not gated or count == 2) and outputs % (columns if gated else count * columns) == 0
        ]

        def items(block: tuple[int, int]) -> int:
            return tiles * outputs // (block[1] if gated else block[0] * block[1])

        count, columns = next((block for block in fitting if items(block) >= MULTIPROCESSORS), fitting[-1])
        warpgroups = -(-rows // blocks.ROWS)
        stage = 2 * CHUNK * (warpgroups * blocks.ROWS + count * columns)
        out = 2 * warpgroups * blocks.ROWS * columns
        return cls(rows, count, columns, min(MAX_STAGES, (SHARED_BYTES - out) // stage))

    @property
    def warpgroups(self) -> int:
        """Compute warpgroups of a block."""
        return -(-self.rows // blocks.ROWS)

    @property
    def rows_each(self) -> int:
        """Rows of a tile that one warpgroup stores."""
        return min(self.rows, blocks.ROWS)


def mosaic_shape_refusal(*, hidden: int, inner: int, top_k: int, dtypes: set[str]) -> str | None:
    """Why the kernels cannot serve these experts on any GPU; None when they can."""
    if top_k > MAX_TOP_K:
        return f"{top_k} experts per token are more than {MAX_TOP_K}"
    if hidden > MAX_HIDDEN:
        return f"hidden size {hidden} is above {MAX_HIDDEN}"
    if len(dtypes) > 1:
        return f"tokens and weights have different dtypes: {', '.join(sorted(dtypes))}"
    dtype = jnp.dtype(next(iter(dtypes)))
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype.name} is neither bfloat16 nor float16, which the matrix units take"
    for name, size in (("hidden", hidden), ("inner", inner)):
        if size % CHUNK:
            return f"{name} size {size} is no multiple of {CHUNK}"
    return None


def expert_mlp_mosaic(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
    activation: GatedActivation,
    *,
    interpret: Any = None,
) -> Float[Array, "tokens hidden"]:
    """See `expert_mlp`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU. Each choice is rounded to x's dtype."""
    return _expert_mlp(activation, interpret, x, weights, expert_ids, expert_weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _expert_mlp(
    activation: GatedActivation,
    interpret: Any,
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
) -> Float[Array, "tokens hidden"]:
    num_experts, hidden, width = weights.down.shape
    rows = mosaic_tile_rows(expert_ids.size, num_experts)
    most = tile_capacity(expert_ids.size, num_experts, rows)
    first = ProductTiling.choose(rows, width, gated=True, tiles=most)
    second = ProductTiling.choose(rows, hidden, gated=False, tiles=most)
    if num_experts > MOST_TABLED_EXPERTS:
        x_slots, tiles = dispatch_xla(x, expert_ids, num_experts, rows)
    else:
        x_slots, tiles = dispatch_mosaic(x, expert_ids, num_experts, rows, interpret=interpret)
    inner = grouped_product(
        x_slots, weights.gate_up, weights.gate_up_bias, tiles, first, activation, interpret=interpret
    )
    y = grouped_product(inner, weights.down, weights.down_bias, tiles, second, None, interpret=interpret)
    if combination_refusal(hidden):
        return combine(y, tiles.slot_of_choice, expert_weights).astype(x.dtype)
    return combine_mosaic(y, tiles.slot_of_choice, expert_weights, interpret=interpret)


def _forward(activation: GatedActivation, interpret: Any, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    return _expert_mlp(activation, interpret, *arguments), arguments


def _backward(activation: GatedActivation, interpret: Any, arguments: tuple[Any, ...], gradient: Array) -> Any:
    """Through the portable form, which computes the same."""
    del interpret
    x, weights, expert_ids, expert_weights = arguments
    _, pull = jax.vjp(lambda x, w, e: expert_mlp_xla(x, w, expert_ids, e, activation), x, weights, expert_weights)
    of_x, of_weights, of_expert_weights = pull(gradient)
    return of_x, of_weights, None, of_expert_weights


_expert_mlp.defvjp(_forward, _backward)


def grouped_product(
    x: Float[Array, "slots channels"],
    weights: Float[Array, "experts out channels"],
    bias: Float[Array, "experts out"] | None,
    tiles: PlacedTiles,
    tiling: ProductTiling,
    activation: GatedActivation | None,
    *,
    interpret: Any = None,
) -> Float[Array, "slots columns"]:
    """Each tile's rows times its expert's weights, plus its bias; rows that hold no token stay undefined.

    With an activation the first half of `out` are gates, the second ups, and `columns` is half of `out`.
    """
    gated = activation is not None
    outputs = weights.shape[1] // 2 if gated else weights.shape[1]
    scratch = {
        "x_smem": blocks.swizzled(tiling.stages, tiling.warpgroups, blocks.ROWS, CHUNK, dtype=x.dtype),
        "w_smem": blocks.swizzled(tiling.stages, tiling.weight_blocks, tiling.columns, CHUNK, dtype=x.dtype),
        "out_smem": blocks.swizzled(tiling.warpgroups, blocks.ROWS, tiling.columns, dtype=x.dtype),
        "ready": plgpu.Barrier(num_arrivals=tiling.warpgroups + tiling.weight_blocks, num_barriers=tiling.stages),
        "free": plgpu.Barrier(num_arrivals=tiling.warpgroups, num_barriers=tiling.stages),
    }
    width = tiling.columns * (1 if gated else tiling.weight_blocks)
    items = tiles.expert_of_tile.size * (outputs // width)
    kernel = plgpu.kernel(
        functools.partial(_block, tiling=tiling, activation=activation),
        out_type=jax.ShapeDtypeStruct((x.shape[0], outputs), x.dtype),
        scratch_types=scratch,
        grid=(min(MULTIPROCESSORS, items),),
        grid_names=("block",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="experts_gate_up" if gated else "experts_down",
    )
    biases = () if bias is None else (bias,)
    return kernel(x, weights, tiles.expert_of_tile, tiles.rows_of_tile, tiles.num_live, *biases)


def _block(
    x_ref: Ref,
    w_ref: Ref,
    expert_ref: Ref,
    rows_ref: Ref,
    live_ref: Ref,
    *bias_and_out_ref: Ref,
    tiling: ProductTiling,
    activation: GatedActivation | None,
    **scratch: Ref,
) -> None:
    *bias_refs, out_ref = bias_and_out_ref
    block, num_blocks = lax.axis_index("block"), lax.axis_size("block")
    warpgroup = lax.axis_index("warpgroup")
    width = tiling.columns * (tiling.weight_blocks if activation is None else 1)
    column_blocks = out_ref.shape[1] // width
    items = lax.div(live_ref[0] * column_blocks - block + (num_blocks - 1), num_blocks)

    def place(item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile and first output column."""
        number = block + item * num_blocks
        return lax.div(number, column_blocks), lax.rem(number, column_blocks) * width

    # Rows of the weights from an item's first weight block to its second.
    second = w_ref.shape[1] // 2 if activation is not None else tiling.columns

    def add_bias(products: tuple[jax.Array, ...], item: jax.Array) -> tuple[jax.Array, ...]:
        if not bias_refs:
            return products
        tile, column = place(item)
        bias_ref = bias_refs[0].at[expert_ref[tile]]

        def of_block(i: int) -> jax.Array:
            columns = bias_ref.at[pl.ds(column + i * second, tiling.columns)]
            return blocks.gpu.load(columns, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)

        return tuple(
            product + lax.broadcast_in_dim(of_block(i), product.shape, [1]) for i, product in enumerate(products)
        )

    @pl.when(warpgroup < tiling.warpgroups)
    def _compute() -> None:
        if tiling.warpgroups > 1:
            plgpu.set_max_registers(REGISTERS[tiling.warpgroups][0], action="increase")
        _multiply(
            x_ref.shape[1] // CHUNK, out_ref, rows_ref, items, place, add_bias, warpgroup, tiling, activation, scratch
        )

    @pl.when(warpgroup == tiling.warpgroups)
    def _load() -> None:
        if tiling.warpgroups > 1:
            plgpu.set_max_registers(REGISTERS[tiling.warpgroups][1], action="decrease")
        _load_chunks(x_ref, w_ref, expert_ref, rows_ref, items, place, second, tiling, scratch)


def _load_chunks(
    x_ref: Ref,
    w_ref: Ref,
    expert_ref: Ref,
    rows_ref: Ref,
    items: jax.Array,
    place: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    second: int,
    tiling: ProductTiling,
    scratch: dict[str, Ref],
) -> None:
    chunks = x_ref.shape[1] // CHUNK

    @pl.loop(0, items)
    def _item(item: jax.Array) -> None:
        tile, column = place(item)
        expert, live_rows = expert_ref[tile], rows_ref[tile]

        @pl.loop(0, chunks)
        def _chunk(chunk: jax.Array) -> None:
            step = item * chunks + chunk
            slot = lax.rem(step, tiling.stages)
            ready = scratch["ready"].at[slot]
            channels = pl.ds(chunk * CHUNK, CHUNK)
            pl.when(step >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
            for i in range(tiling.weight_blocks):
                weight_rows = pl.ds(column + i * second, tiling.columns)
                plgpu.copy_gmem_to_smem(w_ref.at[expert, weight_rows, channels], scratch["w_smem"].at[slot, i], ready)
            for i in range(tiling.warpgroups):
                x_rows = pl.ds(tile * tiling.rows + i * blocks.ROWS, tiling.rows_each)
                x_smem = scratch["x_smem"].at[slot, i, pl.ds(0, tiling.rows_each)]
                copy = functools.partial(plgpu.copy_gmem_to_smem, x_ref.at[x_rows, channels], x_smem, ready)
                if i == 0:
                    copy()
                else:
                    lax.cond(live_rows > i * blocks.ROWS, copy, functools.partial(plgpu.barrier_arrive, ready))

    steps = items * chunks

    @pl.loop(jnp.maximum(steps - tiling.stages, 0), steps)
    def _drain(step: jax.Array) -> None:
        plgpu.barrier_wait(scratch["free"].at[lax.rem(step, tiling.stages)])


def _multiply(
    chunks: int,
    out_ref: Ref,
    rows_ref: Ref,
    items: jax.Array,
    place: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    add_bias: Callable[[tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]],
    warpgroup: jax.Array,
    tiling: ProductTiling,
    activation: GatedActivation | None,
    scratch: dict[str, Ref],
) -> None:
    out_smem = scratch["out_smem"].at[warpgroup]

    def slot_of(item: jax.Array, chunk: jax.Array | int) -> jax.Array:
        return lax.rem(item * chunks + chunk, tiling.stages)

    def product(item: jax.Array) -> None:
        tile, column = place(item)

        def accumulate(*accumulators: Ref) -> tuple[jax.Array, ...]:
            @pl.loop(0, chunks)
            def _chunk(chunk: jax.Array) -> None:
                slot = slot_of(item, chunk)
                plgpu.barrier_wait(scratch["ready"].at[slot])
                for i, accumulator in enumerate(accumulators):
                    w_smem = scratch["w_smem"].at[slot, i]
                    plgpu.wgmma(accumulator, scratch["x_smem"].at[slot, warpgroup], w_smem.transpose((1, 0)))
                plgpu.wgmma_wait(len(accumulators))

                @pl.when(chunk > 0)
                def _release() -> None:
                    plgpu.barrier_arrive(scratch["free"].at[slot_of(item, chunk - 1)])

            return tuple(accumulator[...] for accumulator in accumulators)

        accumulator = blocks.gpu.ACC((blocks.ROWS, tiling.columns), jnp.float32)
        products = pl.run_scoped(accumulate, *[accumulator] * tiling.weight_blocks)
        plgpu.barrier_arrive(scratch["free"].at[slot_of(item, chunks - 1)])
        products = add_bias(products, item)
        results = products if activation is None else (activation(*products),)
        rows = pl.ds(tile * tiling.rows + warpgroup * blocks.ROWS, tiling.rows_each)
        for i, result in enumerate(results):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_smem[...] = result.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(column + i * tiling.columns, tiling.columns)
            plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, tiling.rows_each)], out_ref.at[rows, columns])

    def pass_by(item: jax.Array) -> None:
        pl.loop(0, chunks)(lambda chunk: _pass_by(slot_of(item, chunk), scratch))

    @pl.loop(0, items)
    def _item(item: jax.Array) -> None:
        if tiling.warpgroups == 1:
            product(item)
        else:
            is_live = rows_ref[place(item)[0]] > warpgroup * blocks.ROWS
            lax.cond(is_live, product, pass_by, item)

    plgpu.wait_smem_to_gmem(0)


def _pass_by(slot: jax.Array, scratch: dict[str, Ref]) -> None:
    """One chunk of a tile in which a warpgroup's rows hold no token."""
    plgpu.barrier_wait(scratch["ready"].at[slot])
    plgpu.barrier_arrive(scratch["free"].at[slot])
