"""Prefill attention for Hopper GPUs, written with Mosaic GPU: tiles of 128 queries over the pages of their row.

    grid: (query tile, head), tiles that see most keys first; one block = three warpgroups = one multiprocessor

    loader warpgroup                 shared memory                       compute warpgroups 0 and 1
    ----------------                 -------------                       --------------------------
    q[tokens, head] ----- TMA -----> q [2, 64, D] ------------------->   waits q_ready
    page ids <- page_table
    waits k_free[slot] (both)
    k[page, :, kv head] -- TMA ----> k[slot] [keys, D] -------------->   waits k_ready[slot]; S = q k^T (wgmma)
    waits v_free[slot] (both)                                            arrives k_free[slot]
    v[page, :, kv head] -- TMA ----> v[slot] [keys, D] -------------->   waits v_ready[slot]; O += P v (wgmma)
    ... next block of keys                                               arrives v_free[slot]

                                     stage <-- registers                 at the end: O / sum, 128 columns at a time
                                     out[tokens, head] <-- TMA           in pieces of 64, 32, ..., 1 tokens

What a compute warpgroup does with block i of the keys, and when (its time runs downwards):

    matrix units                     the other units
    ------------                     ---------------
    S(i) = q k(i)^T                  O *= what the new peaks left of it; P(i-1) -> 16 bits
    O += P(i-1) v(i-1)               softmax of S(i): peaks, P(i), sums

so that the matrix units work while exponents are computed. The two warpgroups besides take turns in issuing products
(`turn`): the products of one fall into the softmax of the other.

Tiles never cross rows, so one page list serves a tile. They begin at multiples of 8 tokens, since TMA writes swizzled
memory in groups of 8 rows: the first tile of a row leaves out up to 7 rows of the product, which are computed from
other rows' queries and stored by nobody. A tile of one token, as decode rows in a prefill step are, takes as rows the
query heads of its KV head instead, and reads the keys once for all of them.

Only blocks of keys on the diagonal or across the window's lower end pay for a mask. Padding tokens form one more row
that has no keys: its tiles store zeros. What no token of a tile sees of its pages gets weight 0, not skipped: it must
be finite.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.mosaic_blocks import CHUNK, ROWS
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention.tiles import QueryTiles
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64
# Rows of one swizzle pattern: where a tile of swizzled memory may begin in a tensor.
ALIGNMENT = 8
# Each chunk of the stage is 64 columns wide, one 128-byte line per row: Mosaic may swizzle it, and a line's place in
# the swizzle pattern is then its row, wherever a copy of some of the rows begins.
STAGE_CHUNKS = 2
COMPUTE_WARPGROUPS = 2
TILE = COMPUTE_WARPGROUPS * ROWS
# Registers of a thread. A block has 168 for each of its 384 threads, and what one side gets the other must give up,
# also where it has nothing to load: the side that asks for more waits until then.
COMPUTE_REGISTERS, LOADER_REGISTERS = 240, 24
SUM_LANES = 8  # columns of the running sums: one value per thread and row, shuffled together only at the end

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any


@dataclasses.dataclass(frozen=True)
class PrefillTiling:
    """How the kernel is cut.

    Attributes:
        block_pages: pages in one block of keys.
        stages: blocks of keys in flight.
    """

    block_pages: int
    stages: int

    @property
    def keys(self) -> int:
        """Keys in one block."""
        return self.block_pages * PAGE

    @classmethod
    def choose(cls, head_dim: int) -> "PrefillTiling":
        """The largest blocks that fit registers and shared memory."""
        return cls(*{64: (2, 3), 128: (2, 2), 256: (1, 2)}[head_dim])


class Tile(NamedTuple):
    """One block's work, as scalars: see `QueryTiles`.

    Attributes:
        packed: whether the rows of the product are the query heads of one token, not the tokens of one head.
        base: the first row that the product takes, of `q[:, head]` or, packed, of all heads of all tokens.
        skip: rows of the product before the first that belongs to the tile.
        used: rows of the product that belong to the tile.
        live: whether the block has work: of a packed tile all is done by the block of the group's first head.
    """

    row: jax.Array
    start: jax.Array
    length: jax.Array
    position: jax.Array
    kv_head: jax.Array
    head: jax.Array
    first_block: jax.Array | int
    steps: jax.Array
    packed: jax.Array
    base: jax.Array
    skip: jax.Array
    used: jax.Array
    live: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call of the kernel.

    Attributes:
        groups: query heads of one KV head.
        first_rows: where the planes of keys and values begin.
        interpreted: the CPU interpreter multiplies registers with a plain dot, since its wgmma takes only refs.
    """

    rule: ScoreRule
    tiling: PrefillTiling
    groups: int
    heads: int
    dim: int
    first_rows: tuple[int, int]
    interpreted: bool

    @property
    def packs(self) -> bool:
        """Whether the heads of a group always fit one product, wherever their first row falls."""
        aligned = self.heads % ALIGNMENT == 0 and self.groups % ALIGNMENT == 0
        return 1 < self.groups <= (ROWS if aligned else ROWS - ALIGNMENT + 1)


