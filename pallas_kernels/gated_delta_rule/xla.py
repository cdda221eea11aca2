"""The gated delta rule in plain JAX: chunks of 64 tokens in the WY form, and one gathered step.

With D the updates d_i of a chunk's tokens as rows (arXiv 2412.06464 and, for a decay a channel, 2510.26692):

    (I + A) D = beta (V - (K * decay to token) S^T),   A[i, j] = beta_i sum_c k_ic k_jc decay_c(j, i) for j < i

so D = updates - corrections S^T with updates = (I + A)^-1 beta V and corrections = (I + A)^-1 beta (K * decay).
"""

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
from tokenspeed_jax.pallas_kernels.decay_products import decayed_products, decays, unit_lower_inverse
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows


def gated_delta_rule_xla(
    inputs: Any, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    """See `gated_delta_rule`."""
    terms_of = chunk_terms(inputs.v.dtype)
    return walk_chunks(terms_of, tuple(inputs), initial_states, rows, inputs.v.dtype)


def gated_delta_rule_all_chunks(
    inputs: Any, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    """Has gradients, unlike the other forms."""
    terms_of = chunk_terms(inputs.v.dtype)
    return walk_all_chunks(terms_of, tuple(inputs), initial_states, rows, inputs.v.dtype)


def chunk_terms(dtype: jnp.dtype) -> Callable[[Any], ChunkTerms]:
    """From chunks of inputs of this dtype to their terms."""
    return lambda chunk: delta_rule_terms(*chunk, precision=matmul_precision(dtype))


def delta_rule_terms(
    q: Float[Array, "chunks size key_heads key_dim"],
    k: Float[Array, "chunks size key_heads key_dim"],
    v: Float[Array, "chunks size heads value_dim"],
    log_decay: Float[Array, "chunks size heads"] | Float[Array, "chunks size heads key_dim"],
    beta: Float[Array, "chunks size heads"],
    precision: lax.Precision,
) -> ChunkTerms:
    """What chunks do to the state, all chunks and heads at once."""
    heads = v.shape[2]
    q, k, v, gates = (per_value_head(x, heads) for x in (q, k, v, log_decay))
    strength = per_value_head(beta, heads)[..., None]
    if gates.ndim == 3:
        factors = decays(gates)
        reading = jnp.einsum("nhic,nhjc->nhij", q, k, precision=precision) * factors.products
        writing = jnp.einsum("nhic,nhjc->nhij", k, k, precision=precision) * factors.products
    else:
        # Both products share their decays: queries and keys as rows of one call, beside each other as heads.
        both = decayed_products(jnp.stack([q, k]), jnp.stack([k, k]), gates[None], precision)
        reading, writing = both.products
        factors = both._replace(to_token=both.to_token[0], to_end=both.to_end[0])
    inverse = unit_lower_inverse(strength * writing) * jnp.swapaxes(strength, 2, 3)
    to_token = jnp.exp(factors.to_token)
    return ChunkTerms(
        reads=q * to_token,
        products=reading,
        updates=jnp.matmul(inverse, v, precision=precision),
        corrections=jnp.matmul(inverse, k * to_token, precision=precision),
        keys=k * jnp.exp(factors.to_end),
        decay=to_token[:, :, -1:],
    )


def gated_delta_rule_step_xla(
    inputs: Any, states: BlockView, source_blocks: Int[Array, " tokens"], target_blocks: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """See `gated_delta_rule_step`; gathers, computes in float32, scatters."""
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in inputs)
    repeats = v.shape[1] // k.shape[1]
    q, k = (jnp.repeat(x, repeats, axis=1)[:, :, None, :] for x in (q, k))
    decay = jnp.exp(log_decay)
    before = states.take(source_blocks).astype(jnp.float32)
    decayed = before * (decay[:, :, None, None] if decay.ndim == 2 else decay[:, :, None, :])
    update = beta[:, :, None] * (v - jnp.sum(decayed * k, axis=-1))
    after = decayed + update[..., None] * k
    return jnp.sum(after * q, axis=-1).astype(inputs.v.dtype), states.write(target_blocks, after)
