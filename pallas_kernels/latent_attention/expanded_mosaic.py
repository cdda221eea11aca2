"""Attention of all queries over one piece of expanded keys and values, for Hopper GPUs, written with Mosaic GPU.

    grid: (query tile, head of the group); one block = three warpgroups = one multiprocessor

    loader warpgroup                 shared memory                       compute warpgroups 0 and 1
    ----------------                 -------------                       --------------------------
    q[tokens, head] ------- TMA ---> q [2, 64, N + R] ----------------->  waits q_ready[own]
    waits k_free[slot] (both)
    keys[block, head] ----- TMA ---> k[slot][:, :N]
    latents[block, L:] ---- TMA ---> k[slot][:, N:] ------------------->  waits k_ready[slot]; S = q k^T issued,
    waits v_free[slot] (both)                                             O += P v of the block before issued
    values[block, head] --- TMA ---> v[slot] [128, V] ----------------->  S done: arrives k_free[slot]; online softmax
    ... next block of 128 keys                                            O done: arrives v_free[slot before]

                                     stage <-- registers                  at the end: O / sum, 64 columns at a time
                                     out[tokens, head] <-- TMA            in pieces of 64, 32, ..., 1 tokens

A tile is a window of 128 tokens that begins at a multiple of 8 tokens, as swizzled TMA needs it; what of a window
belongs to other rows is computed and not stored. Late tiles see most keys and start first.

The two compute warpgroups take turns (`turn`): while one has the matrix units, the other computes exponents.

A row that does not end in its piece leaves the unscaled outputs, top scores and weights of its tiles in `state`, and
goes on from there in the next piece, bit for bit as if it had not stopped: blocks lie on a grid fixed in the row.
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
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

BLOCK = 128  # keys of one block
COMPUTE_WARPGROUPS = 2
TILE = COMPUTE_WARPGROUPS * blocks.ROWS
STAGES = 2  # blocks in flight
GRANULE = 8  # tokens of one swizzled tile: where windows may begin

Ref = Any


class Windows(NamedTuple):
    """The kernel's tiles of queries; entries that no row uses have `end` 0.

    Attributes:
        start: first token of the window, a multiple of `GRANULE`.
        first, end: the window's tokens that are the row's own: [first, end).
        position: place in its row of the window's first token; negative for tokens before the row.
        base: the block of the piece at which the row begins; negative when it began in an earlier piece.
    """

    start: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    end: Int[Array, " tiles"]
    position: Int[Array, " tiles"]
    base: Int[Array, " tiles"]


class State(NamedTuple):
    """Where rows stop between pieces, for each tile and head: see `mosaic_blocks.RowState`.

    Attributes:
        values: reference to float32[tiles, heads, tile, value_dim].
        top, weight: references to float32[tiles, heads, tile].
    """

    values: Ref
    top: Ref
    weight: Ref


class _Tile(NamedTuple):
    """One block's work, as scalars; `low` and `high` bound its blocks of keys, counted from the start of its row."""

    index: jax.Array
    start: jax.Array
    first: jax.Array
    end: jax.Array
    position: jax.Array
    base: jax.Array
    low: jax.Array
    high: jax.Array
    last: jax.Array
    head: jax.Array


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is static in one compiled kernel."""

    rule: ScoreRule
    latent_dim: int
    group_heads: int
    resumable: bool
    interpreted: bool


def attend_expanded(
    q: Float[Array, "tokens heads query_dim"],
    expanded: Float[Array, "piece keys_and_values"],
    cached: Float[Array, "piece row_dim"],
    windows: Windows,
    first_head: Int[Array, ""],
    out: Ref,
    state: State | None,
    *,
    rule: ScoreRule,
    latent_dim: int,
    group_heads: int,
    interpret: Any = None,
) -> None:
    """Attention of all tiles over one piece of keys, of the heads `[first_head, first_head + group_heads)`.

    Args:
        q: a multiple of `GRANULE` tokens, at least 64.
        expanded: the keys of all heads of the group (without positional channels), then their values.
        cached: rows of latents and positional channels, the latter from `latent_dim` on; a multiple of `BLOCK`.
        out: `[tokens, heads, value_dim]`, written where a tile's last key is in this piece.
        state: refs of where rows stop; None when no row goes beyond its piece.
    """
    halves, dim, value_dim = COMPUTE_WARPGROUPS, q.shape[2], out.shape[2]
    nope_dim = dim - (cached.shape[1] - latent_dim)
    scratch = {
        "q_smem": blocks.swizzled(halves, blocks.ROWS, dim, dtype=q.dtype),
        "k_smem": blocks.swizzled(STAGES, BLOCK, nope_dim, dtype=q.dtype),
        "rope_smem": blocks.swizzled(STAGES, BLOCK, dim - nope_dim, dtype=q.dtype),
        "v_smem": blocks.swizzled(STAGES, BLOCK, value_dim, dtype=q.dtype),
        "stage": plgpu.SMEM((halves, blocks.ROWS, blocks.CHUNK), q.dtype),
        "q_ready": plgpu.Barrier(num_barriers=halves),
        "k_ready": plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        "v_ready": plgpu.Barrier(num_barriers=STAGES),
        "k_free": plgpu.Barrier(num_arrivals=halves, num_barriers=STAGES),
        "v_free": plgpu.Barrier(num_arrivals=halves, num_barriers=STAGES),
        "turn": plgpu.Barrier(num_arrivals=halves),
    }
    static = _Kernel(rule, latent_dim, group_heads, state is not None, interpret is not None)
    kernel = plgpu.kernel(
        functools.partial(_block, static=static),
        out_type=(),
        scratch_types=scratch,
        grid=(windows.start.shape[0], group_heads),
        grid_names=("tile", "head"),
        num_threads=halves + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="latent_prefill_attention",
    )
    kernel(q, expanded, cached, *windows, first_head.reshape(1), out, *([] if state is None else state))


def _block(
    q_ref: Ref,
    expanded_ref: Ref,
    cached_ref: Ref,
    start_ref: Ref,
    first_ref: Ref,
    end_ref: Ref,
    position_ref: Ref,
    base_ref: Ref,
    first_head_ref: Ref,
    out_ref: Ref,
    *state_refs: Ref,
    static: _Kernel,
    **scratch: Ref,
) -> None:
    # Late tiles of a row see most keys; started first, they leave the short ones to fill the end.
    index = start_ref.shape[0] - 1 - lax.axis_index("tile")
    end, position, base = end_ref[index], position_ref[index], base_ref[index]
    last = lax.div(jnp.maximum(position + end, 0) + (BLOCK - 1), BLOCK)
    low = jnp.maximum(-base, 0)
    high = jnp.maximum(jnp.minimum(last, cached_ref.shape[0] // BLOCK - base), low)
    tile = _Tile(
        index, start_ref[index], first_ref[index], end, position, base, low, high, last, lax.axis_index("head")
    )

    @pl.when((end > tile.first) & (high > low))
    def _work() -> None:
        warpgroup = lax.axis_index("warpgroup")
        head = first_head_ref[0] + tile.head

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            state = State(*state_refs) if state_refs else None
            _attend(out_ref.at[:, head], state, q_ref.shape[0], tile, warpgroup, static, scratch)

        @pl.when(warpgroup == COMPUTE_WARPGROUPS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            _load_blocks(q_ref.at[:, head], expanded_ref, cached_ref, tile, static, scratch)


def _loaded_from(tile: _Tile, half: int | jax.Array, num_tokens: int) -> jax.Array:
    """First token of 64 loaded; it is earlier than the warpgroup's own where those would run over the end."""
    start = jnp.minimum(tile.start + half * blocks.ROWS, num_tokens - blocks.ROWS)
    return pl.multiple_of(start, GRANULE)