@functools.partial(jax.jit, static_argnames=("rule", "tiling", "interpret"))
def prefill_attention_mosaic(
    q: Float[Array, "tokens heads dim"],
    k: PageView,
    v: PageView,
    page_table: Int[Array, "rows columns"],
    query_starts: Int[Array, " rows_and_end"],
    kv_lens: Int[Array, " rows"],
    rule: ScoreRule,
    sinks: Float[Array, " heads"] | None = None,
    *,
    tiling: PrefillTiling | None = None,
    interpret: Any = None,
) -> Float[Array, "tokens heads dim"]:
    """See `prefill_attention`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    num_tokens, heads, dim = q.shape
    missing = max(ROWS - num_tokens, -num_tokens % ALIGNMENT)
    if missing:
        padded = jnp.pad(q, ((0, missing), (0, 0), (0, 0)))
        out = prefill_attention_mosaic(
            padded, k, v, page_table, query_starts, kv_lens, rule, sinks, tiling=tiling, interpret=interpret
        )
        return out[:num_tokens]
    kv_heads = k.page_shape[1]
    groups = heads // kv_heads
    tiling = PrefillTiling.choose(dim) if tiling is None else tiling
    call = Call(rule, tiling, groups, heads, dim, (k.first_row, v.first_row), interpret is not None)
    ends = jnp.full((1,), num_tokens, query_starts.dtype)
    tiles = QueryTiles.cut(
        jnp.concatenate([query_starts, ends]), jnp.pad(kv_lens, (0, 1)), num_tokens, TILE, ALIGNMENT
    ).longest_first()
    kernel = plgpu.kernel(
        functools.partial(_block, call=call),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(call, q.dtype),
        grid=(tiles.row.shape[0] * heads,),
        grid_names=("block",),
        num_threads=COMPUTE_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="prefill_attention",
    )
    columns = [column.astype(jnp.int32) for column in tiles[:4]]
    q_rows = q.reshape(num_tokens * heads, dim)
    optional = [] if sinks is None else [sinks]
    return kernel(q, q_rows, k.typed(), v.typed(), page_table.astype(jnp.int32), *columns, *optional)


def _scratch(call: Call, dtype: jnp.dtype) -> dict[str, Any]:
    tiling, dim = call.tiling, call.dim
    halves = COMPUTE_WARPGROUPS
    ready = functools.partial(plgpu.Barrier, num_arrivals=tiling.block_pages, num_barriers=tiling.stages)
    free = functools.partial(plgpu.Barrier, num_arrivals=halves, num_barriers=tiling.stages)
    return {
        "q_smem": blocks.swizzled(halves, ROWS, dim, dtype=dtype),
        "k_smem": blocks.swizzled(tiling.stages, tiling.keys, dim, dtype=dtype),
        "v_smem": blocks.swizzled(tiling.stages, tiling.keys, dim, dtype=dtype),
        "stage": plgpu.SMEM((halves, min(dim // CHUNK, STAGE_CHUNKS), ROWS, CHUNK), dtype),
        "q_ready": plgpu.Barrier(num_barriers=halves),
        "k_ready": ready(),
        "v_ready": ready(),
        "k_free": free(),
        "v_free": free(),
        "turn": plgpu.Barrier(num_barriers=halves),
    }


def _tile(
    table_ref: Ref, row_ref: Ref, start_ref: Ref, length_ref: Ref, position_ref: Ref, work: jax.Array, call: Call
) -> Tile:
    rule, tiling = call.rule, call.tiling
    index, head = lax.div(work, call.heads), lax.rem(work, call.heads)
    start, length, position = start_ref[index], length_ref[index], position_ref[index]
    kv_head = lax.div(head, call.groups)
    first_block = 0
    if rule.sliding_window is not None:
        first_block = lax.div(jnp.maximum(position - (rule.sliding_window - 1), 0), tiling.keys)
    steps = jnp.maximum(lax.div(position + length + (tiling.keys - 1), tiling.keys) - first_block, 0)
    # A row's own table is never read for padding tokens, which have no step; their row is one past the last.
    row = jnp.minimum(row_ref[index], table_ref.shape[0] - 1)
    packed = (length == 1) & call.packs
    first = jnp.where(packed, start * call.heads + kv_head * call.groups, start)
    skip = lax.rem(first, ALIGNMENT)
    return Tile(
        row,
        start,
        length,
        position,
        kv_head,
        head,
        first_block,
        steps,
        packed,
        first - skip,
        skip,
        jnp.where(packed, call.groups, length),
        (length > 0) & (jnp.logical_not(packed) | (head == kv_head * call.groups)),
    )


def _block(
    q_ref: Ref,
    q_rows_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    row_ref: Ref,
    start_ref: Ref,
    length_ref: Ref,
    position_ref: Ref,
    *sinks_and_out: Ref,
    call: Call,
    **scratch: Ref,
) -> None:
    tile = _tile(table_ref, row_ref, start_ref, length_ref, position_ref, lax.axis_index("block"), call)
    *sinks_ref, out_ref = sinks_and_out

    @pl.when(tile.live)
    def _work() -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            _open_turns(warpgroup, scratch)
            _attend(out_ref, sinks_ref[0] if sinks_ref else None, tile, warpgroup, call, scratch)
            _close_turns(warpgroup, scratch)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            @pl.when(tile.steps > 0)
            def _tokens() -> None:
                _load_queries(q_ref, q_rows_ref, tile, call, scratch)
                _load_pages(k_ref, v_ref, table_ref, tile, call, scratch)
                _drain(tile.steps, call, scratch)


def _open_turns(warpgroup: jax.Array, scratch: dict[str, Ref]) -> None:
    """The first turn is warpgroup 0's: the last warpgroup hands it over."""
    pl.when(warpgroup == COMPUTE_WARPGROUPS - 1)(lambda: plgpu.barrier_arrive(scratch["turn"].at[0]))


