"""The gated delta rule as its definition reads: token after token, one state per row."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows, scan_tokens


def delta_rule_token(state: Float[Array, "heads value_dim key_dim"], token: Any) -> tuple[Array, Array]:
    """(state, one token's `DeltaRuleInputs`) -> (state, output), in the state's dtype."""
    q, k, v, log_decay, beta = (jnp.asarray(x, state.dtype) for x in token)
    repeats = v.shape[0] // k.shape[0]
    q, k = (jnp.repeat(x, repeats, axis=0) for x in (q, k))
    decay = jnp.exp(log_decay)
    state = state * (decay[:, None, None] if decay.ndim == 1 else decay[:, None, :])
    seen = jnp.einsum("hvk,hk->hv", state, k, precision=lax.Precision.HIGHEST)
    state = state + (beta[:, None] * (v - seen))[:, :, None] * k[:, None, :]
    return state, jnp.einsum("hvk,hk->hv", state, q, precision=lax.Precision.HIGHEST)


def gated_delta_rule_reference(
    inputs: Any, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    """See `gated_delta_rule`; computes in the dtype of `initial_states`."""
    result = scan_tokens(delta_rule_token, inputs, initial_states, rows)
    return result._replace(output=result.output.astype(inputs.v.dtype))


def gated_delta_rule_step_reference(
    inputs: Any, states: BlockView, source_blocks: Int[Array, " tokens"], target_blocks: Int[Array, " tokens"]
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """See `gated_delta_rule_step`; gathers, computes in float32, scatters."""
    before = states.take(source_blocks).astype(jnp.float32)
    after, output = jax.vmap(delta_rule_token)(before, inputs)
    return output.astype(inputs.v.dtype), states.write(target_blocks, after)
