"""The walk of the gated delta rule over its chunks, for Hopper GPUs, written with Mosaic GPU.

    grid: (row, head, 64 of the state's rows); one block = two warpgroups

    loader warpgroup                              shared memory, `STAGES` slots       compute warpgroup
    ----------------                              -----------------------------       -----------------
                                                                    initial state --> S [64, K], float32 registers
    waits free[slot]
    queries and keys, of the tokens ------- TMA --> q, k [64, K] ------------------>  waits ready[slot]
    updates, corrections, products -------- TMA --> u [64, 64], w [64, K], p [64, 64] D^T = u + S w^T         (wgmma)
    running sums of the gates ------------- TMA --> decays [64]                       O^T = (S q^T) * decay to token
    ... next chunk, next slot                                                               + D^T p^T         (wgmma)
                                                                                      S = S * decay
                                                                                            + (D * decay to end)^T k
                                                                                      arrives free[slot]
    out[the chunk's tokens, head, part] <-- TMA --- out [64, 64] <------------------  O^T, transposed
    states[body or final] <------------------------------------------------------- S, at the end of body and tail

Values are the rows of every product, so the state and the updates are left operands, which come from registers: the
accumulator of one product is the operand of the next. All products of a chunk but the first are in flight together.
The state is rounded to 16 bits where it is multiplied, and kept in float32.

Outputs are stored where the tokens lie. A chunk that is not full goes token by token: what lies behind it is another's.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32

from tokenspeed_jax.pallas_kernels.gated_delta_rule.chunk_table import PARTS, ChunkTable
from tokenspeed_jax.pallas_kernels.gated_delta_rule.terms_mosaic import DeltaRuleTerms
from tokenspeed_jax.pallas_kernels.gated_delta_rule.token_lines import (
    COLUMNS,
    TOKENS,
    Product,
    TokenLines,
    add_products,
    gpu,
    zeros,
)

STAGES = 3
WGMMA = plgpu.Layout.WGMMA
SQUARE = (TOKENS, COLUMNS)

Ref = Any


@functools.partial(jax.jit, static_argnames="interpret")
def delta_rule_walk_mosaic(
    q: Float[Array, "tokens key_heads key_dim"],
    k: Float[Array, "tokens key_heads key_dim"],
    terms: DeltaRuleTerms,
    initial_states: Float32[Array, "rows heads value_dim key_dim"],
    table: ChunkTable,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "tokens heads value_dim"], Float32[Array, "2 rows heads value_dim key_dim"]]:
    """Outputs, undefined for tokens of no row, and the states at the ends of bodies and of rows."""
    rows, heads, value_dim, key_dim = initial_states.shape
    dtype, interpreted = q.dtype, interpret is not None
    operands = {"q": q, "k": k, "p": terms.products, "u": terms.updates, "w": terms.corrections}
    widths = {"q": key_dim, "k": key_dim, "p": TOKENS, "u": COLUMNS, "w": key_dim}
    scratch = {
        f"{name}_held": TokenLines.scratch(width, STAGES, dtype=dtype, interpreted=interpreted)
        for name, width in widths.items()
    }
    kernel = plgpu.kernel(
        functools.partial(_block, interpreted=interpreted),
        out_type=(
            jax.ShapeDtypeStruct((q.shape[0], heads, value_dim), dtype),
            jax.ShapeDtypeStruct((PARTS, *initial_states.shape), jnp.float32),
        ),
        scratch_types=scratch
        | {
            "decays_held": plgpu.SMEM((STAGES, TOKENS), jnp.float32),
            "out_held": TokenLines.scratch(COLUMNS, dtype=dtype, interpreted=interpreted),
            "rest": plgpu.SMEM(SQUARE, dtype),
            "ready": plgpu.Barrier(
                num_arrivals=sum(width // COLUMNS for width in widths.values()) + 1, num_barriers=STAGES
            ),
            "free": plgpu.Barrier(num_barriers=STAGES),
        },
        grid=(rows, heads, value_dim // COLUMNS),
        grid_names=("row", "head", "part"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        kernel_name="delta_rule_walk",
    )
    return kernel(initial_states, table.parts, terms.sums, *operands.values())


class _Walk(NamedTuple):
    """A row's chunks, those of its body first.

    Attributes:
        chunk: the first one.
        begins, tokens, counts: of body and tail, the first token, the tokens and the chunks.
    """

    chunk: jax.Array
    begins: tuple[jax.Array, ...]
    tokens: tuple[jax.Array, ...]
    counts: tuple[jax.Array, ...]

    def _offset(self, step: jax.Array) -> jax.Array:
        return jnp.where(step < self.counts[0], step, step - self.counts[0]) * TOKENS

    def token(self, step: jax.Array) -> jax.Array:
        """First token of the row's chunk `step`."""
        return jnp.where(step < self.counts[0], self.begins[0], self.begins[1]) + self._offset(step)

    def length(self, step: jax.Array) -> jax.Array:
        """Its tokens."""
        left = jnp.where(step < self.counts[0], self.tokens[0], self.tokens[1]) - self._offset(step)
        return jnp.minimum(left, TOKENS)


