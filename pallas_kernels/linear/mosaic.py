"""Linear layers of few tokens for Hopper GPUs, written with Mosaic GPU: the time is that of reading the weights.

    grid: one block per tile of output columns

    loader warpgroup                 shared memory                        compute warpgroup
    ----------------                 -------------                        -----------------
    waits free[slot]
    w[tile, chunk] ------- TMA ----> w[slot] [columns, 64] ----------->   waits ready[slot]
    x[:, chunk] ---------- TMA ----> x[slot] [64 rows, 64] ----------->   acc += x w^T (wgmma), one in flight
    ... next chunk, next slot                                             arrives free[slot - 1]

    y[:, tile] <---------- TMA ----- out [64, columns] <-- registers      + bias, or gate(left) * right; rounds

A matrix product takes 64 rows in any case, so up to 64 tokens cost the same there; rows that no copy filled are
multiplied and not stored. Rows are copied in pieces of 8.

XLA's products of few rows split the input channels, write float32 sums and add them in a kernel of their own. Here a
tile has all input channels, and its width is chosen so that one wave of tiles fills the GPU: tiles of 32 columns are
narrow enough for 4,096 outputs, and what each reads of the tokens comes from the L2 cache. Splits over a cluster that
exchange their sums through its shared memory were no faster with two blocks, and a third slower with four.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.linear.activations import gate_by_exponential
from tokenspeed_jax.pallas_kernels.linear.xla import linear_xla

CHUNK = 64  # input channels per stage: one 128-byte swizzle of 16-bit values
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of tiles depends on it
SHARED_BYTES = 226 * 1024  # of a multiprocessor, without what barriers take
MAX_STAGES = 16
ROW_PIECE = 8  # rows of one swizzled tile
OWN_COLUMNS = 16  # what a block stores comes in multiples of 32 bytes
COLUMNS = (32, 48, 64, 96, 128, 192)  # of a tile
SMALLEST_WEIGHT = 1 << 24  # elements; below, the launch is what counts
FEWEST_TOKENS = 17  # with fewer, XLA's products are as fast

Ref = Any


@dataclasses.dataclass(frozen=True)
class LinearTiling:
    """How the product is cut.

    Attributes:
        columns: rows of the weight per tile; with a gate half of them are the gate's.
        stages: chunks in flight per block.
    """

    columns: int
    stages: int

    @classmethod
    def choose(cls, *, tokens: int, outputs: int, gated: bool) -> "LinearTiling":
        """The tiling that lets a multiprocessor read the least, over all its tiles."""

        def rows_read(columns: int) -> int:
            waves = -(-outputs // columns // MULTIPROCESSORS)
            return waves * (columns + tokens)

        own = OWN_COLUMNS * (2 if gated else 1)
        fitting = [columns for columns in COLUMNS if outputs % columns == 0 and columns % own == 0]
        return cls.with_all_stages(min(fitting, key=rows_read))

    @classmethod
    def with_all_stages(cls, columns: int) -> "LinearTiling":
        """As many stages as shared memory has room for."""
        out = 2 * blocks.ROWS * columns
        stage = 2 * CHUNK * (blocks.ROWS + columns)
        return cls(columns, min(MAX_STAGES, (SHARED_BYTES - out) // stage))


def mosaic_shape_refusal(*, tokens: int, outputs: int, channels: int, dtypes: set[str], gated: bool) -> str | None:
    """Why the kernel does not serve this product on any GPU; None when it does."""
    if len(dtypes) > 1:
        return f"tokens and weight have different dtypes: {', '.join(sorted(dtypes))}"
    dtype = jnp.dtype(next(iter(dtypes)))
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype.name} is neither bfloat16 nor float16, which the matrix units take"
    if tokens < FEWEST_TOKENS:
        return f"{tokens} tokens are fewer than {FEWEST_TOKENS}, for which XLA's products are as fast"
    if tokens > blocks.ROWS:
        return f"{tokens} tokens are more than {blocks.ROWS}, for which XLA's products are as fast"
    if channels % CHUNK:
        return f"{channels} input channels are no multiple of {CHUNK}"
    step = 2 * COLUMNS[0] if gated else COLUMNS[0]
    if outputs % step:
        return f"{outputs} rows of the weight are no multiple of {step}"
    if tokens % ROW_PIECE:
        return f"{tokens} tokens are no multiple of {ROW_PIECE}, as copies of more than one piece need"
    if outputs * channels < SMALLEST_WEIGHT:
        return f"a weight of {outputs} x {channels} is too small to gain by"
    return None


def linear_mosaic(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"],
    bias: Float[Array, " out"] | None,
    gate: str | None,
    *,
    tiling: LinearTiling | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens outputs"]:
    """See `linear`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    if tiling is None:
        tiling = LinearTiling.choose(tokens=x.shape[0], outputs=weight.shape[0], gated=gate is not None)
    return _linear(gate, tiling, interpret, x, weight, bias)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _linear(
    gate: str | None, tiling: LinearTiling, interpret: Any, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> Float[Array, "tokens outputs"]:
    scratch: dict[str, Any] = {
        "x_smem": blocks.swizzled(tiling.stages, blocks.ROWS, CHUNK, dtype=x.dtype),
        "w_smem": blocks.swizzled(tiling.stages, tiling.columns, CHUNK, dtype=x.dtype),
        "out_smem": blocks.swizzled_rows(blocks.ROWS, tiling.columns // (1 if gate is None else 2), dtype=x.dtype),
        "ready": plgpu.Barrier(num_arrivals=2 if gate is None else 3, num_barriers=tiling.stages),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=tiling.stages),
    }
    kernel = plgpu.kernel(
        functools.partial(_block, gate=gate, tiling=tiling),
        out_type=jax.ShapeDtypeStruct((x.shape[0], weight.shape[0] // (1 if gate is None else 2)), x.dtype),
        scratch_types=scratch,
        grid=(weight.shape[0] // tiling.columns,),
        grid_names=("tile",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="linear" if gate is None else "linear_gated",
    )
    return kernel(x, weight, *(() if bias is None else (bias,)))


def _forward(
    gate: str | None, tiling: LinearTiling, interpret: Any, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    return _linear(gate, tiling, interpret, x, weight, bias), (x, weight, bias)


def _backward(
    gate: str | None, tiling: LinearTiling, interpret: Any, arguments: tuple[Any, ...], gradient: jax.Array
) -> Any:
    """Through XLA's form, which computes the same."""
    del tiling, interpret
    x, weight, bias = arguments
    _, pull = jax.vjp(lambda x, w, b: linear_xla(x, w, b, gate), x, weight, bias)
    return pull(gradient)


_linear.defvjp(_forward, _backward)


def _block(
    x_ref: Ref, w_ref: Ref, *bias_and_out_ref: Ref, gate: str | None, tiling: LinearTiling, **scratch: Ref
) -> None:
    *bias_refs, out_ref = bias_and_out_ref
    tile, warpgroup = lax.axis_index("tile"), lax.axis_index("warpgroup")

    @pl.when(warpgroup == 1)
    def _load() -> None:
        _load_chunks(x_ref, w_ref, tile, gate is not None, tiling, scratch)

    @pl.when(warpgroup == 0)
    def _compute() -> None:
        product = _multiply(x_ref.shape[1] // CHUNK, tiling, scratch)
        width = tiling.columns // (1 if gate is None else 2)

        def with_bias(part: jax.Array, start: jax.Array) -> jax.Array:
            if not bias_refs:
                return part
            values = bias_refs[0].at[pl.ds(start, width)]
            row = blocks.gpu.load(values, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return part + lax.broadcast_in_dim(row.astype(jnp.float32), part.shape, [1])

        if gate is None:
            result = with_bias(product, tile * width)
        else:
            left = with_bias(product[:, :width], tile * width)
            right = with_bias(product[:, width:], tile * width + out_ref.shape[1])
            result = gate_by_exponential(gate, left) * right
        out_smem = scratch["out_smem"]
        out_smem[...] = result.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(0, out_ref.shape[0])], out_ref.at[:, pl.ds(tile * width, width)])
        plgpu.wait_smem_to_gmem(0)


def _load_chunks(
    x_ref: Ref,
    w_ref: Ref,
    tile: jax.Array,
    gated: bool,
    tiling: LinearTiling,
    scratch: dict[str, Ref],
) -> None:
    chunks = x_ref.shape[1] // CHUNK
    parts = 2 if gated else 1
    width = tiling.columns // parts

    @pl.loop(0, chunks)
    def _chunk(chunk: jax.Array) -> None:
        slot = lax.rem(chunk, tiling.stages)
        ready = scratch["ready"].at[slot]
        channels = pl.ds(chunk * CHUNK, CHUNK)
        pl.when(chunk >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
        for part in range(parts):
            weight_rows = pl.ds(tile * width + part * (w_ref.shape[0] // 2), width)
            w_smem = scratch["w_smem"].at[slot, pl.ds(part * width, width)]
            plgpu.copy_gmem_to_smem(w_ref.at[weight_rows, channels], w_smem, ready)
        x_smem = scratch["x_smem"].at[slot, pl.ds(0, x_ref.shape[0])]
        plgpu.copy_gmem_to_smem(x_ref.at[:, channels], x_smem, ready)

    @pl.loop(max(chunks - tiling.stages, 0), chunks)
    def _drain(chunk: jax.Array) -> None:
        plgpu.barrier_wait(scratch["free"].at[lax.rem(chunk, tiling.stages)])


def _multiply(chunks: int, tiling: LinearTiling, scratch: dict[str, Ref]) -> Float[Array, "64 columns"]:
    """The tile's product over all input channels."""

    def accumulate(accumulator: Ref) -> jax.Array:
        @pl.loop(0, chunks)
        def _chunk(chunk: jax.Array) -> None:
            slot = lax.rem(chunk, tiling.stages)
            plgpu.barrier_wait(scratch["ready"].at[slot])
            plgpu.wgmma(accumulator, scratch["x_smem"].at[slot], scratch["w_smem"].at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(1)

            @pl.when(chunk > 0)
            def _release() -> None:
                plgpu.barrier_arrive(scratch["free"].at[lax.rem(chunk - 1, tiling.stages)])

        return accumulator[...]

    product = pl.run_scoped(accumulate, blocks.gpu.ACC((blocks.ROWS, tiling.columns), jnp.float32))
    plgpu.barrier_arrive(scratch["free"].at[(chunks - 1) % tiling.stages])
    return product
