"""A decoder layer after its attention, for few tokens on Hopper GPUs, in Mosaic GPU: three products in one launch.

    grid: (block,), all of them on the GPU at once; a block has one tile of output columns of each product

    weight loader           shared memory                 compute warpgroup             token loader
    -------------           -------------                 -----------------             ------------
    out_weight[tile] -----> w[slot] ------------------->  A: s = x + mixed W^T    <---- mixed, chunks of 64 channels
                                                             s n, sum of s^2 -> memory; arrives
    gate_up[tile] --------> w[slot] ------------------->  B: g = norm(s) W^T      <---- waits for all blocks; s n
                                                             f(left) right ---> memory; arrives
    down[tile] -----------> w[slot] ------------------->  C: y = s + g W^T        <---- waits for all blocks; g

What a step of few tokens takes is the reading of weights, and weights depend on nothing: their loader runs ahead
through all three products, so memory stays busy where blocks wait for each other, and where a launch would end and the
next begin. Only the token loader waits (`semaphore`).

The norm needs whole rows, which no block has at the end of A. So A leaves the rows times the norm's weights n, and the
squares' sums of its tile; B multiplies these rows, adds up the sums of all tiles, and scales its product, which is the
product of the scaled rows. The rows are rounded once less than in the plain form. A tile of s itself never leaves its
block, which adds it in C.

A product takes 64 rows in any case; what stands behind a stage's own rows is multiplied and not stored. So stages of
tokens lie as close as their rows allow: the fewer tokens, the more chunks of them are in flight.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.linear.activations import gate_by_exponential
from tokenspeed_jax.pallas_kernels.norm_rules import NormRule

CHUNK = 64  # input channels of one copy: one 128-byte swizzle of 16-bit values
MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; blocks that wait for each other must all run
SHARED_BYTES = 225 * 1024  # of a multiprocessor, without what barriers take
ROW_PIECE = 8  # rows of one swizzled tile
COLUMN_STEP = 16  # what a block stores comes in multiples of 32 bytes
WIDEST_PRODUCT = 256  # columns of one wgmma
WIDEST_TILE = 64  # columns of a tile of A and C, whose sum stays in shared memory
MOST_WEIGHT_STAGES = 16
TOKEN_ROWS = 512  # of all stages of tokens
MOST_TOKEN_STAGES = 32
SPAN = 256  # input channels that narrow tiles take in one stage: what is in flight has to fill the memory's latency
COMPUTE_REGISTERS = 232
LOADER_REGISTERS = 40
PHASES = ("out", "gate_up", "down")

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any


@dataclasses.dataclass(frozen=True)
class Product:
    """One of the three products, as a block does its tile of it.

    Attributes:
        channels: of its input.
        columns: outputs of a tile; of a gated product, of each half.
        tiles: blocks that have a tile.
        gated: whether a tile reads two halves of the weight.
        span: chunks of channels in a stage of weights.
    """

    channels: int
    columns: int
    tiles: int
    gated: bool
    span: int

    @property
    def width(self) -> int:
        """Rows of the weight that a tile reads."""
        return self.columns * (2 if self.gated else 1)

    @property
    def chunks(self) -> int:
        return self.channels // CHUNK

    @property
    def copies(self) -> int:
        """Of a stage of weights."""
        return self.span * (2 if self.gated else 1)


@dataclasses.dataclass(frozen=True)
class TailTiling:
    """How the kernel is cut.

    Attributes:
        products: out, gate_up, down.
        weight_stages, token_stages: stages in flight per block.
    """

    products: tuple[Product, Product, Product]
    weight_stages: int
    token_stages: int

    @property
    def blocks(self) -> int:
        return max(product.tiles for product in self.products)

    @property
    def lag(self) -> int:
        """Products of one chunk that may be under way while the next is begun."""
        return 3 if self.token_stages >= 16 else 1

    @property
    def stage_rows(self) -> int:
        """Rows of 64 channels in a stage of weights."""
        return max(product.width * product.span for product in self.products)

    @classmethod
    def choose(cls, *, tokens: int, hidden: int, mixed: int, inner: int) -> "TailTiling | None":
        """The tiling of these sizes; None when they cannot be cut."""
        stream, gate = _columns(hidden, WIDEST_TILE), _columns(inner, WIDEST_PRODUCT // 2)
        if stream is None or gate is None or any(size % CHUNK for size in (hidden, mixed, inner)):
            return None

        def product(channels: int, columns: int, outputs: int, *, gated: bool = False) -> Product:
            wide = SPAN // CHUNK if columns <= WIDEST_TILE and not gated else 1
            span = next(span for span in (wide, 2, 1) if channels // CHUNK % span == 0)
            return Product(channels, columns, outputs // columns, gated, span)

        products = (
            product(mixed, stream, hidden),
            product(hidden, gate, inner, gated=True),
            product(inner, stream, hidden),
        )
        token_stages = min(TOKEN_ROWS // _padded(tokens), MOST_TOKEN_STAGES)
        token_bytes = 2 * CHUNK * _token_rows(tokens, token_stages)
        stage = 2 * CHUNK * max(product.width * product.span for product in products)
        fixed = 2 * blocks.ROWS * (2 * stream + gate) + 4 * blocks.ROWS
        stages = min((SHARED_BYTES - fixed - token_bytes) // stage, MOST_WEIGHT_STAGES)
        return cls(products, stages, token_stages) if stages >= 3 else None


def _padded(tokens: int) -> int:
    """Rows of a copy, in whole swizzled tiles."""
    return -(-tokens // ROW_PIECE) * ROW_PIECE


def _token_rows(tokens: int, stages: int) -> int:
    """Rows of all stages, and what a product reads behind the last one."""
    return (stages - 1) * _padded(tokens) + blocks.ROWS


def _columns(outputs: int, most: int) -> int | None:
    """The narrowest tile that gives each block one at most."""
    widths = range(COLUMN_STEP, most + 1, COLUMN_STEP)
    return next((width for width in widths if outputs % width == 0 and outputs // width <= MULTIPROCESSORS), None)


def mosaic_shape_refusal(*, tokens: int, hidden: int, mixed: int, inner: int, dtypes: set[str]) -> str | None:
    """Why the kernel does not serve this layer on any GPU; None when it does."""
    if dtypes != {"bfloat16"}:
        return f"tokens and weights are {', '.join(sorted(dtypes))}, not all bfloat16"
    if not 0 < tokens <= blocks.ROWS:
        return f"{tokens} tokens are none or more than the {blocks.ROWS} rows of one product"
    if TailTiling.choose(tokens=tokens, hidden=hidden, mixed=mixed, inner=inner) is None:
        return f"products of {mixed} -> {hidden} -> 2 x {inner} -> {hidden} channels are not cut into one tile a block"
    return None


@functools.partial(jax.jit, static_argnames=("rule", "activation", "tiling", "interpret"))
def decoder_tail_mosaic(
    x: Float[Array, "tokens hidden"],
    mixed: Float[Array, "tokens mixed"],
    out_weight: Float[Array, "hidden mixed"],
    norm_weight: Float[Array, " hidden"],
    gate_up: Float[Array, "gates hidden"],
    down: Float[Array, "hidden inner"],
    *,
    rule: NormRule,
    activation: str,
    tiling: TailTiling | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens hidden"]:
    """See `decoder_tail`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU, and then each product is a launch."""
    tokens, hidden = x.shape
    if tiling is None:
        tiling = TailTiling.choose(tokens=tokens, hidden=hidden, mixed=mixed.shape[1], inner=down.shape[1])
    if tiling is None:
        raise ValueError(f"no tiling for {hidden} channels")
    padding = ((0, _padded(tokens) - tokens), (0, 0))
    arrays = {
        "x": jnp.pad(x, padding),
        "mixed": jnp.pad(mixed, padding),
        "out_weight": out_weight,
        "norm": norm_weight,
        "gate_up_weight": gate_up,
        "down_weight": down,
    }
    rows = arrays["x"].shape[0]
    results = {
        "out": {
            "weighed": jax.ShapeDtypeStruct((rows, hidden), x.dtype),
            "squares": jax.ShapeDtypeStruct((_whole_tiles(tiling), blocks.ROWS), jnp.float32),
        },
        "gate_up": {"inner": jax.ShapeDtypeStruct((rows, down.shape[1]), x.dtype)},
        "down": {"y": jax.ShapeDtypeStruct((rows, hidden), x.dtype)},
    }
    launches = [PHASES]
    if interpret is not None:  # each product is a launch, between which the stream has to be kept
        launches = [(phase,) for phase in PHASES]
        results["out"]["stream"] = results["down"]["y"]
    for phases in launches:
        made = {name: shape for phase in phases for name, shape in results[phase].items()}
        kernel = plgpu.kernel(
            functools.partial(
                _block,
                names=(*arrays, *made),
                phases=phases,
                tiling=tiling,
                rule=rule,
                activation=activation,
            ),
            out_type=list(made.values()),
            scratch_types=_scratch(tiling, tokens, x.dtype),
            grid=(tiling.blocks,),
            grid_names=("block",),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name="decoder_tail",
        )
        arrays |= dict(zip(made, kernel(*arrays.values()), strict=True))
    return arrays["y"][:tokens]


def _whole_tiles(tiling: TailTiling) -> int:
    """Tiles of the first product, and as many more as make up whole tiles of 64 rows, as registers take them."""
    return -(-tiling.products[0].tiles // blocks.ROWS) * blocks.ROWS


def _scratch(tiling: TailTiling, tokens: int, dtype: jnp.dtype) -> dict[str, Any]:
    out, gate_up, _ = tiling.products
    return {
        "w_smem": blocks.swizzled(tiling.weight_stages, tiling.stage_rows, CHUNK, dtype=dtype),
        "t_smem": blocks.swizzled(_token_rows(tokens, tiling.token_stages), CHUNK, dtype=dtype),
        "stream_smem": blocks.swizzled_rows(blocks.ROWS, out.columns, dtype=dtype),
        "weighed_smem": blocks.swizzled_rows(blocks.ROWS, out.columns, dtype=dtype),
        "squares_smem": plgpu.SMEM((blocks.ROWS,), jnp.float32),
        "inner_smem": blocks.swizzled_rows(blocks.ROWS, gate_up.columns, dtype=dtype),
        "w_free": plgpu.Barrier(num_barriers=tiling.weight_stages),
        "t_ready": plgpu.Barrier(num_barriers=tiling.token_stages),
        "t_free": plgpu.Barrier(num_barriers=tiling.token_stages),
        "stream_ready": plgpu.Barrier(),
    } | {
        f"{phase}_ready": plgpu.Barrier(num_arrivals=product.copies, num_barriers=tiling.weight_stages)
        for phase, product in zip(PHASES, tiling.products, strict=True)
    }


@dataclasses.dataclass(frozen=True)
class _Phase:
    """One product of one block.

    Attributes:
        tile: the block's; beyond the last one the block has nothing to do.
        weight_stages, token_stages: how many the block filled before it.
        index: how many products came before it in this launch.
    """

    name: str
    product: Product
    tile: jax.Array
    weight_stages: jax.Array
    token_stages: jax.Array
    index: int

    @property
    def is_active(self) -> jax.Array:
        return self.tile < self.product.tiles

    @property
    def chunks(self) -> jax.Array:
        return jnp.where(self.is_active, self.product.chunks, 0)


def _phases(names: tuple[str, ...], tiling: TailTiling) -> list[_Phase]:
    block = lax.axis_index("block")
    weights = tokens = jnp.int32(0)
    phases = []
    for index, name in enumerate(names):
        product = tiling.products[PHASES.index(name)]
        phase = _Phase(name, product, block, weights, tokens, index)
        phases.append(phase)
        weights, tokens = weights + phase.chunks // product.span, tokens + phase.chunks
    return phases


def _block(
    *all_refs: Ref,
    names: tuple[str, ...],
    phases: tuple[str, ...],
    tiling: TailTiling,
    rule: NormRule,
    activation: str,
    **scratch: Ref,
) -> None:
    refs = dict(zip(names, all_refs, strict=True))
    work = _phases(phases, tiling)
    # One for each product that others wait for: a block without a tile arrives before others have done the one before.
    arrived = [pl.get_global(gpu.SemaphoreType.REGULAR) for _ in phases[1:]]
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 0)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        for phase in work:
            run = functools.partial(_compute_phase, phase, refs, tiling, scratch, rule, activation)
            pl.when(phase.is_active)(run)
            if phase.index < len(arrived):
                pl.semaphore_signal(arrived[phase.index])

    @pl.when(warpgroup == 1)
    def _load_weights() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        for phase in work:
            _load_weights_of(phase, refs[f"{phase.name}_weight"], tiling, scratch)
        _drain(
            scratch["w_free"], work[-1].weight_stages + work[-1].chunks // work[-1].product.span, tiling.weight_stages
        )

    @pl.when(warpgroup == 2)
    def _load_tokens() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        for phase in work:
            if phase.index:
                pl.semaphore_wait(arrived[phase.index - 1], tiling.blocks, decrement=False)
            pl.when(phase.is_active)(functools.partial(_load_stream, phase, refs, scratch))
            _load_tokens_of(phase, refs, tiling, scratch)
        _drain(scratch["t_free"], work[-1].token_stages + work[-1].chunks, tiling.token_stages)


def _load_weights_of(phase: _Phase, weight: Ref, tiling: TailTiling, scratch: dict[str, Ref]) -> None:
    product, columns = phase.product, phase.product.columns

    @pl.loop(0, phase.chunks // product.span)
    def _stage(stage: jax.Array) -> None:
        number = phase.weight_stages + stage
        slot = lax.rem(number, tiling.weight_stages)
        pl.when(number >= tiling.weight_stages)(functools.partial(plgpu.barrier_wait, scratch["w_free"].at[slot]))
        for part, chunk in itertools.product(range(2 if product.gated else 1), range(product.span)):
            rows = pl.ds(phase.tile * columns + part * (weight.shape[0] // 2), columns)
            channels = pl.ds((stage * product.span + chunk) * CHUNK, CHUNK)
            place = pl.ds((chunk * (product.copies // product.span) + part) * columns, columns)
            ready = scratch[f"{phase.name}_ready"].at[slot]
            plgpu.copy_gmem_to_smem(weight.at[rows, channels], scratch["w_smem"].at[slot, place], ready)


def _load_stream(phase: _Phase, refs: dict[str, Ref], scratch: dict[str, Ref]) -> None:
    """The tile of the stream that a product is added to, where this launch does not have it yet."""
    if phase.name == "gate_up" or phase.index:
        return
    stream = refs["x" if phase.name == "out" else "stream"]
    columns = pl.ds(phase.tile * phase.product.columns, phase.product.columns)
    tile = scratch["stream_smem"].at[pl.ds(0, stream.shape[0])]
    plgpu.copy_gmem_to_smem(stream.at[:, columns], tile, scratch["stream_ready"])


def _load_tokens_of(phase: _Phase, refs: dict[str, Ref], tiling: TailTiling, scratch: dict[str, Ref]) -> None:
    tokens = refs[{"out": "mixed", "gate_up": "weighed", "down": "inner"}[phase.name]]

    @pl.loop(0, phase.chunks)
    def _chunk(chunk: jax.Array) -> None:
        number = phase.token_stages + chunk
        slot = lax.rem(number, tiling.token_stages)
        pl.when(number >= tiling.token_stages)(functools.partial(plgpu.barrier_wait, scratch["t_free"].at[slot]))
        place = scratch["t_smem"].at[pl.ds(slot * tokens.shape[0], tokens.shape[0])]
        plgpu.copy_gmem_to_smem(tokens.at[:, pl.ds(chunk * CHUNK, CHUNK)], place, scratch["t_ready"].at[slot])


def _drain(free: Ref, filled: jax.Array, stages: int) -> None:
    @pl.loop(jnp.maximum(filled - stages, 0), filled)
    def _wait(number: jax.Array) -> None:
        plgpu.barrier_wait(free.at[lax.rem(number, stages)])


def _compute_phase(
    phase: _Phase,
    refs: dict[str, Ref],
    tiling: TailTiling,
    scratch: dict[str, Ref],
    rule: NormRule,
    activation: str,
) -> None:
    width = phase.product.columns
    columns = pl.ds(phase.tile * width, width)
    product = _multiply(phase, refs["mixed"].shape[0], tiling, scratch)
    if phase.name == "gate_up":
        squares = _row_squares(refs["squares"], tiling.products[0].tiles, scratch["squares_smem"])
        scale = lax.rsqrt(squares * (1.0 / phase.product.channels) + rule.epsilon)
        product = product * lax.broadcast_in_dim(scale, product.shape, [0])
        staged, out = scratch["inner_smem"], refs["inner"]
        staged[...] = (gate_by_exponential(activation, product[:, :width]) * product[:, width:]).astype(out.dtype)
        _store_rows(staged, out, columns)
        return
    staged = scratch["stream_smem"]
    if not phase.index:
        plgpu.barrier_wait(scratch["stream_ready"])
    stream = gpu.load(staged, layout=plgpu.Layout.WGMMA).astype(jnp.float32)
    total = (stream + product.astype(staged.dtype).astype(jnp.float32)).astype(staged.dtype)
    staged[...] = total
    if phase.name == "down":
        _store_rows(staged, refs["y"], columns)
        return
    if "stream" in refs:
        _store_rows(staged, refs["stream"], columns)
    total = total.astype(jnp.float32)
    scratch["squares_smem"][...] = jnp.square(total).sum(axis=1)
    gain = gpu.load(refs["norm"].at[columns], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False).astype(jnp.float32)
    gain = gain + rule.gain_offset if rule.gain_offset else gain
    weighed = scratch["weighed_smem"]
    weighed[...] = (total * lax.broadcast_in_dim(gain, total.shape, [1])).astype(weighed.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch["squares_smem"], refs["squares"].at[phase.tile])
    _store_rows(weighed, refs["weighed"], columns)


def _store_rows(staged: Ref, out: Ref, columns: Any) -> None:
    """Writes the rows that `out` has, and waits until they are there for other blocks to read."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staged.at[pl.ds(0, out.shape[0])], out.at[:, columns])
    plgpu.wait_smem_to_gmem(0)