def _block(
    initial_ref: Ref,
    parts_ref: Ref,
    decays_ref: Ref,
    q_ref: Ref,
    k_ref: Ref,
    p_ref: Ref,
    u_ref: Ref,
    w_ref: Ref,
    out_ref: Ref,
    states_ref: Ref,
    *,
    interpreted: bool,
    **scratch: Ref,
) -> None:
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    values = pl.ds(part * COLUMNS, COLUMNS)
    tokens = tuple(parts_ref[row, i, 2] for i in range(PARTS))
    counts = tuple(lax.div(x + TOKENS - 1, TOKENS) for x in tokens)
    plan = _Walk(parts_ref[row, 0, 0], tuple(parts_ref[row, i, 1] for i in range(PARTS)), tokens, counts)
    held = {name: TokenLines.of(scratch[f"{name}_held"], interpreted) for name in "qkpuw"}

    @pl.when(lax.axis_index("warpgroup") == 0)
    def _compute() -> None:
        out, states = out_ref.at[:, head, values], states_ref.at[:, row, head, values]
        _walk(initial_ref.at[row, head, values], out, states, plan, held, interpreted, scratch)

    @pl.when(lax.axis_index("warpgroup") == 1)
    def _load() -> None:
        steps = counts[0] + counts[1]
        key_head = lax.div(head, out_ref.shape[1] // q_ref.shape[1])

        @pl.loop(0, steps)
        def _chunk(step: jax.Array) -> None:
            slot = lax.rem(step, STAGES)
            pl.when(step >= STAGES)(functools.partial(plgpu.barrier_wait, scratch["free"].at[slot]))
            ready = scratch["ready"].at[slot]
            chunk = plan.chunk + step
            plgpu.copy_gmem_to_smem(decays_ref.at[chunk, head], scratch["decays_held"].at[slot], ready)
            for name, ref in (("q", q_ref), ("k", k_ref)):
                held[name].slot(slot).load(ref.at[:, key_head], plan.token(step), ready)
            for name, ref in (("p", p_ref), ("u", u_ref), ("w", w_ref)):
                columns = values if name == "u" else slice(None)
                held[name].slot(slot).load(ref.at[chunk, head, :, columns], jnp.int32(0), ready)

        @pl.loop(jnp.maximum(steps - STAGES, 0), steps)
        def _drain(step: jax.Array) -> None:
            plgpu.barrier_wait(scratch["free"].at[lax.rem(step, STAGES)])


def _walk(
    initial_ref: Ref,
    out_ref: Ref,
    states_ref: Ref,
    plan: _Walk,
    held: dict[str, TokenLines],
    interpreted: bool,
    scratch: dict[str, Ref],
) -> None:
    halves = range(len(held["k"].tiles))

    def columns(i: int) -> pl.Slice:
        return pl.ds(i * COLUMNS, COLUMNS)

    def visit(step: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = lax.rem(step, STAGES)
        token, length = plan.token(step), plan.length(step)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        here = {name: lines.slot(slot) for name, lines in held.items()}

        @pl.when(length < TOKENS)
        def _not_full() -> None:
            here["k"].clear(length)
            here["u"].clear(length)

        tiles = {name: lines.tiles for name, lines in here.items()}
        state, out = _visit_chunk(state, scratch["decays_held"].at[slot], tiles, interpreted)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store(out, out_ref, token, length, TokenLines.of(scratch["out_held"], interpreted), scratch["rest"])
        return state

    def walk_part(part: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = jnp.where(part == 0, 0, plan.counts[0])
        last = jnp.where(part == 0, plan.counts[0], plan.counts[0] + plan.counts[1])
        state = lax.fori_loop(first, last, visit, state)
        for i in halves:
            states_ref.at[part, :, columns(i)][...] = state[i]
        return state

    state = tuple(gpu.load(initial_ref.at[:, columns(i)], layout=WGMMA, optimized=False) for i in halves)
    lax.fori_loop(0, PARTS, walk_part, state)
    plgpu.wait_smem_to_gmem(0)


def _store(
    out: Float[Array, "64 size"], out_ref: Ref, token: jax.Array, length: jax.Array, held: TokenLines, rest: Ref
) -> None:
    """Starts the copy of a chunk's outputs [values, tokens] to its tokens."""

    @pl.when(length == TOKENS)
    def _whole() -> None:
        held.tiles[0].transpose((1, 0))[...] = out
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(held.lines[0], out_ref.at[pl.ds(token, TOKENS)])

    @pl.when(length < TOKENS)
    def _token_by_token() -> None:
        rest.transpose((1, 0))[...] = out
        plgpu.commit_smem()

        @pl.loop(0, length)
        def _copy(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(rest.at[i], out_ref.at[token + i])


def _visit_chunk(
    state: tuple[jax.Array, ...], decays: Ref, tiles: dict[str, tuple[Ref, ...]], interpreted: bool
) -> tuple[tuple[jax.Array, ...], Float[Array, "64 size"]]:
    """(state before a chunk, in chunks of K) -> (state after it, its outputs [values, tokens])."""
    dtype = tiles["q"][0].dtype
    high = [x.astype(dtype) for x in state]
    halves = range(len(state))

    def across(x: Float[Array, " size"]) -> Float[Array, "64 size"]:
        return plgpu.layout_cast(lax.broadcast_in_dim(x, SQUARE, [1]), WGMMA)

    updates = plgpu.layout_cast(tiles["u"][0].transpose((1, 0))[...], WGMMA)
    through = [Product(0, high[i], tiles["w"][i].transpose((1, 0))) for i in halves]
    (updates,) = add_products((updates.astype(jnp.float32),), through, interpreted)
    sums = gpu.load(decays, layout=WGMMA.reduce(0), optimized=False)
    last = decays[TOKENS - 1]
    kept = (updates.astype(jnp.float32) * across(jnp.exp2(last - sums))).astype(dtype)
    decayed = tuple(x * jnp.exp2(last) for x in state)
    n = len(state)
    products = [Product(n, high[i], tiles["q"][i].transpose((1, 0))) for i in halves]
    products += [Product(i, kept, tiles["k"][i]) for i in halves]
    products += [Product(n + 1, updates.astype(dtype), tiles["p"][0].transpose((1, 0)))]
    *after, seen, own = add_products((*decayed, zeros(*SQUARE), zeros(*SQUARE)), products, interpreted)
    return tuple(after), (seen * across(jnp.exp2(sums)) + own).astype(dtype)