def _load_blocks(
    q_ref: Ref, expanded_ref: Ref, cached_ref: Ref, tile: _Tile, static: _Kernel, scratch: dict[str, Ref]
) -> None:
    for half in range(COMPUTE_WARPGROUPS):
        tokens = pl.ds(_loaded_from(tile, half, q_ref.shape[0]), blocks.ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[tokens], scratch["q_smem"].at[half], scratch["q_ready"].at[half])
    steps = tile.high - tile.low
    nope_dim, value_dim = scratch["k_smem"].shape[2], scratch["v_smem"].shape[2]
    values_start = static.group_heads * nope_dim + tile.head * value_dim
    keys = pl.ds(pl.multiple_of(tile.head * nope_dim, blocks.CHUNK), nope_dim)
    values = pl.ds(pl.multiple_of(values_start, blocks.CHUNK), value_dim)
    rope = pl.ds(static.latent_dim, cached_ref.shape[1] - static.latent_dim)

    @pl.loop(0, steps)
    def _blocks(step: jax.Array) -> None:
        slot = lax.rem(step, STAGES)
        tokens = pl.ds((tile.base + tile.low + step) * BLOCK, BLOCK)
        k_ready = scratch["k_ready"].at[slot]
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, scratch["k_free"].at[slot]))
        plgpu.copy_gmem_to_smem(expanded_ref.at[tokens, keys], scratch["k_smem"].at[slot], k_ready)
        plgpu.copy_gmem_to_smem(cached_ref.at[tokens, rope], scratch["rope_smem"].at[slot], k_ready)
        pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, scratch["v_free"].at[slot]))
        v_smem, v_ready = scratch["v_smem"].at[slot], scratch["v_ready"].at[slot]
        plgpu.copy_gmem_to_smem(expanded_ref.at[tokens, values], v_smem, v_ready)

    @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
    def _drain(step: jax.Array) -> None:
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(scratch["k_free"].at[slot])
        plgpu.barrier_wait(scratch["v_free"].at[slot])


