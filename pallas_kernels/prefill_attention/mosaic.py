"""Prefill attention for Hopper GPUs, written with Mosaic GPU: tiles of queries over the pages of their row.

    list of (tile, head): sections of heads, in each the tiles that see most keys first
    grid: one block per multiprocessor takes every 132nd entry, back and forth; block = a loader and two or three
    compute warpgroups, each with 64 rows of a tile

    loader warpgroup                 shared memory                       compute warpgroups
    ----------------                 -------------                       ------------------
    page ids <- page_table
    waits k_free[slot] (all)
    k[page, :, kv head] -- TMA ----> k[slot] [keys, D] -------------->   waits k_ready[slot]; S = q k^T (wgmma)
    waits q_free[own], once a tile                                       arrives k_free[slot]
    q[tokens, head] ----- TMA -----> q [n, 64, D] ------------------->   waits q_ready[own], once a tile
    waits v_free[slot] (all)                                             arrives q_free[own] after its last S
    v[page, :, kv head] -- TMA ----> v[slot] [keys, D] -------------->   waits v_ready[slot]; O += P v (wgmma)
    ... next block of keys                                               arrives v_free[slot]

                                     stage <-- registers                 at the end: O / sum, 128 columns at a time
                                     out[tokens, head] <-- TMA           in pieces of 64, 32, ..., 1 tokens

What a compute warpgroup does with block i of the keys, and when (its time runs downwards):

    matrix units                     the other units
    ------------                     ---------------
    S(i) = q k(i)^T                  O *= what the new peaks left of it; P(i-1) -> 16 bits
    O += P(i-1) v(i-1)               softmax of S(i): peaks, P(i), sums

so that the matrix units work while exponents are computed. The warpgroups besides take turns in issuing products
(`turn`): the products of one fall into the softmax of another. A warpgroup that sees no more of the tile's keys, or
has no row in it, lets the rest pass: it waits and arrives wherever the others count on it.

The loader runs ahead into the next tile, so that its first keys and its queries are there when the outputs of the last
are stored. Heads form sections whose keys and values fit the cache together. Neither changes a result.

Tiles never cross rows, so one page list serves a tile. They begin at multiples of 8 tokens, since TMA writes swizzled
memory in groups of 8 rows: the first tile of a row leaves out up to 7 rows of the product, which are computed from
other rows' queries and stored by nobody. A tile of one token, as decode rows in a prefill step are, takes as rows the
query heads of its KV head instead, and reads the keys once for all of them.

A tile's first block of keys, and those on the diagonal or across the window's lower end, pay for a mask. Padding tokens
form one more row that has no keys: its tiles store zeros. What no token of a tile sees of its pages gets weight 0, not
skipped: it must be finite.
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
MULTIPROCESSORS = 132
THREAD_COLUMNS = 8  # the fewest columns of which each thread holds some: two of them, in two rows
# Registers of a thread, by the number of compute warpgroups. What these get above a block's even share the loader must
# give up, in every block: a warpgroup that asks for more waits until then.
COMPUTE_REGISTERS = {2: 240, 3: 160}
LOADER_REGISTERS = {2: 24, 3: 32}
# Keys and values that blocks at work may read at one time, for the 60 MB of cache to keep them.
CACHED_BYTES = 40_000_000

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any


@dataclasses.dataclass(frozen=True)
class PrefillTiling:
    """How the kernel is cut.

    Attributes:
        block_pages: pages in one block of keys.
        stages: blocks of keys in flight.
        warpgroups: compute warpgroups of a block, each with 64 rows.
        blocks: the most blocks of the grid, each of which then takes several tiles; None for one block per tile.
        turns: whether warpgroups issue their products in turn.
        sections: whether heads whose keys and values fit the cache come before all others.
    """

    block_pages: int
    stages: int
    warpgroups: int = 2
    blocks: int | None = MULTIPROCESSORS
    turns: bool = True
    sections: bool = True

    @property
    def keys(self) -> int:
        """Keys in one block."""
        return self.block_pages * PAGE

    @property
    def rows(self) -> int:
        """Rows of a tile of queries."""
        return self.warpgroups * ROWS

    @classmethod
    def choose(cls, head_dim: int) -> "PrefillTiling":
        """Three warpgroups where their registers hold the outputs, else two with the largest blocks that fit."""
        return cls(*{64: (1, 6, 3), 128: (1, 4, 3), 256: (1, 2)}[head_dim])


class Tile(NamedTuple):
    """One head's share of a tile of queries, as scalars: see `QueryTiles`.

    Attributes:
        packed: whether the rows of the product are the query heads of one token, not the tokens of one head.
        base: the first row that the product takes, of `q[:, head]` or, packed, of all heads of all tokens.
        skip: rows of the product before the first that belongs to the tile.
        used: rows of the product that belong to the tile; 0 where another head's share does the work.
        first_block: of its row's blocks of keys, the first that it reads.
        steps: blocks of keys that it reads; 0 for padding.
    """

    row: jax.Array
    start: jax.Array
    length: jax.Array
    position: jax.Array
    kv_head: jax.Array
    head: jax.Array
    packed: jax.Array
    base: jax.Array
    skip: jax.Array
    used: jax.Array
    first_block: jax.Array | int
    steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static in one call of the kernel.

    Attributes:
        groups: query heads of one KV head.
        grid: blocks.
        first_rows: where the planes of keys and values begin.
        interpreted: the CPU interpreter multiplies registers with a plain dot, since its wgmma takes only refs.
    """

    rule: ScoreRule
    tiling: PrefillTiling
    groups: int
    heads: int
    dim: int
    grid: int
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
    tiling = PrefillTiling.choose(dim) if tiling is None else tiling
    ends = jnp.full((1,), num_tokens, query_starts.dtype)
    tiles = QueryTiles.cut(
        jnp.concatenate([query_starts, ends]), jnp.pad(kv_lens, (0, 1)), num_tokens, tiling.rows, ALIGNMENT
    ).longest_first()
    kv_heads = k.page_shape[1]
    shares = tiles.row.shape[0] * heads
    grid = shares if tiling.blocks is None else min(shares, tiling.blocks)
    first_rows = (k.first_row, v.first_row)
    call = Call(rule, tiling, heads // kv_heads, heads, dim, grid, first_rows, interpret is not None)
    kernel = plgpu.kernel(
        functools.partial(_block, call=call),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=_scratch(call, q.dtype),
        grid=(grid,),
        grid_names=("block",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="prefill_attention",
    )
    head_bytes = jnp.maximum(jnp.sum(kv_lens), 1) * (2 * dim * q.dtype.itemsize)
    together = jnp.clip(CACHED_BYTES // head_bytes, 1, kv_heads) if tiling.sections else kv_heads
    plan = jnp.stack([tiles.count, together * call.groups])
    columns = [column.astype(jnp.int32) for column in (*tiles[:4], plan)]
    q_rows = q.reshape(num_tokens * heads, dim)
    optional = [] if sinks is None else [sinks]
    return kernel(q, q_rows, k.typed(), v.typed(), page_table.astype(jnp.int32), *columns, *optional)


def _scratch(call: Call, dtype: jnp.dtype) -> dict[str, Any]:
    tiling, dim = call.tiling, call.dim
    warpgroups = tiling.warpgroups
    ready = functools.partial(plgpu.Barrier, num_arrivals=tiling.block_pages, num_barriers=tiling.stages)
    free = functools.partial(plgpu.Barrier, num_arrivals=warpgroups, num_barriers=tiling.stages)
    return {
        "q_smem": blocks.swizzled(warpgroups, ROWS, dim, dtype=dtype),
        "k_smem": blocks.swizzled(tiling.stages, tiling.keys, dim, dtype=dtype),
        "v_smem": blocks.swizzled(tiling.stages, tiling.keys, dim, dtype=dtype),
        "stage": plgpu.SMEM((warpgroups, min(dim // CHUNK, STAGE_CHUNKS), ROWS, CHUNK), dtype),
        "q_ready": plgpu.Barrier(num_barriers=warpgroups),
        "q_free": plgpu.Barrier(num_barriers=warpgroups),
        "k_ready": ready(),
        "v_ready": ready(),
        "k_free": free(),
        "v_free": free(),
        "turn": plgpu.Barrier(num_barriers=warpgroups),
    }


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The tiles of one block, one head of each at a time, for any of its warpgroups.

    Sections of heads come one after the other, in each the tiles that see most keys first. Blocks take neighbours of
    this list, back and forth, so that all have about as much to do.
    """

    row_ref: Ref
    start_ref: Ref
    length_ref: Ref
    position_ref: Ref
    plan_ref: Ref
    last_row: int
    call: Call

    def run(self, body: Callable[[Tile, Any], Any], start: Any) -> Any:
        """Folds `body(tile, carry)` over the tiles."""
        block, grid = lax.axis_index("block"), self.call.grid
        shares = self.plan_ref[0] * self.call.heads

        def place(turn: jax.Array) -> jax.Array:
            return turn * grid + jnp.where(lax.rem(turn, 2) == 0, block, grid - 1 - block)

        def take(state: tuple[Any, ...]) -> tuple[Any, ...]:
            turn, columns, carry = state
            # Read ahead: its latency passes under the work on this tile.
            following = self._columns(jnp.minimum(place(turn + 1), shares - 1))
            return turn + 1, following, body(self._tile(*columns), carry)

        first = self._columns(jnp.minimum(block, jnp.maximum(shares - 1, 0)))
        return lax.while_loop(lambda state: place(state[0]) < shares, take, (jnp.int32(0), first, start))[2]

    def _columns(self, share: jax.Array) -> tuple[jax.Array, ...]:
        """Head, row, start, length and position of an entry of the list."""
        count, together = self.plan_ref[0], self.plan_ref[1]
        section = lax.div(share, count * together)
        first_head = section * together
        within = share - first_head * count
        heads = jnp.minimum(together, self.call.heads - first_head)
        index = lax.div(within, heads)
        head = first_head + within - index * heads
        refs = (self.row_ref, self.start_ref, self.length_ref, self.position_ref)
        return head, *(ref[index] for ref in refs)

    def _tile(self, head: jax.Array, row: jax.Array, start: jax.Array, length: jax.Array, position: jax.Array) -> Tile:
        call, window, keys = self.call, self.call.rule.sliding_window, self.call.tiling.keys
        kv_head = lax.div(head, call.groups)
        packed = (length == 1) & call.packs
        first_head = kv_head * call.groups
        mine = jnp.logical_not(packed) | (head == first_head)
        first = jnp.where(packed, start * call.heads + first_head, start)
        skip = lax.rem(first, ALIGNMENT)
        first_block = 0 if window is None else lax.div(jnp.maximum(position - (window - 1), 0), keys)
        steps = jnp.maximum(lax.div(position + length + (keys - 1), keys) - first_block, 0)
        return Tile(
            # The row of padding is one past the last.
            jnp.minimum(row, self.last_row),
            start,
            length,
            position,
            kv_head,
            head,
            packed,
            first - skip,
            skip,
            jnp.where(mine, jnp.where(packed, call.groups, length), 0),
            first_block,
            jnp.where(mine, steps, 0),
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
    plan_ref: Ref,
    *sinks_and_out: Ref,
    call: Call,
    **scratch: Ref,
) -> None:
    *sinks_ref, out_ref = sinks_and_out
    warpgroup, warpgroups = lax.axis_index("warpgroup"), call.tiling.warpgroups
    walk = _Walk(row_ref, start_ref, length_ref, position_ref, plan_ref, table_ref.shape[0] - 1, call)

    # The registers change hands before anything else, also in blocks that have nothing to do.
    @pl.when(warpgroup < warpgroups)
    def _compute() -> None:
        plgpu.set_max_registers(COMPUTE_REGISTERS[warpgroups], action="increase")
        turns = _Turns(warpgroup, call.tiling, scratch["turn"])
        turns.open()

        def attend(tile: Tile, done: jax.Array) -> jax.Array:
            @pl.when(tile.used > 0)
            def _work() -> None:
                _attend(out_ref, sinks_ref[0] if sinks_ref else None, tile, warpgroup, done, turns, call, scratch)

            return done + tile.steps

        walk.run(attend, jnp.int32(0))
        turns.close()
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == warpgroups)
    def _load() -> None:
        plgpu.set_max_registers(LOADER_REGISTERS[warpgroups], action="decrease")
        loader = _Loader(q_ref, q_rows_ref, k_ref, v_ref, table_ref, call, scratch)
        done, tiles = walk.run(loader.load, (jnp.int32(0), jnp.int32(0)))
        loader.drain(done, tiles)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """Whose products come next: warpgroups hand the turn round, one after the other."""

    warpgroup: jax.Array
    tiling: PrefillTiling
    barrier: Ref

    def open(self) -> None:
        """The first turn is warpgroup 0's: the last warpgroup hands it over."""
        if self.tiling.turns:
            last = self.warpgroup == self.tiling.warpgroups - 1
            pl.when(last)(lambda: plgpu.barrier_arrive(self.barrier.at[0]))

    def take(self) -> None:
        if self.tiling.turns:
            plgpu.barrier_wait(self.barrier.at[self.warpgroup])

    def hand_on(self) -> None:
        if self.tiling.turns:
            last = self.warpgroup == self.tiling.warpgroups - 1
            plgpu.barrier_arrive(self.barrier.at[jnp.where(last, 0, self.warpgroup + 1)])

    def close(self) -> None:
        """No arrival may be left over when the block ends."""
        if self.tiling.turns:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_wait(self.barrier.at[0]))


@dataclasses.dataclass(frozen=True)
class _Loader:
    """The warpgroup that fills shared memory. It runs ahead of the others, into their next tile."""

    q_ref: Ref
    q_rows_ref: Ref
    k_ref: Ref
    v_ref: Ref
    table_ref: Ref
    call: Call
    scratch: dict[str, Ref]

    def load(self, tile: Tile, before: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Loads queries, keys and values of a tile; counts blocks of keys, and tiles that have any."""
        done, tiles = before

        @pl.when(tile.steps > 0)
        def _tokens() -> None:
            load = functools.partial(self._load_block, tile, done, tiles)
            lax.fori_loop(0, tile.steps, load, self._page_ids(tile, jnp.int32(0)))

        return done + tile.steps, tiles + jnp.where(tile.steps > 0, 1, 0)

    def _page_ids(self, tile: Tile, step: jax.Array) -> tuple[jax.Array, ...]:
        pages = self.call.tiling.block_pages
        last = lax.div(tile.position + tile.length - 1, PAGE)
        column = (tile.first_block + step) * pages
        # Beyond the row's last page its last page stands in: masked, but finite.
        return tuple(self.table_ref[tile.row, jnp.minimum(column + i, last)] for i in range(pages))

    def _load_block(
        self, tile: Tile, done: jax.Array, tiles: jax.Array, step: jax.Array, pages: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        # The next ids are fetched before the waits, which hide their latency.
        following = self._page_ids(tile, jnp.minimum(step + 1, tile.steps - 1))
        first_rows = self.call.first_rows
        self._load_pages("k", self.k_ref, first_rows[0], tile, done + step, pages)
        # Behind the first keys, whose place is free before that of the queries.
        pl.when(step == 0)(lambda: self._load_queries(tile, tiles))
        self._load_pages("v", self.v_ref, first_rows[1], tile, done + step, pages)
        return following

    def _load_pages(
        self, name: str, ref: Ref, first_row: int, tile: Tile, place: jax.Array, pages: tuple[jax.Array, ...]
    ) -> None:
        slot = lax.rem(place, self.call.tiling.stages)
        free, ready = self.scratch[f"{name}_free"].at[slot], self.scratch[f"{name}_ready"].at[slot]
        pl.when(place >= self.call.tiling.stages)(lambda: plgpu.barrier_wait(free))
        for i, page in enumerate(pages):
            target = self.scratch[f"{name}_smem"].at[slot, pl.ds(i * PAGE, PAGE)]
            plgpu.copy_gmem_to_smem(ref.at[page + first_row, :, tile.kv_head], target, ready)

    def _load_queries(self, tile: Tile, tiles: jax.Array) -> None:
        scratch = self.scratch

        def load(source: Ref) -> None:
            for i in range(self.call.tiling.warpgroups):
                # Where 64 rows would run over the end the load starts early: `_attend` knows.
                begin = jnp.minimum(tile.base + i * ROWS, source.shape[0] - ROWS)
                rows = pl.ds(pl.multiple_of(begin, ALIGNMENT), ROWS)
                plgpu.copy_gmem_to_smem(source.at[rows], scratch["q_smem"].at[i], scratch["q_ready"].at[i])

        @pl.when(tiles > 0)
        def _await() -> None:
            for i in range(self.call.tiling.warpgroups):
                plgpu.barrier_wait(scratch["q_free"].at[i])

        if self.call.packs:
            pl.when(tile.packed)(lambda: load(self.q_rows_ref))
            pl.when(jnp.logical_not(tile.packed))(lambda: load(self.q_ref.at[:, tile.head]))
        else:
            load(self.q_ref.at[:, tile.head])

    def drain(self, done: jax.Array, tiles: jax.Array) -> None:
        """No arrival may be left over when the block ends."""
        stages = self.call.tiling.stages

        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _blocks(place: jax.Array) -> None:
            slot = lax.rem(place, stages)
            plgpu.barrier_wait(self.scratch["k_free"].at[slot])
            plgpu.barrier_wait(self.scratch["v_free"].at[slot])

        @pl.when(tiles > 0)
        def _queries() -> None:
            for i in range(self.call.tiling.warpgroups):
                plgpu.barrier_wait(self.scratch["q_free"].at[i])


def _attend(
    out_ref: Ref,
    sinks_ref: Ref | None,
    tile: Tile,
    warpgroup: jax.Array,
    done: jax.Array,
    turns: _Turns,
    call: Call,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup for a tile: 64 rows of the product. `done`: blocks of keys before the tile."""
    rows = out_ref.shape[0] * jnp.where(tile.packed, call.heads, 1)
    begin = tile.base + warpgroup * ROWS
    # Rows of the product before `begin`, where its load had to start early.
    early = begin - jnp.minimum(begin, rows - ROWS)
    first = jnp.where(warpgroup == 0, tile.skip, 0)
    last = jnp.clip(tile.skip + tile.used - warpgroup * ROWS, 0, ROWS)
    count = jnp.maximum(last - first, 0)
    own = tile.position - tile.skip + warpgroup * ROWS
    position = jnp.where(tile.packed, tile.position, own - early)
    # Keys that any of its own rows sees.
    seen = jnp.where(tile.packed, tile.position + 1, own + last)
    keys = call.tiling.keys
    steps = jnp.where(count > 0, lax.div(jnp.maximum(seen, 0) + (keys - 1), keys) - tile.first_block, 0)
    steps = jnp.clip(steps, 0, tile.steps)

    def store(values: jax.Array) -> None:
        _store(values, out_ref, tile, early + first, begin + first, count, scratch)

    @pl.when(tile.steps == 0)
    def _padding() -> None:
        store(plgpu.layout_cast(jnp.zeros((ROWS, call.dim), jnp.float32), plgpu.Layout.WGMMA))

    @pl.when(tile.steps > 0)
    def _await_queries() -> None:
        plgpu.barrier_wait(scratch["q_ready"].at[warpgroup])

    @pl.when(steps > 0)
    def _tokens() -> None:
        state = _Attention(tile, warpgroup, position, steps, done, turns, call, scratch).run()
        weight = state.weight.sum(axis=1)
        if sinks_ref is not None:
            sinks = _sinks(sinks_ref, tile, early + tile.skip, call)
            weight = weight + jnp.exp2(sinks * blocks.LOG2_E - state.top)
        inverse = 1.0 / jnp.where(weight > 0, weight, 1.0)
        store(state.values * lax.broadcast_in_dim(inverse, state.values.shape, [0]))

    @pl.when((steps == 0) & (tile.steps > 0))
    def _release_queries() -> None:
        plgpu.barrier_arrive(scratch["q_free"].at[warpgroup])

    # The loader and the other warpgroups count on this one at every step of the tile.
    @pl.loop(steps, tile.steps)
    def _pass(step: jax.Array) -> None:
        slot = lax.rem(done + step, call.tiling.stages)
        for name in ("k", "v"):
            plgpu.barrier_wait(scratch[f"{name}_ready"].at[slot])
            plgpu.barrier_arrive(scratch[f"{name}_free"].at[slot])

        @pl.when(step > 0)
        def _turn() -> None:
            turns.take()
            turns.hand_on()


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
        steps: blocks of keys that its rows see.
        done: blocks of keys before this tile's.
    """

    tile: Tile
    warpgroup: jax.Array
    position: jax.Array
    steps: jax.Array
    done: jax.Array
    turns: _Turns
    call: Call
    scratch: dict[str, Ref]

    def run(self) -> _State:
        """The state after all keys; `p` has no meaning any more."""
        steps, scratch = self.steps, self.scratch
        state = self.first_block()
        low, high = self.unmasked()
        if self.call.rule.sliding_window is not None:
            state = lax.fori_loop(1, low, functools.partial(self.next_block, masked=True), state)
        state = lax.fori_loop(low, high, functools.partial(self.next_block, masked=False), state)
        state = lax.fori_loop(high, steps, functools.partial(self.next_block, masked=True), state)
        plgpu.barrier_arrive(scratch["q_free"].at[self.warpgroup])
        slot = self.slot(steps - 1)
        plgpu.barrier_wait(scratch["v_ready"].at[slot])
        values = self.add_values(state.values, state.p, slot)
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return state._replace(values=values)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(self.done + step, self.call.tiling.stages)

    def unmasked(self) -> tuple[jax.Array, jax.Array]:
        """The blocks [low, high), not the first, that all rows see in full."""
        tile, keys, window = self.tile, self.call.tiling.keys, self.call.rule.sliding_window
        first_key = tile.first_block * keys
        # Clipped before the division, which rounds towards 0.
        high = lax.div(jnp.maximum(self.position + 1 - first_key, 0), keys)
        low = jnp.int32(1)
        if window is not None:
            unseen = jnp.maximum(self.position + ROWS - window - first_key, 0)
            low = jnp.clip(lax.div(unseen + (keys - 1), keys), 1, self.steps)
        return low, jnp.clip(high, low, self.steps)

    def mask(self, scores: jax.Array, step: jax.Array) -> jax.Array:
        # How far column 0 of this block lies before row 0 of the product.
        distance = self.position - (self.tile.first_block + step) * self.call.tiling.keys
        # The columns of a thread, a few at a time: whole arrays of places, which do not change, would stay in
        # registers, or in local memory.
        shape = (ROWS, THREAD_COLUMNS)
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        # All rows of a packed tile stand at one position.
        ahead = column - (row * jnp.where(self.tile.packed, 0, 1) if self.call.packs else row)
        parts = []
        for start in range(0, scores.shape[1], THREAD_COLUMNS):
            seen = ahead <= distance - start
            if self.call.rule.sliding_window is not None:
                seen &= ahead > distance - start - self.call.rule.sliding_window
            parts.append(jnp.where(seen, scores[:, start : start + THREAD_COLUMNS], -jnp.inf))
        return jnp.concatenate(parts, axis=1)

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
        for i in range(0, p.shape[1], THREAD_COLUMNS):
            weight = weight + p[:, i : i + THREAD_COLUMNS]
        return p, keep, peak, weight

    def products(self, slot: jax.Array) -> jax.Array:
        def multiply(acc: Ref) -> jax.Array:
            plgpu.wgmma(
                acc, self.scratch["q_smem"].at[self.warpgroup], self.scratch["k_smem"].at[slot].transpose((1, 0))
            )
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
        pl.when(step < self.steps)(lambda: plgpu.barrier_wait(ready))

    def first_block(self) -> _State:
        call, scratch = self.call, self.scratch
        row_layout = plgpu.Layout.WGMMA.reduce(1)
        top = plgpu.layout_cast(jnp.full((ROWS,), blocks.MASKED, jnp.float32), row_layout)
        weight = plgpu.layout_cast(jnp.zeros((ROWS, THREAD_COLUMNS), jnp.float32), plgpu.Layout.WGMMA)
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
        self.turns.take()
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
        self.turns.hand_on()
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
                plgpu.wgmma(scores_acc, scratch["q_smem"].at[self.warpgroup], keys)
                plgpu.wgmma(values_acc, state.p, scratch["v_smem"].at[before])
                self.turns.hand_on()
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
    stage = scratch["stage"].at[lax.axis_index("warpgroup")]
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
