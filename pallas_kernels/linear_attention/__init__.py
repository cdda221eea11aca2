"""Linear attention with a decay a head: lightning attention (a constant) and Mamba 2's state space (one a token)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.linear_attention.mosaic import linear_attention_mosaic
from tokenspeed_jax.pallas_kernels.linear_attention.reference import (
    linear_attention_reference,
    linear_attention_step_reference,
)
from tokenspeed_jax.pallas_kernels.linear_attention.xla import (
    linear_attention_all_chunks,
    linear_attention_step_xla,
    linear_attention_xla,
)
from tokenspeed_jax.pallas_kernels.recurrent_rows import (
    RecurrentResult,
    RecurrentRows,
    check_matrix_states,
    with_gradients,
)
from tokenspeed_jax.pallas_kernels.state_scan import state_scan_refusal
from tokenspeed_jax.pallas_kernels.state_step import state_step_mosaic, state_step_refusal

__all__ = ["LinearAttentionInputs", "linear_attention", "linear_attention_step"]


class LinearAttentionInputs(NamedTuple):
    """What each token brings to the recurrence.

    With state S [V, K] of a value head, per token: S <- S * exp(log_decay) + v k^T; o = S q.

    Attributes:
        q, k: value head h reads key head h // (heads / key heads).
        log_decay: natural log, at or below 0; float32.
    """

    q: Float[Array, "tokens key_heads key_dim"]
    k: Float[Array, "tokens key_heads key_dim"]
    v: Float[Array, "tokens heads value_dim"]
    log_decay: Float[Array, "tokens heads"]


def linear_attention(
    inputs: LinearAttentionInputs,
    initial_states: Float[Array, "rows heads value_dim key_dim"],
    rows: RecurrentRows,
    *,
    implementation: Implementation | None = None,
) -> RecurrentResult:
    """The recurrence over each row's tokens, float32 inside; outputs `[tokens, heads, value_dim]` in v's dtype.

    Args:
        implementation: None takes the fastest that serves the call.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_linear_attention(inputs, initial_states.shape[1:])
    check_implementation(implementation)
    shape = {"key_dim": inputs.k.shape[2], "value_dim": inputs.v.shape[2]}
    refusal = hopper_refusal() or state_scan_refusal(**shape, dtype=inputs.v.dtype)
    implementation = choose_implementation(implementation, refusal)
    functions = {
        "reference": linear_attention_reference,
        "xla": linear_attention_xla,
        "mosaic": linear_attention_mosaic,
    }
    with jax.named_scope("linear_attention"):
        return with_gradients(functions[implementation], linear_attention_all_chunks)(inputs, initial_states, rows)


def linear_attention_step(
    inputs: LinearAttentionInputs,
    states: BlockView,
    source_blocks: Int[Array, " tokens"],
    target_blocks: Int[Array, " tokens"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """One token per row, states in place; blocks as in `gated_delta_rule_step`."""
    check_linear_attention(inputs, states.shape)
    check_implementation(implementation)
    implementation = choose_implementation(implementation, hopper_refusal() or state_step_refusal(states))
    functions = {
        "reference": linear_attention_step_reference,
        "xla": linear_attention_step_xla,
        "mosaic": lambda inputs, *blocks: state_step_mosaic(*inputs, None, *blocks),
    }
    with jax.named_scope("linear_attention_step"):
        return functions[implementation](inputs, states, source_blocks, target_blocks)


def check_linear_attention(inputs: LinearAttentionInputs, state_shape: tuple[int, ...]) -> None:
    """Raises ValueError where inputs and states do not fit together."""
    check_matrix_states(inputs.q, inputs.k, inputs.v, state_shape)
    tokens, heads, _ = inputs.v.shape
    if inputs.log_decay.shape != (tokens, heads):
        raise ValueError(f"log_decay has shape {inputs.log_decay.shape}, expected {(tokens, heads)}")
    if jnp.dtype(inputs.log_decay.dtype).itemsize < 4:
        raise ValueError("log_decay must be float32")