def _attend(
    out_ref: Ref,
    kept: State | None,
    num_tokens: int,
    tile: _Tile,
    half: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> None:
    """The work of one compute warpgroup: 64 tokens of the window."""
    own_start = half * blocks.ROWS
    first = jnp.clip(tile.first - own_start, 0, blocks.ROWS)
    length = jnp.clip(tile.end - own_start, 0, blocks.ROWS) - first
    # The load starts early where 64 tokens would run over the end; those rows of the product are skipped.
    skipped = tile.start + own_start - _loaded_from(tile, half, num_tokens)
    take_turn = functools.partial(_take_turn, scratch)
    plgpu.barrier_wait(scratch["q_ready"].at[half])

    @pl.when(length > 0)
    def _busy() -> None:
        # Half a step behind from here on, so that one warpgroup's products fall into the other's softmax.
        pl.when(half == 1)(take_turn)
        position = tile.position + own_start - skipped
        state = blocks.empty_state(out_ref.shape[-1])
        if kept is not None:
            state = _resumed(state, kept, tile, half)
        state = _softmax_over_blocks(state, tile, half, position, static, scratch)
        pl.when(half == 0)(take_turn)
        tokens = tile.start + own_start + first
        if kept is None:
            _store(out_ref, blocks.outputs(state), tokens, half, skipped + first, length, scratch)
            return
        finished = tile.high >= tile.last

        @pl.when(finished)
        def _finish() -> None:
            _store(out_ref, blocks.outputs(state), tokens, half, skipped + first, length, scratch)

        @pl.when(jnp.logical_not(finished))
        def _stop(kept: State = kept) -> None:
            _keep(state, kept, tile, half)

    @pl.when(length <= 0)
    def _idle() -> None:
        # The loader and the other warpgroup still count on this one at every step.
        take_turn()

        @pl.loop(0, tile.high - tile.low)
        def _pass(step: jax.Array) -> None:
            slot = lax.rem(step, STAGES)
            for name in ("k", "v"):
                plgpu.barrier_wait(scratch[f"{name}_ready"].at[slot])
                plgpu.barrier_arrive(scratch[f"{name}_free"].at[slot])
                take_turn()


def _take_turn(scratch: dict[str, Ref]) -> None:
    plgpu.barrier_arrive(scratch["turn"])
    plgpu.barrier_wait(scratch["turn"])


def _own_rows(ref: Ref, tile: _Tile, half: jax.Array) -> Ref:
    return ref.at[tile.index, tile.head, pl.ds(half * blocks.ROWS, blocks.ROWS)]


def _resumed(empty: blocks.RowState, kept: State, tile: _Tile, half: jax.Array) -> blocks.RowState:
    """The state that the piece before left, or the empty one where the row begins in this piece."""
    row = plgpu.Layout.WGMMA.reduce(1)

    def load() -> blocks.RowState:
        values = _own_rows(kept.values, tile, half)
        return blocks.RowState(
            plgpu.load(_own_rows(kept.top, tile, half), layout=row, optimized=False),
            plgpu.load(_own_rows(kept.weight, tile, half), layout=row, optimized=False),
            tuple(
                plgpu.load(
                    values.at[:, pl.ds(i * blocks.CHUNK, blocks.CHUNK)], layout=plgpu.Layout.WGMMA, optimized=False
                )
                for i in range(len(empty.values))
            ),
        )

    return lax.cond(tile.low > 0, load, lambda: empty)


def _keep(state: blocks.RowState, kept: State, tile: _Tile, half: jax.Array) -> None:
    values = _own_rows(kept.values, tile, half)
    _own_rows(kept.top, tile, half)[...] = state.top
    _own_rows(kept.weight, tile, half)[...] = state.weight
    for i, chunk in enumerate(state.values):
        values.at[:, pl.ds(i * blocks.CHUNK, blocks.CHUNK)][...] = chunk


def _softmax_over_blocks(
    state: blocks.RowState,
    tile: _Tile,
    half: jax.Array,
    position: jax.Array,
    static: _Kernel,
    scratch: dict[str, Ref],
) -> blocks.RowState:
    """The state after the tile's blocks of this piece; row 0 of the product stands at `position`."""
    steps = tile.high - tile.low

    def mask(scores: jax.Array, step: jax.Array) -> jax.Array:
        row = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=plgpu.Layout.WGMMA)
        column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(column - row <= position - (tile.low + step) * BLOCK, scores, blocks.MASKED)

    # Blocks that all of the rows see whole.
    unmasked = jnp.clip(lax.div(jnp.maximum(position + 1, 0), BLOCK) - tile.low, 0, steps)
    walk = _Walk(scratch["q_smem"].at[half], mask, static, scratch)
    carry = walk.begin(state)
    middle = jnp.maximum(unmasked, 1)
    carry = lax.fori_loop(1, middle, functools.partial(walk.step, masked=False), carry)
    state, p = lax.fori_loop(middle, steps, functools.partial(walk.step, masked=True), carry)
    return walk.finish(steps - 1, state, p)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """The steps of one compute warpgroup over the blocks of keys."""

    q_smem: Ref
    mask: Any
    static: _Kernel
    scratch: dict[str, Ref]

    def _multiply_keys(self, acc: Ref, slot: jax.Array) -> None:
        done = 0
        for name in ("k_smem", "rope_smem"):
            keys = self.scratch[name].at[slot]
            plgpu.wgmma(acc, self.q_smem.at[:, pl.ds(done, keys.shape[1])], keys.transpose((1, 0)))
            done += keys.shape[1]

    def _multiply_values(self, p: jax.Array, slot: jax.Array, accs: tuple[Ref, ...]) -> None:
        for i, acc in enumerate(accs):
            plgpu.wgmma(acc, p, self.scratch["v_smem"].at[slot, :, pl.ds(i * blocks.CHUNK, blocks.CHUNK)])

    def _dots(self, p: jax.Array, slot: jax.Array, values: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """`_multiply_values` for the CPU interpreter, whose wgmma takes only refs."""
        v_smem = self.scratch["v_smem"].at[slot]
        out = tuple(
            chunk + jnp.dot(p, v_smem[:, i * blocks.CHUNK : (i + 1) * blocks.CHUNK], preferred_element_type=jnp.float32)
            for i, chunk in enumerate(values)
        )
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
        return out

    def _weights(
        self, scores: jax.Array, step: jax.Array, state: blocks.RowState, *, masked: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Top score and sum of weights after a block, the factor on what was summed before, and its own weights."""
        scores = scores * (self.static.rule.scale * blocks.LOG2_E)
        if masked:
            scores = self.mask(scores, step)
        top = jnp.maximum(state.top, scores.max(axis=1))
        keep = jnp.exp2(state.top - top)
        p = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        weight = state.weight * keep + p.sum(axis=1)
        return lax.optimization_barrier((top, weight, keep, p))

    def begin(self, state: blocks.RowState) -> tuple[blocks.RowState, jax.Array]:
        """Scores and weights of the first block; its values are left to come."""
        slot = jnp.int32(0)
        plgpu.barrier_wait(self.scratch["k_ready"].at[slot])

        def multiply(acc: Ref) -> jax.Array:
            self._multiply_keys(acc, slot)
            _take_turn(self.scratch)
            return acc[...]

        scores = pl.run_scoped(multiply, blocks.gpu.ACC((blocks.ROWS, BLOCK), jnp.float32))
        plgpu.barrier_arrive(self.scratch["k_free"].at[slot])
        top, weight, keep, p = self._weights(scores, slot, state, masked=True)
        values = tuple(chunk * lax.broadcast_in_dim(keep, chunk.shape, [0]) for chunk in state.values)
        values, p = lax.optimization_barrier((values, p.astype(self.q_smem.dtype)))
        _take_turn(self.scratch)
        return blocks.RowState(top, weight, values), p

    def step(
        self, step: jax.Array, carry: tuple[blocks.RowState, jax.Array], *, masked: bool
    ) -> tuple[blocks.RowState, jax.Array]:
        """Scores and weights of a block, while the values of the block before are multiplied."""
        (state, p), interpreted = carry, self.static.interpreted
        slot, before = lax.rem(step, STAGES), lax.rem(step + (STAGES - 1), STAGES)
        scratch = self.scratch
        plgpu.barrier_wait(scratch["k_ready"].at[slot])

        def multiply(acc: Ref, *accs: Ref) -> tuple[Any, ...]:
            plgpu.barrier_wait(scratch["v_ready"].at[before])
            for value_acc, chunk in zip(accs, state.values, strict=not interpreted):
                value_acc[...] = chunk
            self._multiply_keys(acc, slot)
            self._multiply_values(p, before, accs)
            _take_turn(scratch)
            scores = plgpu.wgmma_accumulator_load(acc, wait_n=len(accs))
            plgpu.barrier_arrive(scratch["k_free"].at[slot])
            top, weight, keep, new_p = self._weights(scores, step, state, masked=masked)
            values = self._dots(p, before, state.values) if interpreted else tuple(value[...] for value in accs)
            plgpu.barrier_arrive(scratch["v_free"].at[before])
            values, new_p = lax.optimization_barrier((values, new_p))
            values = tuple(chunk * lax.broadcast_in_dim(keep, chunk.shape, [0]) for chunk in values)
            # Rounded only now: the units read the registers of `p` until the products are done.
            return (top, weight, new_p.astype(p.dtype), *values)

        accs = [] if interpreted else [blocks.gpu.ACC(chunk.shape, jnp.float32) for chunk in state.values]
        scores_acc = blocks.gpu.ACC((blocks.ROWS, BLOCK), jnp.float32)
        top, weight, p, *values = pl.run_scoped(multiply, scores_acc, *accs)
        _take_turn(scratch)
        return blocks.RowState(top, weight, tuple(values)), p

    def finish(self, step: jax.Array, state: blocks.RowState, p: jax.Array) -> blocks.RowState:
        """The state with the values of the block whose weights are `p`."""
        slot = lax.rem(step, STAGES)
        plgpu.barrier_wait(self.scratch["v_ready"].at[slot])
        if self.static.interpreted:
            values = self._dots(p, slot, state.values)
        else:
            values = pl.run_state(functools.partial(self._multiply_values, p, slot))(
                tuple(blocks.gpu.ACC.init(chunk) for chunk in state.values)
            )
        plgpu.barrier_arrive(self.scratch["v_free"].at[slot])
        return state._replace(values=values)


def _store(
    out_ref: Ref,
    outputs: tuple[jax.Array, ...],
    start: jax.Array,
    half: jax.Array,
    skipped: jax.Array,
    length: jax.Array,
    scratch: dict[str, Ref],
) -> None:
    """Stores `length` rows from row `skipped` on at token `start`: one copy for each power of two in `length`."""
    stage = scratch["stage"].at[half]
    for i, chunk in enumerate(outputs):
        stage[...] = chunk.astype(out_ref.dtype)
        plgpu.commit_smem()
        done = jnp.int32(0)
        piece = blocks.ROWS
        while piece:

            @pl.when((length & piece) != 0)
            def _copy(done: jax.Array = done, piece: int = piece, i: int = i) -> None:
                columns = pl.ds(i * blocks.CHUNK, blocks.CHUNK)
                plgpu.copy_smem_to_gmem(
                    stage.at[pl.ds(skipped + done, piece)], out_ref.at[pl.ds(start + done, piece), columns]
                )

            done += length & piece
            piece //= 2
        plgpu.wait_smem_to_gmem(0)