def _take_turn(warpgroup: jax.Array, scratch: dict[str, Ref]) -> None:
    plgpu.barrier_wait(scratch["turn"].at[warpgroup])


def _pass_turn(warpgroup: jax.Array, scratch: dict[str, Ref]) -> None:
    following = jnp.where(warpgroup == COMPUTE_WARPGROUPS - 1, 0, warpgroup + 1)
    plgpu.barrier_arrive(scratch["turn"].at[following])


def _close_turns(warpgroup: jax.Array, scratch: dict[str, Ref]) -> None:
    """No arrival may be left over when the block ends."""
    pl.when(warpgroup == 0)(lambda: plgpu.barrier_wait(scratch["turn"].at[0]))


def _load_queries(q_ref: Ref, q_rows_ref: Ref, tile: Tile, call: Call, scratch: dict[str, Ref]) -> None:
    def load(source: Ref) -> None:
        for half in range(COMPUTE_WARPGROUPS):
            # Where 64 rows would run over the end the load starts early: `_attend` knows.
            begin = jnp.minimum(tile.base + half * ROWS, source.shape[0] - ROWS)
            rows = pl.ds(pl.multiple_of(begin, ALIGNMENT), ROWS)
            plgpu.copy_gmem_to_smem(source.at[rows], scratch["q_smem"].at[half], scratch["q_ready"].at[half])

    if call.packs:
        pl.when(tile.packed)(lambda: load(q_rows_ref))
        pl.when(jnp.logical_not(tile.packed))(lambda: load(q_ref.at[:, tile.head]))
    else:
        load(q_ref.at[:, tile.head])


