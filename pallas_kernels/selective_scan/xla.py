"""The selective scan in plain JAX: chunks of 16 tokens, unrolled, one after another; and one gathered step.

A channel's decays differ from state to state, so no matrix product spans tokens. The chunk's tokens are one fused
computation over [channels, states]; what is held at a time is a chunk's states, never a prompt's.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.chunks import Chunks
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows

CHUNK = 16


def selective_scan_xla(
    inputs: Any, initial_states: Float[Array, "rows channels states"], rows: RecurrentRows
) -> RecurrentResult:
    """See `selective_scan`."""
    dtype, rate = inputs.x.dtype, inputs.rate.astype(jnp.float32)
    chunks = Chunks.cut(rows, inputs.x.shape[0], CHUNK)
    initial_states = initial_states.astype(jnp.float32)

    def visit(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        state, bodies, finals, out = carry
        row = chunks.rows[i]
        state = jnp.where(chunks.opens[i], initial_states.at[row].get(mode="clip"), state)
        here = tuple(x[0] for x in jax.tree.map(chunks.part(i, 1).gather, tuple(inputs[:4])))
        state, outputs = _chunk(state, here, rate)
        bodies = bodies.at[jnp.where(chunks.closes_body[i], row, rows.num_rows)].set(state, mode="drop")
        finals = finals.at[jnp.where(chunks.closes_row[i], row, rows.num_rows)].set(state, mode="drop")
        return state, bodies, finals, lax.dynamic_update_index_in_dim(out, outputs.astype(dtype), i, 0)

    out = jnp.zeros((chunks.capacity, CHUNK, inputs.x.shape[1]), dtype)
    carry = (jnp.zeros_like(initial_states[0]), initial_states, initial_states, out)
    _, bodies, finals, out = lax.fori_loop(0, chunks.count, visit, carry)
    return RecurrentResult(chunks.restore(out), bodies, finals)


def selective_scan_all_chunks(
    inputs: Any, initial_states: Float[Array, "rows channels states"], rows: RecurrentRows
) -> RecurrentResult:
    """Has gradients, unlike the other form: visits empty chunks too. Chunks are computed again in the backward pass."""
    dtype, rate = inputs.x.dtype, inputs.rate.astype(jnp.float32)
    chunks = Chunks.cut(rows, inputs.x.shape[0], CHUNK)
    initial_states = initial_states.astype(jnp.float32)

    def visit(carry: tuple[Array, Array, Array], item: tuple[Any, ...]) -> tuple[tuple[Array, Array, Array], Array]:
        state, bodies, finals = carry
        here, row, opens, closes_body, closes_row = item
        state = jnp.where(opens, initial_states.at[row].get(mode="clip"), state)
        state, outputs = jax.checkpoint(_chunk)(state, here, rate)
        bodies = bodies.at[jnp.where(closes_body, row, rows.num_rows)].set(state, mode="drop")
        finals = finals.at[jnp.where(closes_row, row, rows.num_rows)].set(state, mode="drop")
        return (state, bodies, finals), outputs.astype(dtype)

    here = jax.tree.map(chunks.gather, tuple(inputs[:4]))
    items = (here, chunks.rows, chunks.opens, chunks.closes_body, chunks.closes_row)
    carry = (jnp.zeros_like(initial_states[0]), initial_states, initial_states)
    (_, bodies, finals), out = lax.scan(visit, carry, items)
    return RecurrentResult(chunks.restore(out), bodies, finals)


def _chunk(
    state: Float[Array, "channels states"], inputs: tuple[Float[Array, "size width"], ...], rate: Array
) -> tuple[Float[Array, "channels states"], Float[Array, "size channels"]]:
    """State after a chunk, and its outputs."""
    outputs = []
    for token in range(CHUNK):
        state, output = _token(state, *(x[token].astype(jnp.float32) for x in inputs), rate=rate)
        outputs.append(output)
    return state, jnp.stack(outputs)


def _token(
    state: Float[Array, "*rows channels states"],
    x: Float[Array, "*rows channels"],
    step_size: Float[Array, "*rows channels"],
    b: Float[Array, "*rows states"],
    c: Float[Array, "*rows states"],
    rate: Float[Array, "channels states"],
) -> tuple[Float[Array, "*rows channels states"], Float[Array, "*rows channels"]]:
    """State and output after one token; an empty slot's step of 0 leaves the state as it is."""
    state = state * jnp.exp(step_size[..., None] * rate) + (step_size * x)[..., None] * b[..., None, :]
    return state, jnp.sum(state * c[..., None, :], axis=-1)


def selective_scan_step_xla(
    inputs: Any, states: BlockView, source_blocks: Int[Array, " tokens"], target_blocks: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens channels"], BlockView]:
    """See `selective_scan_step`; gathers, computes in float32, scatters."""
    before = states.take(source_blocks).astype(jnp.float32)
    after, output = _token(before, *(x.astype(jnp.float32) for x in inputs))
    return output.astype(inputs.x.dtype), states.write(target_blocks, after)
