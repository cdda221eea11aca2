"""The selective scan as its definition reads: token after token, one state per row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows, scan_tokens


def selective_scan_token(
    state: Float[Array, "channels states"], token: Any, rate: Float[Array, "channels states"]
) -> tuple[Array, Array]:
    """(state, (x, step_size, b, c) of one token) -> (state, output), in the state's dtype."""
    x, step_size, b, c = (jnp.asarray(value, state.dtype) for value in token)
    decay = jnp.exp(step_size[:, None] * rate.astype(state.dtype))
    state = state * decay + (step_size * x)[:, None] * b[None, :]
    return state, jnp.einsum("ds,s->d", state, c, precision=lax.Precision.HIGHEST)


def selective_scan_reference(
    inputs: Any, initial_states: Float[Array, "rows channels states"], rows: RecurrentRows
) -> RecurrentResult:
    """See `selective_scan`; computes in the dtype of `initial_states`."""
    result = scan_tokens(
        lambda state, token: selective_scan_token(state, token, inputs.rate), tuple(inputs[:4]), initial_states, rows
    )
    return result._replace(output=result.output.astype(inputs.x.dtype))


def selective_scan_step_reference(
    inputs: Any, states: BlockView, source_blocks: Int[Array, " tokens"], target_blocks: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens channels"], BlockView]:
    """See `selective_scan_step`; gathers, computes in float32, scatters."""
    before = states.take(source_blocks).astype(jnp.float32)
    after, output = jax.vmap(selective_scan_token, in_axes=(0, 0, None))(before, tuple(inputs[:4]), inputs.rate)
    return output.astype(inputs.x.dtype), states.write(target_blocks, after)