def _load_pages(k_ref: Ref, v_ref: Ref, table_ref: Ref, tile: Tile, call: Call, scratch: dict[str, Ref]) -> None:
    tiling = call.tiling
    last_page = lax.div(tile.position + tile.length - 1, PAGE)

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        column = (tile.first_block + step) * tiling.block_pages
        # Beyond the row's last page its last page stands in: masked, but finite.
        return tuple(table_ref[tile.row, jnp.clip(column + i, 0, last_page)] for i in range(tiling.block_pages))

    def load(step: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = lax.rem(step, tiling.stages)
        # The next ids are fetched before the waits, which hide their latency.
        following = page_ids(jnp.minimum(step + 1, tile.steps - 1))
        for name, ref, first_row in (("k", k_ref, call.first_rows[0]), ("v", v_ref, call.first_rows[1])):
            pl.when(step >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch[f"{name}_free"].at[slot]))
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    ref.at[page + first_row, :, tile.kv_head],
                    scratch[f"{name}_smem"].at[slot, pl.ds(i * PAGE, PAGE)],
                    scratch[f"{name}_ready"].at[slot],
                )
        return following

    lax.fori_loop(0, tile.steps, load, page_ids(jnp.int32(0)))


def _drain(steps: jax.Array, call: Call, scratch: dict[str, Ref]) -> None:
    """No arrival may be left over when the block ends."""

    @pl.loop(jnp.maximum(steps - call.tiling.stages, 0), steps)
    def _blocks(step: jax.Array) -> None:
        slot = lax.rem(step, call.tiling.stages)
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])


