"""Prefill attention for Hopper GPUs, written with Mosaic GPU: tiles of 128 queries over the pages of their row.

    grid: (query tile, query head); one block = three warpgroups = one multiprocessor

    loader warpgroup                 shared memory                       compute warpgroups 0 and 1
    ----------------                 -------------                       --------------------------
                                     stage [2, n, 64, 64] <-- TMA ------  q[tokens, head] of its own 64 tokens
                                     q [2, 64, D] swizzled <-- registers  64 columns at a time
    page ids <- page_table
    waits k_free[slot] (both)
    k[page, :, kv head] -- TMA ----> k[slot] [keys, D] ---------------->  waits k_ready[slot]; S = q k^T (wgmma)
    waits v_free[slot] (both)                                             arrives k_free[slot]; online softmax
    v[page, :, kv head] -- TMA ----> v[slot] [keys, D] ---------------->  waits v_ready[slot]; O += P v (wgmma)
    ... next block of keys                                                arrives v_free[slot]

                                     stage <-- registers                  at the end: O / sum, 64 columns at a time
                                     out[tokens, head] <-- TMA            in pieces of 64, 32, ..., 1 tokens

Tiles never cross rows, so one page list serves a tile. A warpgroup loads 64 tokens wherever its tile starts; rows of
the product that belong to other tiles compute something that nobody stores. TMA can only swizzle what starts at a
multiple of 8 tokens, which tiles do not, hence the stage between TMA and the swizzled queries. Only blocks of keys on
the diagonal, or all of them under a sliding window, pay for a mask. Padding tokens form one more row that has no keys:
its tiles store zeros.

The two compute warpgroups take turns: while one multiplies, the other computes exponents (`turn`).

What no token of a tile sees of its pages gets weight 0, not skipped: it must be finite.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention.tiles import QueryTiles
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

PAGE = 64
COMPUTE_WARPGROUPS = 2
TILE = COMPUTE_WARPGROUPS * blocks.ROWS
# Each chunk of the stage is 64 columns wide, one 128-byte line per row: Mosaic may swizzle it, and a line's place in
# the swizzle pattern is then its row, wherever a copy of some of the rows begins.
STAGE_CHUNKS = 2

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

    @classmethod
    def choose(cls, head_dim: int) -> "PrefillTiling":
        """The largest blocks that fit registers and shared memory."""
        return {64: cls(2, 3), 128: cls(2, 2), 256: cls(1, 2)}[head_dim]


class Tile(NamedTuple):
    """One block's work, as scalars: see `QueryTiles`."""

    row: jax.Array
    start: jax.Array
    length: jax.Array
    position: jax.Array
    kv_head: jax.Array
    head: jax.Array
    first_block: jax.Array
    steps: jax.Array


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
    if num_tokens < blocks.ROWS:
        padded = jnp.pad(q, ((0, blocks.ROWS - num_tokens), (0, 0), (0, 0)))
        out = prefill_attention_mosaic(
            padded, k, v, page_table, query_starts, kv_lens, rule, sinks, tiling=tiling, interpret=interpret
        )
        return out[:num_tokens]
    tiling = PrefillTiling.choose(dim) if tiling is None else tiling
    ends = jnp.full((1,), num_tokens, query_starts.dtype)
    tiles = QueryTiles.cut(jnp.concatenate([query_starts, ends]), jnp.pad(kv_lens, (0, 1)), num_tokens, TILE)
    keys = tiling.block_pages * PAGE
    halves = COMPUTE_WARPGROUPS
    scratch = {
        "q_smem": blocks.swizzled(halves, blocks.ROWS, dim, dtype=q.dtype),
        "k_smem": blocks.swizzled(tiling.stages, keys, dim, dtype=q.dtype),
        "v_smem": blocks.swizzled(tiling.stages, keys, dim, dtype=q.dtype),
        "stage": plgpu.SMEM((halves, min(dim // blocks.CHUNK, STAGE_CHUNKS), blocks.ROWS, blocks.CHUNK), q.dtype),
        "q_ready": plgpu.Barrier(num_barriers=halves),
        "k_ready": plgpu.Barrier(num_arrivals=tiling.block_pages, num_barriers=tiling.stages),
        "v_ready": plgpu.Barrier(num_arrivals=tiling.block_pages, num_barriers=tiling.stages),
        "k_free": plgpu.Barrier(num_arrivals=halves, num_barriers=tiling.stages),
        "v_free": plgpu.Barrier(num_arrivals=halves, num_barriers=tiling.stages),
        "turn": plgpu.Barrier(num_arrivals=halves),
    }
    kernel = plgpu.kernel(
        functools.partial(
            _block,
            rule=rule,
            tiling=tiling,
            groups=heads // k.page_shape[1],
            first_rows=(k.first_row, v.first_row),
            interpreted=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(tiles.row.shape[0], heads),
        grid_names=("tile", "head"),
        num_threads=halves + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="prefill_attention",
    )
    columns = [column.astype(jnp.int32) for column in tiles[:4]]
    return kernel(q, k.typed(), v.typed(), page_table.astype(jnp.int32), *columns, *([] if sinks is None else [sinks]))


def _block(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    row_ref: Ref,
    start_ref: Ref,
    length_ref: Ref,
    position_ref: Ref,
    *sinks_and_out: Ref,
    rule: ScoreRule,
    tiling: PrefillTiling,
    groups: int,
    first_rows: tuple[int, int],
    interpreted: bool,
    **scratch: Ref,
) -> None:
    # Late tiles of a row see most keys; started first, they leave the short ones to fill the end.
    index = row_ref.shape[0] - 1 - lax.axis_index("tile")
    head = lax.axis_index("head")
    length, position = length_ref[index], position_ref[index]
    keys = tiling.block_pages * PAGE
    first_block = jnp.int32(0)
    if rule.sliding_window is not None:
        first_block = lax.div(jnp.maximum(position - (rule.sliding_window - 1), 0), keys)
    steps = jnp.maximum(lax.div(position + length + (keys - 1), keys) - first_block, 0)
    # A row's own table is never read for padding tokens, which have no step; their row is one past the last.
    row = jnp.minimum(row_ref[index], table_ref.shape[0] - 1)
    tile = Tile(row, start_ref[index], length, position, lax.div(head, groups), head, first_block, steps)

    *sinks_ref, out_ref = sinks_and_out

    @pl.when(length > 0)
    def _work() -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            sink = sinks_ref[0][head].astype(jnp.float32) if sinks_ref else None
            _attend(q_ref, out_ref, sink, tile, warpgroup, rule, tiling, interpreted, scratch)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            _load_pages(k_ref, v_ref, table_ref, tile, tiling, first_rows, scratch)


def _load_pages(
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    tile: Tile,
    tiling: PrefillTiling,
    first_rows: tuple[int, int],
    scratch: dict[str, Ref],
) -> None:
    last_page = lax.div(tile.position + tile.length - 1, PAGE)

    def page_ids(step: jax.Array) -> tuple[jax.Array, ...]:
        column = (tile.first_block + step) * tiling.block_pages
        # Beyond the row's last page its last page stands in: masked, but finite.
        return tuple(table_ref[tile.row, jnp.clip(column + i, 0, last_page)] for i in range(tiling.block_pages))

    def load(step: jax.Array, pages: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = lax.rem(step, tiling.stages)
        # The next ids are fetched before the waits, which hide their latency.
        following = page_ids(jnp.minimum(step + 1, tile.steps - 1))
        for name, ref, first_row in (("k", k_ref, first_rows[0]), ("v", v_ref, first_rows[1])):
            pl.when(step >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch[f"{name}_free"].at[slot]))
            for i, page in enumerate(pages):
                plgpu.copy_gmem_to_smem(
                    ref.at[page + first_row, :, tile.kv_head],
                    scratch[f"{name}_smem"].at[slot, pl.ds(i * PAGE, PAGE)],
                    scratch[f"{name}_ready"].at[slot],
                )
        return following

    @pl.when(tile.steps > 0)
    def _blocks() -> None:
        lax.fori_loop(0, tile.steps, load, page_ids(jnp.int32(0)))

    @pl.loop(jnp.maximum(tile.steps - tiling.stages, 0), tile.steps)
    def _drain(step: jax.Array) -> None:
        slot = lax.rem(step, tiling.stages)
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])


def _attend(
    q_ref: Ref,
    out_ref: Ref,
    sink: jax.Array | None,
    tile: Tile,
    half: jax.Array,
    rule: ScoreRule,
    tiling: PrefillTiling,
    interpreted: bool,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: 64 tokens of the tile."""
    own_start = half * blocks.ROWS
    own_length = jnp.clip(tile.length - own_start, 0, blocks.ROWS)
    # The load starts early where 64 tokens would run over the end; those rows of the product are skipped.
    loaded_from = jnp.minimum(tile.start + own_start, q_ref.shape[0] - blocks.ROWS)
    skipped = tile.start + own_start - loaded_from

    take_turn = functools.partial(_take_turn, scratch)

    @pl.when(own_length > 0)
    def _busy() -> None:
        _load_queries(q_ref, tile, half, loaded_from, scratch)
        # Half a step behind from here on, so that one warpgroup's products fall into the other's softmax.
        pl.when(half == 1)(take_turn)
        state = _softmax_over_blocks(
            out_ref.shape[-1], tile, half, tile.position + own_start, skipped, rule, tiling, interpreted, scratch
        )
        pl.when(half == 0)(take_turn)
        if sink is not None:
            state = blocks.join_sinks(state, sink)
        _store(out_ref, blocks.outputs(state), tile, half, skipped, own_length, scratch)

    @pl.when(own_length == 0)
    def _idle() -> None:
        # Only warpgroup 1 can have nothing to do. The loader and warpgroup 0 still count on it at every step.
        take_turn()

        @pl.loop(0, tile.steps)
        def _pass(step: jax.Array) -> None:
            slot = lax.rem(step, tiling.stages)
            for name in ("k", "v"):
                plgpu.barrier_wait(scratch[f"{name}_ready"].at[slot])
                plgpu.barrier_arrive(scratch[f"{name}_free"].at[slot])
                take_turn()


def _take_turn(scratch: dict[str, Ref]) -> None:
    plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["turn"])


def _load_queries(q_ref: Ref, tile: Tile, half: jax.Array, loaded_from: jax.Array, scratch: dict[str, Ref]) -> None:
    stage = scratch["stage"].at[half]
    tokens = pl.ds(loaded_from, blocks.ROWS)
    ready = scratch["q_ready"].at[half]
    for i in range(q_ref.shape[-1] // blocks.CHUNK):
        chunk = stage.at[i % stage.shape[0]]
        columns = pl.ds(i * blocks.CHUNK, blocks.CHUNK)
        plgpu.copy_gmem_to_smem(q_ref.at[tokens, tile.head, columns], chunk, ready)
        plgpu.barrier_wait(ready)
        scratch["q_smem"].at[half, :, columns][...] = plgpu.layout_cast(chunk[...], plgpu.Layout.WGMMA)
        plgpu.commit_smem()


def _softmax_over_blocks(
    head_dim: int,
    tile: Tile,
    half: jax.Array,
    own_position: jax.Array,
    skipped: jax.Array,
    rule: ScoreRule,
    tiling: PrefillTiling,
    interpreted: bool,
    scratch: dict[str, Ref],
) -> blocks.RowState:
    keys = tiling.block_pages * PAGE

    def step_through(step: jax.Array, state: blocks.RowState, *, masked: bool) -> blocks.RowState:
        slot = lax.rem(step, tiling.stages)
        # How far column 0 of this block lies before row 0 of the product.
        distance = own_position - skipped - (tile.first_block + step) * keys

        def mask(scores: jax.Array) -> jax.Array:
            row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            ahead = column - row
            seen = ahead <= distance
            if rule.sliding_window is not None:
                seen &= ahead > distance - rule.sliding_window
            return jnp.where(seen, scores, blocks.MASKED)

        def await_values() -> None:
            plgpu.barrier_arrive(scratch["turn"])
            plgpu.barrier_wait(scratch["v_ready"].at[slot])
            plgpu.barrier_wait(scratch["turn"])

        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        state = blocks.add_block(
            state,
            scratch["q_smem"].at[half],
            scratch["k_smem"].at[slot],
            scratch["v_smem"].at[slot],
            rule=rule,
            mask=mask if masked else None,
            keys_read=lambda: plgpu.barrier_arrive(scratch["k_free"].at[slot]),
            issued=functools.partial(_take_turn, scratch),
            await_values=await_values,
            interpreted=interpreted,
        )
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return state

    state = blocks.empty_state(head_dim)
    unmasked = jnp.int32(0)
    if rule.sliding_window is None:
        # Padding tokens stand before position 0: they have no step, and no loop may begin below 0.
        unmasked = jnp.clip(lax.div(own_position + 1, keys), 0, tile.steps)
        state = lax.fori_loop(0, unmasked, functools.partial(step_through, masked=False), state)
    return lax.fori_loop(unmasked, tile.steps, functools.partial(step_through, masked=True), state)


def _store(
    out_ref: Ref,
    outputs: tuple[jax.Array, ...],
    tile: Tile,
    half: jax.Array,
    skipped: jax.Array,
    length: jax.Array,
    scratch: dict[str, Ref],
) -> None:
    """Stores `length` rows from row `skipped` on: one copy for each power of two in `length`."""
    stage = scratch["stage"].at[half]
    together = stage.shape[0]
    for start in range(0, len(outputs), together):
        for i in range(together):
            stage.at[i][...] = outputs[start + i].astype(out_ref.dtype)
        plgpu.commit_smem()
        done = jnp.int32(0)
        piece = blocks.ROWS
        while piece:

            @pl.when((length & piece) != 0)
            def _copy(done: jax.Array = done, piece: int = piece, start: int = start) -> None:
                tokens = pl.ds(tile.start + half * blocks.ROWS + done, piece)
                for i in range(together):
                    columns = pl.ds((start + i) * blocks.CHUNK, blocks.CHUNK)
                    plgpu.copy_smem_to_gmem(
                        stage.at[i, pl.ds(skipped + done, piece)], out_ref.at[tokens, tile.head, columns]
                    )

            done += length & piece
            piece //= 2
        plgpu.wait_smem_to_gmem(0)
