"""Decode attention for Hopper GPUs, written with Mosaic GPU: pieces of rows over pages, one TMA per page and KV head.

    grid: (block,), one block per multiprocessor (with head dim 64 several), of one or two pairs of warpgroups that know
    nothing of each other; each pair walks the list of (piece of a row, KV head), see `pieces.py`

    loader warpgroup                 shared memory                       compute warpgroup
    ----------------                 -------------                       -----------------
    page id <- page_table
    waits k_free[slot]
    k[page, :, head] ----- TMA ----> k[slot] [64 tokens, D] ---------->  waits k_ready[slot]; S = q k^T (wgmma)
    waits v_free[slot]                                                   arrives k_free[slot]; online softmax
    v[page, :, head] ----- TMA ----> v[slot] [64 tokens, D] ---------->  waits v_ready[slot]; O += P v (wgmma)
    waits q_free (after 1st page)                                        arrives v_free[slot]
    q[row, head] --------- TMA ----> q [64, D]   (group's rows used) --> waits q_ready before the piece's first page
    ... next page, next slot;                                            arrives q_free after its last
        pages of the next piece
        follow without a pause       out [64, 64] <-- registers          end of a piece: O / sum, 64 columns at a time
    out[row, head] <------ TMA ----- (group's rows)

The outputs of a row in pieces go to a float32 array together with the log of their weights, and a second kernel merges
them (`merge.py`); a row that is one piece is done. A sink joins a head's denominator exactly once: in the row's first
piece.

The query heads of one KV head are the rows of the matrix product; up to 64 of them cost the same, and the product
stays well below the time that its page takes to arrive. TMA writes swizzled memory by 8 rows, so a group comes with
heads of its neighbours, whose results nobody takes; nor those of rows that were never written.

A page's rows beyond the length or below the window get weight 0, not skipped: they must be finite.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels import mosaic_blocks as blocks
from tokenspeed_jax.pallas_kernels.decode_attention.merge import merge_pieces, partial_shape
from tokenspeed_jax.pallas_kernels.decode_attention.pieces import PAGE, DecodeTiling, RowCut, piece_order
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

MAX_GROUP = blocks.ROWS  # query heads of one KV head are rows of one product
ROW_PIECE = 8  # rows of one swizzled tile
COMPUTE_REGISTERS = 208  # with two pairs, of the 512 that four warpgroups share; one thread of each
LOADER_REGISTERS = 40

Ref = Any


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
    group = heads // kv_heads
    if _tile_rows(group) > blocks.ROWS:
        full, sinks = _full_groups(q, sinks, kv_heads)
        out = decode_attention_mosaic(full, k, v, page_table, kv_lens, rule, sinks, tiling=tiling, interpret=interpret)
        return out.reshape(batch, kv_heads, -1, dim)[:, :, :group].reshape(q.shape)
    if tiling is None:
        tiling = DecodeTiling.choose(
            rows=batch,
            kv_heads=kv_heads,
            columns=page_table.shape[1],
            head_dim=dim,
            sliding_window=rule.sliding_window,
        )
    result = jax.ShapeDtypeStruct((batch, kv_heads, group, dim), q.dtype)
    split = tiling.most_pieces > 1
    partials = jax.ShapeDtypeStruct(partial_shape(batch, kv_heads, group, dim, tiling), jnp.float32)
    out_type = [result, partials] if split else [result]
    lens = kv_lens.astype(jnp.int32)
    orders = [piece_order(lens, rule, tiling)] if split and batch > 1 else []
    kernel = plgpu.kernel(
        functools.partial(
            _block,
            rule=rule,
            tiling=tiling,
            first_rows=(k.first_row, v.first_row),
            group=group,
            ordered=bool(orders),
            interpreted=interpret is not None,
        ),
        out_type=out_type,
        scratch_types=_scratch(dim, tiling, q.dtype),
        grid=(min(tiling.blocks, batch * tiling.most_pieces * kv_heads),),
        grid_names=("block",),
        num_threads=2 * tiling.pairs,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="decode_attention",
    )
    optional = orders + ([] if sinks is None else [sinks])
    queries = q.reshape(batch * heads, dim)
    if batch * heads % ROW_PIECE:  # TMA has no part of a swizzled tile
        queries = jnp.pad(queries, ((0, -(batch * heads) % ROW_PIECE), (0, 0)))
    out, *parts = kernel(queries, k.typed(), v.typed(), page_table.astype(jnp.int32), lens, *optional)
    if split:
        out = merge_pieces(out, *parts, lens, rule, tiling, interpret=interpret)
    return out.reshape(q.shape)


def _full_groups(
    q: Float[Array, "batch heads dim"], sinks: Float[Array, " heads"] | None, kv_heads: int
) -> tuple[Float[Array, "batch padded_heads dim"], Float[Array, " padded_heads"] | None]:
    """Queries and sinks with groups padded to all rows of a tile, for groups that could begin too late in one."""
    batch, heads, dim = q.shape
    missing = blocks.ROWS - heads // kv_heads
    q = jnp.pad(q.reshape(batch, kv_heads, -1, dim), ((0, 0), (0, 0), (0, missing), (0, 0))).reshape(batch, -1, dim)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(kv_heads, -1), ((0, 0), (0, missing))).reshape(-1)
    return q, sinks


def _tile_rows(group: int) -> int:
    """Rows that hold a group's queries wherever it begins among tiles of `ROW_PIECE`."""
    last_offset = ROW_PIECE - math.gcd(group, ROW_PIECE)
    return -(-(last_offset + group) // ROW_PIECE) * ROW_PIECE


def _scratch(dim: int, tiling: DecodeTiling, dtype: jnp.dtype) -> dict[str, Any]:
    """Shared memory and barriers of one block."""
    slots = tiling.pairs * tiling.stages
    return {
        "q_smem": blocks.swizzled(tiling.pairs, blocks.ROWS, dim, dtype=dtype),
        "k_smem": blocks.swizzled(slots, PAGE, dim, dtype=dtype),
        "v_smem": blocks.swizzled(slots, PAGE, dim, dtype=dtype),
        # Of float32 parts the first, of results the second.
        "out_smem": [
            plgpu.SMEM((tiling.pairs, blocks.ROWS, blocks.CHUNK), kind)
            for kind in ((jnp.float32, dtype) if tiling.most_pieces > 1 else (dtype,))
        ],
        "q_ready": plgpu.Barrier(num_barriers=tiling.pairs),
        "q_free": plgpu.Barrier(num_barriers=tiling.pairs),
        "k_ready": plgpu.Barrier(num_barriers=slots),
        "v_ready": plgpu.Barrier(num_barriers=slots),
        "k_free": plgpu.Barrier(num_barriers=slots),
        "v_free": plgpu.Barrier(num_barriers=slots),
    }


@dataclasses.dataclass(frozen=True)
class _Piece:
    """One piece of a row and one KV head.

    Attributes:
        number: pieces that the pair of warpgroups took before.
        slot: where its output goes, `row * most_pieces + index`.
        index: which piece of the row it is.
        is_row: whether it is the whole row.
        begin, steps: its pages, as columns of the table.
        low, length: visible tokens of the row, [low, length).
        query_tile, query_offset: its queries are rows of `q` behind `query_tile` tiles and `query_offset` rows.
    """

    number: jax.Array
    row: jax.Array
    head: jax.Array
    slot: jax.Array
    index: jax.Array
    is_row: jax.Array
    begin: jax.Array
    steps: jax.Array
    low: jax.Array
    length: jax.Array
    query_tile: jax.Array
    query_offset: jax.Array


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The pieces of one pair of warpgroups, for either of them."""

    pair: jax.Array
    lens_ref: Ref
    order_ref: Ref | None
    rows: int
    kv_heads: int
    group: int
    rule: ScoreRule
    tiling: DecodeTiling

    def run(self, body: Callable[[_Piece, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Calls `body(piece, pages before it)`, which returns the pages after it; returns all pieces and pages."""
        items, pairs = self.rows * self.tiling.most_pieces * self.kv_heads, self.tiling.pairs
        grid, block = min(self.tiling.blocks, items), lax.axis_index("block")
        stride = pairs * grid
        # The pairs of a block take neighbouring heads of a piece, or none has two while another block has nothing.
        begin = block * pairs + self.pair if items >= stride else self.pair * grid + block

        def take(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            number, slot, pages = state
            item = begin + number * stride
            # Read ahead: its latency passes under the pages of this piece.
            following = self._slot(item + stride)
            piece = self._piece(number, slot, lax.rem(item, self.kv_heads))
            return number + 1, following, body(piece, pages)

        start = (jnp.int32(0), self._slot(begin), jnp.int32(0))
        number, _, pages = lax.while_loop(lambda state: state[1] >= 0, take, start)
        return number, pages

    def _slot(self, item: jax.Array) -> jax.Array:
        """The slot of an item of the list, whose fastest axis are the KV heads; -1 beyond its end."""
        place = lax.div(item, self.kv_heads)
        if self.order_ref is not None:
            return self.order_ref[jnp.minimum(place, self.order_ref.shape[0] - 1)] - 1
        count = self.rows
        if self.tiling.most_pieces > 1:
            count = RowCut.of(self.lens_ref[0], self.rule, self.tiling).pieces
        return jnp.where(place < count, place, -1)

    def _piece(self, number: jax.Array, slot: jax.Array, head: jax.Array) -> _Piece:
        row = lax.div(slot, self.tiling.most_pieces)
        index = slot - row * self.tiling.most_pieces
        length = self.lens_ref[row]
        cut = RowCut.of(length, self.rule, self.tiling)
        first = index * cut.share
        steps = jnp.minimum(cut.share, cut.pages - first)
        query = (row * self.kv_heads + head) * self.group
        tile = lax.div(query, ROW_PIECE)
        return _Piece(
            number=number,
            row=row,
            head=head,
            slot=slot,
            index=index,
            is_row=cut.pieces == 1,
            begin=cut.first_page + first,
            steps=steps,
            low=cut.low,
            length=length,
            query_tile=tile,
            query_offset=query - tile * ROW_PIECE,
        )


def _block(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    lens_ref: Ref,
    *others: Ref,
    rule: ScoreRule,
    tiling: DecodeTiling,
    first_rows: tuple[int, int],
    group: int,
    ordered: bool,
    interpreted: bool,
    **scratch: Ref,
) -> None:
    optional, out_refs = _parted(others, 2 if tiling.most_pieces > 1 else 1)
    order_ref = optional.pop(0) if ordered else None
    sinks_ref = optional[0] if optional else None
    rows, kv_heads = table_ref.shape[0], k_ref.shape[2]
    warpgroup = lax.axis_index("warpgroup")
    pair = lax.rem(warpgroup, tiling.pairs)
    walk = _Walk(pair, lens_ref, order_ref, rows, kv_heads, group, rule, tiling)

    @pl.when(warpgroup < tiling.pairs)
    def _compute() -> None:
        if tiling.pairs > 1:
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
        attend = functools.partial(_attend, out_refs, sinks_ref, group, pair)
        walk.run(functools.partial(attend, rule=rule, tiling=tiling, interpreted=interpreted, scratch=scratch))
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup >= tiling.pairs)
    def _load() -> None:
        if tiling.pairs > 1:
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
        load = functools.partial(_load_piece, q_ref, k_ref, v_ref, table_ref, group, pair)
        pieces, pages = walk.run(functools.partial(load, first_rows=first_rows, tiling=tiling, scratch=scratch))
        pl.when(pieces > 0)(functools.partial(plgpu.barrier_wait, scratch["q_free"].at[pair]))

        @pl.loop(jnp.maximum(pages - tiling.stages, 0), pages)
        def _drain(page: jax.Array) -> None:
            slot = _page_slot(page, pair, tiling)
            plgpu.barrier_wait(scratch["k_free"].at[slot])
            plgpu.barrier_wait(scratch["v_free"].at[slot])


def _page_slot(page: jax.Array, pair: jax.Array, tiling: DecodeTiling) -> jax.Array:
    """Where a pair's page with this running number lies in shared memory."""
    return pair * tiling.stages + lax.rem(page, tiling.stages)


def _load_piece(
    q_ref: Ref,
    k_ref: Ref,
    v_ref: Ref,
    table_ref: Ref,
    group: int,
    pair: jax.Array,
    piece: _Piece,
    before: jax.Array,
    *,
    first_rows: tuple[int, int],
    tiling: DecodeTiling,
    scratch: dict[str, Ref],
) -> jax.Array:
    """Starts the copies of one piece, `before` pages after the pair's first; returns the pages after it."""
    last_column = table_ref.shape[1] - 1

    def load(step: jax.Array, page: jax.Array) -> jax.Array:
        done = before + step
        slot = _page_slot(done, pair, tiling)
        # The next id is fetched before the wait, which hides its latency.
        following = table_ref[piece.row, jnp.minimum(piece.begin + step + 1, last_column)]
        for name, ref, first_row in (("k", k_ref, first_rows[0]), ("v", v_ref, first_rows[1])):
            pl.when(done >= tiling.stages)(functools.partial(plgpu.barrier_wait, scratch[f"{name}_free"].at[slot]))
            plgpu.copy_gmem_to_smem(
                ref.at[page + first_row, :, piece.head],
                scratch[f"{name}_smem"].at[slot],
                scratch[f"{name}_ready"].at[slot],
            )
        return following

    first = jnp.minimum(piece.steps, 1)
    page = lax.fori_loop(0, first, load, table_ref[piece.row, jnp.minimum(piece.begin, last_column)])
    # Behind the first page, which may go ahead while the piece before still needs its queries.
    pl.when(piece.number > 0)(functools.partial(plgpu.barrier_wait, scratch["q_free"].at[pair]))
    rows = _tile_rows(group)
    queries = pl.ds(piece.query_tile * ROW_PIECE, rows)
    plgpu.copy_gmem_to_smem(q_ref.at[queries], scratch["q_smem"].at[pair, pl.ds(0, rows)], scratch["q_ready"].at[pair])
    lax.fori_loop(first, piece.steps, load, page)
    return before + piece.steps


def _group_sinks(sinks_ref: Ref, piece: _Piece, group: int) -> jax.Array:
    """The sinks of one KV head's query heads, in the rows of those heads; any value in the rows of none."""
    row = plgpu.broadcasted_iota(jnp.int32, (blocks.ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
    row -= piece.query_offset
    loaded = [sinks_ref[piece.head * group + i].astype(jnp.float32) for i in range(group)]
    return functools.reduce(lambda sinks, i: jnp.where(row == i, loaded[i], sinks), range(1, group), loaded[0])


def _attend(
    out_refs: list[Ref],
    sinks_ref: Ref | None,
    group: int,
    pair: jax.Array,
    piece: _Piece,
    before: jax.Array,
    *,
    rule: ScoreRule,
    tiling: DecodeTiling,
    interpreted: bool,
    scratch: dict[str, Ref],
) -> jax.Array:
    """Attends to one piece, `before` pages after the pair's first; returns the pages after it."""
    plgpu.barrier_wait(scratch["q_ready"].at[pair])

    def step_through(step: jax.Array, state: blocks.RowState) -> blocks.RowState:
        slot = _page_slot(before + step, pair, tiling)
        start = (piece.begin + step) * PAGE
        plgpu.barrier_wait(scratch["k_ready"].at[slot])
        state = blocks.add_block(
            state,
            scratch["q_smem"].at[pair],
            scratch["k_smem"].at[slot],
            scratch["v_smem"].at[slot],
            rule=rule,
            mask=lambda scores: blocks.visible_columns(scores, piece.low - start, piece.length - start),
            keys_read=lambda: plgpu.barrier_arrive(scratch["k_free"].at[slot]),
            await_values=lambda: plgpu.barrier_wait(scratch["v_ready"].at[slot]),
            interpreted=interpreted,
        )
        plgpu.barrier_arrive(scratch["v_free"].at[slot])
        return state

    dim = scratch["q_smem"].shape[2]
    state = lax.fori_loop(0, piece.steps, step_through, blocks.empty_state(dim))
    plgpu.barrier_arrive(scratch["q_free"].at[pair])
    if sinks_ref is not None:
        sinks = _group_sinks(sinks_ref, piece, group)
        state = blocks.join_sinks(state, sinks + jnp.where(piece.index == 0, 0.0, -jnp.inf))
    _store(out_refs, state, piece, group, [smem.at[pair] for smem in scratch["out_smem"]])
    return before + piece.steps


def _store(out_refs: list[Ref], state: blocks.RowState, piece: _Piece, group: int, out_smem: list[Ref]) -> None:
    """Starts the copies of a piece's results; the last may still read `out_smem`."""
    out_ref, *partials_refs = out_refs
    chunks = blocks.outputs(state)

    def store(ref: Ref, row: jax.Array, smem: Ref, chunks: tuple[jax.Array, ...]) -> None:
        for i, chunk in enumerate(chunks):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem[...] = chunk.astype(smem.dtype)
            plgpu.commit_smem()
            place = (row, piece.head, pl.ds(0, group), pl.ds(i * blocks.CHUNK, blocks.CHUNK))
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(piece.query_offset, group)], ref.at[place])

    if not partials_refs:
        store(out_ref, piece.row, out_smem[0], chunks)
        return

    @pl.when(piece.is_row)
    def _done() -> None:
        store(out_ref, piece.row, out_smem[1], chunks)

    @pl.when(jnp.logical_not(piece.is_row))
    def _part() -> None:
        logs = lax.broadcast_in_dim(blocks.log_weights(state), chunks[0].shape, [0])
        store(partials_refs[0], piece.slot, out_smem[0], (*chunks, logs))


def _parted(refs: tuple[Ref, ...], outputs: int) -> tuple[list[Ref], list[Ref]]:
    """What may be there beside the inputs, and the outputs, which come last."""
    return list(refs[:-outputs]), list(refs[-outputs:])