def _row_squares(squares: Ref, tiles: int, staged: Ref) -> Float[Array, "64"]:
    """Sums over tiles of each row's squares."""
    total = jnp.zeros((), jnp.float32)
    for start in range(0, squares.shape[0], blocks.ROWS):
        part = gpu.load(squares.at[pl.ds(start, blocks.ROWS)], layout=plgpu.Layout.WGMMA, optimized=False)
        tile = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=plgpu.Layout.WGMMA) + start
        total = total + jnp.where(tile < tiles, part, 0.0)
    # A row's sum comes out where a column's would be, and is needed where a row is.
    staged[...] = total.sum(axis=0)
    plgpu.commit_smem()
    return gpu.load(staged, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def _multiply(phase: _Phase, rows: int, tiling: TailTiling, scratch: dict[str, Ref]) -> Float[Array, "64 width"]:
    """The tile's product over all input channels; `rows` are those of a stage of tokens."""
    product = phase.product
    # With chunks of weights that fill a stage, all stages but one have to be on their way.
    lag = min(tiling.lag if product.span > 1 else 1, product.chunks)

    def release(chunk: int | jax.Array, *, ends_stage: bool) -> None:
        plgpu.barrier_arrive(scratch["t_free"].at[lax.rem(phase.token_stages + chunk, tiling.token_stages)])
        if ends_stage:
            stage = phase.weight_stages + chunk // product.span
            plgpu.barrier_arrive(scratch["w_free"].at[lax.rem(stage, tiling.weight_stages)])

    def accumulate(accumulator: Ref) -> jax.Array:
        @pl.loop(0, product.chunks // product.span)
        def _stage(stage: jax.Array) -> None:
            slot = lax.rem(phase.weight_stages + stage, tiling.weight_stages)
            plgpu.barrier_wait(scratch[f"{phase.name}_ready"].at[slot])
            for part in range(product.span):
                chunk = stage * product.span + part
                token_slot = lax.rem(phase.token_stages + chunk, tiling.token_stages)
                plgpu.barrier_wait(scratch["t_ready"].at[token_slot])
                place = pl.ds(part * product.width, product.width)
                weights = scratch["w_smem"].at[slot, place].transpose((1, 0))
                plgpu.wgmma(accumulator, scratch["t_smem"].at[pl.ds(token_slot * rows, blocks.ROWS)], weights)
                # All but the newest are done, so what they read is free.
                plgpu.wgmma_wait(lag)
                ends_stage = (part - lag + 1) % product.span == 0
                pl.when(chunk >= lag)(functools.partial(release, chunk - lag, ends_stage=ends_stage))

        return accumulator[...]

    result = pl.run_scoped(accumulate, gpu.ACC((blocks.ROWS, product.width), jnp.float32))
    for chunk in range(product.chunks - lag, product.chunks):
        release(chunk, ends_stage=(chunk + 1) % product.span == 0)
    return result