def _attend(
    out_ref: Ref,
    sinks_ref: Ref | None,
    tile: Tile,
    half: jax.Array,
    call: Call,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup for its tile: 64 rows of the product."""
    rows = out_ref.shape[0] * jnp.where(tile.packed, call.heads, 1)
    begin = tile.base + half * ROWS
    # Rows of the product before `begin`, where its load had to start early.
    early = begin - jnp.minimum(begin, rows - ROWS)
    first = jnp.where(half == 0, tile.skip, 0)
    last = jnp.clip(tile.skip + tile.used - half * ROWS, 0, ROWS)
    count = jnp.maximum(last - first, 0)
    position = jnp.where(tile.packed, tile.position, tile.position - tile.skip + half * ROWS - early)

    def store(values: jax.Array) -> None:
        _store(values, out_ref, tile, early + first, begin + first, count, scratch)

    @pl.when(tile.steps == 0)
    def _padding() -> None:
        store(plgpu.layout_cast(jnp.zeros((ROWS, call.dim), jnp.float32), plgpu.Layout.WGMMA))

    @pl.when(tile.steps > 0)
    def _tokens() -> None:
        state = _Attention(tile, half, position, call, scratch).run()
        weight = state.weight.sum(axis=1)
        if sinks_ref is not None:
            sinks = _sinks(sinks_ref, tile, early + tile.skip, call)
            weight = weight + jnp.exp2(sinks * blocks.LOG2_E - state.top)
        inverse = 1.0 / jnp.where(weight > 0, weight, 1.0)
        store(state.values * lax.broadcast_in_dim(inverse, state.values.shape, [0]))


def _sinks(sinks_ref: Ref, tile: Tile, first_row: jax.Array, call: Call) -> jax.Array:
    """The sink of each row of the product; any value in the rows of none. A packed tile begins at `first_row`."""
    own = sinks_ref[tile.head].astype(jnp.float32)
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    sinks = plgpu.layout_cast(lax.broadcast_in_dim(own, (ROWS,), []), row_layout)
    if not call.packs:
        return sinks
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=row_layout)
    for i in range(1, call.groups):
        # A tile of tokens takes the same sink in all its rows.
        other = sinks_ref[jnp.where(tile.packed, tile.head + i, tile.head)].astype(jnp.float32)
        sinks = jnp.where(row == first_row + i, other, sinks)
    return sinks


class _State(NamedTuple):
    """Running softmax of 64 rows, in registers.

    Attributes:
        values: sum of exp2(score - top) * value.
        top: highest score so far, in base-2 units.
        weight: sum of exp2(score - top), spread over columns.
        p: 16-bit weights of the last block, whose values are still to be added.
    """

    values: jax.Array
    top: jax.Array
    weight: jax.Array
    p: jax.Array


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One warpgroup's loop over the keys of its tile.

    Attributes:
        position: of row 0 of the product.
    """

    tile: Tile
    half: jax.Array
    position: jax.Array
    call: Call
    scratch: dict[str, Ref]

    def run(self) -> _State:
        """The state after all keys; `p` has no meaning any more."""
        tile, scratch = self.tile, self.scratch
        plgpu.barrier_wait(scratch["q_ready"].at[self.half])
        state = self.first_block()
        low, high = self.unmasked()
        if self.call.rule.sliding_window is not None:
            state = lax.fori_loop(1, low, functools.partial(self.next_block, masked=True), state)
        state = lax.fori_loop(low, high, functools.partial(self.next_block, masked=False), state)
        state = lax.fori_loop(high, tile.steps, functools.partial(self.next_block, masked=True), state)
        slot = self.slot(tile.steps - 1)
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        values = self.add_values(state.values, state.p, slot)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return state._replace(values=values)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.call.tiling.stages)

    def unmasked(self) -> tuple[jax.Array, jax.Array]:
        """The blocks [low, high), not the first, that all rows see in full."""
        tile, keys, window = self.tile, self.call.tiling.keys, self.call.rule.sliding_window
        first_key = tile.first_block * keys
        # Clipped before the division, which rounds towards 0.
        high = lax.div(jnp.maximum(self.position + 1 - first_key, 0), keys)
        low = jnp.int32(1)
        if window is not None:
            unseen = jnp.maximum(self.position + ROWS - window - first_key, 0)
            low = jnp.clip(lax.div(unseen + (keys - 1), keys), 1, tile.steps)
        return low, jnp.clip(high, low, tile.steps)

    def mask(self, scores: jax.Array, step: jax.Array) -> jax.Array:
        # How far column 0 of this block lies before row 0 of the product.
        distance = self.position - (self.tile.first_block + step) * self.call.tiling.keys
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        # All rows of a packed tile stand at one position.
        ahead = column - (row * jnp.where(self.tile.packed, 0, 1) if self.call.packs else row)
        seen = ahead <= distance
        if self.call.rule.sliding_window is not None:
            seen &= ahead > distance - self.call.rule.sliding_window
        return jnp.where(seen, scores, -jnp.inf)

    def softmax(
        self, products: jax.Array, top: jax.Array, weight: jax.Array, step: jax.Array, *, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Weights of a block, what is left of earlier ones, peaks, sums."""
        scores, factor = blocks.base_two_scores(products, self.call.rule)
        if masked:
            scores = self.mask(scores, step)
        peak = jnp.maximum(top, scores.max(axis=1) * factor)
        keep = jnp.exp2(top - peak)
        p = jnp.exp2(scores * factor - lax.broadcast_in_dim(peak, scores.shape, [0]))
        weight = weight * lax.broadcast_in_dim(keep, weight.shape, [0])
        for i in range(0, p.shape[1], SUM_LANES):
            weight = weight + p[:, i : i + SUM_LANES]
        return p, keep, peak, weight

    def products(self, slot: jax.Array) -> jax.Array:
        def multiply(acc: Ref) -> jax.Array:
            plgpu.wgmma(acc, self.scratch["q_smem"].at[self.half], self.scratch["k_smem"].at[slot].transpose((1, 0)))
            return acc[...]

        return pl.run_scoped(multiply, gpu.ACC((ROWS, self.call.tiling.keys), jnp.float32))

    def add_values(self, values: jax.Array, p: jax.Array, slot: jax.Array) -> jax.Array:
        v_smem = self.scratch["v_smem"].at[slot]
        if self.call.interpreted:
            out = values + jnp.dot(p, v_smem[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
            return out
        return pl.run_state(lambda acc: plgpu.wgmma(acc, p, v_smem))(gpu.ACC.init(values))

    def await_keys(self, step: jax.Array) -> None:
        ready = self.scratch["k_ready"].at[self.slot(step)]
        pl.when(step < self.tile.steps)(lambda: plgpu.barrier_wait(ready))

    def first_block(self) -> _State:
        call, scratch = self.call, self.scratch
        row_layout = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((ROWS,), blocks.MASKED, jnp.float32), row_layout)
        weight = plgpu.layout_cast(jnp.zeros((ROWS, SUM_LANES), jnp.float32), plgpu.Layout.WGMMA)
        values = plgpu.layout_cast(jnp.zeros((ROWS, call.dim), jnp.float32), plgpu.Layout.WGMMA)
        step = jnp.int32(0)
        slot = self.slot(step)
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        products = self.products(slot)
        plgpu.barrier_arrive(scratch["k_free"].at[slot])
        self.await_keys(step + 1)
        p, _, top, weight = self.softmax(products, top, weight, step, masked=True)
        return _State(values, top, weight, p.astype(scratch["v_smem"].dtype))

    def next_block(self, step: jax.Array, state: _State, *, masked: bool) -> _State:
        """Scores of block `step` beside the values of the one before; the keys of `step` are there."""
        scratch = self.scratch
        before = self.slot(step - 1)
        plgpu.barrier_wait(scratch["v_ready"].at[before])
        _take_turn(self.half, scratch)
        together = self.one_by_one if self.call.interpreted else self.overlapped
        values, p, keep, top, weight = together(step, state, masked=masked)
        plgpu.barrier_arrive(scratch["v_free"].at[before])
        values = values * lax.broadcast_in_dim(keep, values.shape, [0])
        # Not before the product that reads the last weights has ended: they share registers.
        return _State(values, top, weight, p.astype(state.p.dtype))

    def keys_read(self, slot: jax.Array) -> None:
        plgpu.barrier_arrive(self.scratch["k_free"].at[slot])

    def one_by_one(self, step: jax.Array, state: _State, *, masked: bool) -> tuple[jax.Array, ...]:
        """`overlapped` for the interpreter."""
        slot = self.slot(step)
        products = self.products(slot)
        values = self.add_values(state.values, state.p, self.slot(step - 1))
        self.await_keys(step + 1)
        _pass_turn(self.half, self.scratch)
        self.keys_read(slot)
        return values, *self.softmax(products, state.top, state.weight, step, masked=masked)

    def overlapped(self, step: jax.Array, state: _State, *, masked: bool) -> tuple[jax.Array, ...]:
        """The block's weights, computed while the product with the values of the block before runs."""
        scratch = self.scratch
        slot, before = self.slot(step), self.slot(step - 1)

        def both(refs: tuple[Ref, ...]) -> None:
            values_acc, *softmax_refs = refs

            def multiply(scores_acc: Ref) -> tuple[jax.Array, ...]:
                keys = scratch["k_smem"].at[slot].transpose((1, 0))
                plgpu.wgmma(scores_acc, scratch["q_smem"].at[self.half], keys)
                plgpu.wgmma(values_acc, state.p, scratch["v_smem"].at[before])
                _pass_turn(self.half, scratch)
                products = gpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                self.keys_read(slot)
                return lax.optimization_barrier(self.softmax(products, state.top, state.weight, step, masked=masked))

            results = pl.run_scoped(multiply, gpu.ACC((ROWS, self.call.tiling.keys), jnp.float32))
            for ref, result in zip(softmax_refs, results, strict=True):
                ref[...] = result
            # Here, since its branch keeps the compiler from awaiting the values before the softmax.
            self.await_keys(step + 1)

        empty = plgpu.layout_cast(jnp.zeros((ROWS, self.call.tiling.keys), jnp.float32), plgpu.Layout.WGMMA)
        return pl.run_state(both)((gpu.ACC.init(state.values), empty, state.top, state.top, state.weight))


def _store(
    values: jax.Array,
    out_ref: Ref,
    tile: Tile,
    row: jax.Array,
    token: jax.Array,
    count: jax.Array,
    scratch: dict[str, Ref],
) -> None:
    """Stores `count` rows from `row` on: to as many tokens from `token` on, or, packed, to heads of one token."""
    half = lax.axis_index("warpgroup")
    stage = scratch["stage"].at[half]
    together = stage.shape[0]
    for start in range(0, out_ref.shape[-1] // CHUNK, together):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i in range(together):
            columns = slice((start + i) * CHUNK, (start + i + 1) * CHUNK)
            stage.at[i][...] = values[:, columns].astype(out_ref.dtype)
        plgpu.commit_smem()

        def copy(rows: Any, tokens: Any, head: jax.Array, start: int = start) -> None:
            for i in range(together):
                columns = pl.ds((start + i) * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(stage.at[i, rows], out_ref.at[tokens, head, columns])

        tokens = jnp.where(tile.packed, 0, count)
        done = jnp.int32(0)
        piece = ROWS
        while piece:

            @pl.when((tokens & piece) != 0)
            def _tokens(done: jax.Array = done, piece: int = piece, copy: Callable[..., None] = copy) -> None:
                copy(pl.ds(row + done, piece), pl.ds(token + done, piece), tile.head)

            done += tokens & piece
            piece //= 2

        @pl.loop(0, jnp.where(tile.packed, count, 0))
        def _heads(i: jax.Array, copy: Callable[..., None] = copy) -> None:
            copy(pl.ds(row + i, 1), pl.ds(tile.start, 1), tile.head + i)
