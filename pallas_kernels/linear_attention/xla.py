"""Linear attention in plain JAX: chunks of 64 tokens and the states between them; and one gathered step."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.chunked_states import (
    ChunkTerms,
    matmul_precision,
    per_value_head,
    walk_all_chunks,
    walk_chunks,
)
from tokenspeed_jax.pallas_kernels.decay_products import decays
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows


def linear_attention_xla(
    inputs: Any, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    """See `linear_attention`."""
    terms_of = chunk_terms(inputs.v.dtype)
    return walk_chunks(terms_of, tuple(inputs), initial_states, rows, inputs.v.dtype)


def linear_attention_all_chunks(
    inputs: Any, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    """Has gradients, unlike the other forms."""
    terms_of = chunk_terms(inputs.v.dtype)
    return walk_all_chunks(terms_of, tuple(inputs), initial_states, rows, inputs.v.dtype)


def chunk_terms(dtype: jnp.dtype) -> Callable[[Any], ChunkTerms]:
    """From chunks of inputs of this dtype to their terms."""
    return lambda chunk: linear_attention_terms(*chunk, precision=matmul_precision(dtype))


def linear_attention_terms(
    q: Float[Array, "chunks size key_heads key_dim"],
    k: Float[Array, "chunks size key_heads key_dim"],
    v: Float[Array, "chunks size heads value_dim"],
    log_decay: Float[Array, "chunks size heads"],
    precision: lax.Precision,
) -> ChunkTerms:
    """What chunks do to the state, all chunks and heads at once."""
    heads = v.shape[2]
    products = jnp.einsum("nihc,njhc->nhij", *(x.astype(jnp.float32) for x in (q, k)), precision=precision)
    q, k, v, gates = (per_value_head(x, heads) for x in (q, k, v, log_decay))
    factors = decays(gates)
    to_token = jnp.exp(factors.to_token)
    return ChunkTerms(
        reads=q * to_token,
        products=jnp.repeat(products, heads // products.shape[1], axis=1) * factors.products,
        updates=v,
        corrections=None,
        keys=k * jnp.exp(factors.to_end),
        decay=to_token[:, :, -1:],
    )


def linear_attention_step_xla(
    inputs: Any, states: BlockView, source_blocks: Int[Array, " tokens"], target_blocks: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """See `linear_attention_step`; gathers, computes in float32, scatters."""
    q, k, v, log_decay = (x.astype(jnp.float32) for x in inputs)
    repeats = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1)[:, :, None, :] for x in (q, k))
    before = states.take(source_blocks).astype(jnp.float32)
    after = before * jnp.exp(log_decay)[:, :, None, None] + v[..., None] * k
    return jnp.sum(after * q, axis=-1).astype(inputs.v.dtype), states.write(target_blocks, after)
