"""The walk over a step's chunks that recurrences with matrix states share: S [V, K] a head, read and updated by chunk.

    per group of chunks, in parallel       per chunk, one after another
    ---------------------------------      -----------------------------------------------
    gather the group's tokens       --->   state of another row? take its initial state
    terms of every chunk (products         D = updates - corrections S^T
    within it, decays)                     out = reads S^T + products D
                                           S = S * decay + D^T keys;  store it where a body or a row ends

The group bounds what is held at a time; groups and chunks beyond the live ones are not visited.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.chunks import Chunks
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows

CHUNK = 64
GROUP = 32


class ChunkTerms(NamedTuple):
    """What a chunk does to the state before it and makes of it; float32, all zeros (decay one) in empty slots.

    Attributes:
        reads: queries as they see the state before the chunk.
        products: queries with keys of the chunk, under their decays; zero above the diagonal.
        updates: what each token adds along its key, if the state before the chunk is zero.
        corrections: how the state before the chunk lessens that; None in a recurrence without correction.
        keys: keys under the decay from their token to the end of the chunk.
        decay: the whole chunk's decay.
    """

    reads: Float[Array, "chunks heads size key_dim"]
    products: Float[Array, "chunks heads size size"]
    updates: Float[Array, "chunks heads size value_dim"]
    corrections: Float[Array, "chunks heads size key_dim"] | None
    keys: Float[Array, "chunks heads size key_dim"]
    decay: Float[Array, "chunks heads 1 decays"]


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 products for float32 inputs; TF32, finer than the inputs, for 16-bit ones."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


def per_value_head(x: Float[Array, "chunks size heads ..."], heads: int) -> Float[Array, "chunks heads size ..."]:
    """Float32, heads before tokens, key heads repeated for their value heads."""
    x = jnp.swapaxes(x.astype(jnp.float32), 1, 2)
    return x if x.shape[1] == heads else jnp.repeat(x, heads // x.shape[1], axis=1)


def walk_chunks(
    terms_of: Callable[[Any], ChunkTerms],
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    dtype: jnp.dtype,
) -> RecurrentResult:
    """The recurrence over each row's chunks.

    Args:
        terms_of: (inputs of some chunks, `[chunks, size, ...]`) -> their terms.
        inputs: a pytree of arrays whose first axis is tokens.
        dtype: of the outputs and, for the precision of the products, of the inputs.
    """
    num_tokens = jax.tree.leaves(inputs)[0].shape[0]
    group = min(GROUP, -(-num_tokens // CHUNK) + 2 * rows.num_rows)
    chunks = Chunks.cut(rows, num_tokens, CHUNK, multiple=group)
    initial_states = initial_states.astype(jnp.float32)
    _, heads, value_dim, _ = initial_states.shape
    precision = matmul_precision(dtype)

    def visit_group(index: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        first = index * group
        part = chunks.part(first, group)
        terms = terms_of(jax.tree.map(part.gather, inputs))

        def visit(i: Array, carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
            state, bodies, finals, out = carry
            row = part.rows[i]
            state = jnp.where(part.opens[i], initial_states.at[row].get(mode="clip"), state)
            state, here = _chunk(state, jax.tree.map(lambda x: x[i], terms), precision)
            bodies = bodies.at[jnp.where(part.closes_body[i], row, rows.num_rows)].set(state, mode="drop")
            finals = finals.at[jnp.where(part.closes_row[i], row, rows.num_rows)].set(state, mode="drop")
            return state, bodies, finals, lax.dynamic_update_index_in_dim(out, here.astype(dtype), first + i, 0)

        return lax.fori_loop(0, jnp.minimum(group, chunks.count - first), visit, carry)

    out = jnp.zeros((chunks.capacity, heads, CHUNK, value_dim), dtype)
    carry = (jnp.zeros_like(initial_states[0]), initial_states, initial_states, out)
    groups = (chunks.count + group - 1) // group
    _, bodies, finals, out = lax.fori_loop(0, groups, visit_group, carry)
    return RecurrentResult(chunks.restore(jnp.swapaxes(out, 1, 2)), bodies, finals)


def walk_all_chunks(
    terms_of: Callable[[Any], ChunkTerms],
    inputs: Any,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    dtype: jnp.dtype,
) -> RecurrentResult:
    """As `walk_chunks`, but has gradients: visits empty chunks too, and holds the terms of all."""
    chunks = Chunks.cut(rows, jax.tree.leaves(inputs)[0].shape[0], CHUNK)
    initial_states = initial_states.astype(jnp.float32)
    precision = matmul_precision(dtype)

    def visit(carry: tuple[Array, Array, Array], item: tuple[Any, ...]) -> tuple[tuple[Array, Array, Array], Array]:
        state, bodies, finals = carry
        terms, row, opens, closes_body, closes_row = item
        state = jnp.where(opens, initial_states.at[row].get(mode="clip"), state)
        state, out = _chunk(state, terms, precision)
        bodies = bodies.at[jnp.where(closes_body, row, rows.num_rows)].set(state, mode="drop")
        finals = finals.at[jnp.where(closes_row, row, rows.num_rows)].set(state, mode="drop")
        return (state, bodies, finals), out.astype(dtype)

    terms = terms_of(jax.tree.map(chunks.gather, inputs))
    items = (terms, chunks.rows, chunks.opens, chunks.closes_body, chunks.closes_row)
    carry = (jnp.zeros_like(initial_states[0]), initial_states, initial_states)
    (_, bodies, finals), out = lax.scan(visit, carry, items)
    return RecurrentResult(chunks.restore(jnp.swapaxes(out, 1, 2)), bodies, finals)


def _chunk(
    state: Float[Array, "heads value_dim key_dim"], terms: ChunkTerms, precision: lax.Precision
) -> tuple[Float[Array, "heads value_dim key_dim"], Float[Array, "heads size value_dim"]]:
    """(state before a chunk, its terms) -> (state after it, its outputs)."""
    size = terms.reads.shape[1]
    if terms.corrections is None:
        seen, updates = _through_state(terms.reads, state, precision), terms.updates
    else:
        both = _through_state(jnp.concatenate([terms.reads, terms.corrections], axis=1), state, precision)
        seen, updates = both[:, :size], terms.updates - both[:, size:]
    out = seen + jnp.einsum("hij,hjv->hiv", terms.products, updates, precision=precision)
    added = jnp.einsum("hjv,hjk->hvk", updates, terms.keys, precision=precision)
    return state * terms.decay + added, out


def _through_state(
    x: Float[Array, "heads tokens key_dim"], state: Float[Array, "heads value_dim key_dim"], precision: lax.Precision
) -> Float[Array, "heads tokens value_dim"]:
    return jnp.einsum("hik,hvk->hiv", x, state, precision=precision)
