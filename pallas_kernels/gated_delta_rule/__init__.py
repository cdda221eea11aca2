"""The gated delta rule: the recurrence of Gated DeltaNet (one gate a head) and Kimi Delta Attention (one a channel)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.gated_delta_rule.mosaic import gated_delta_rule_mosaic
from tokenspeed_jax.pallas_kernels.gated_delta_rule.reference import (
    gated_delta_rule_reference,
    gated_delta_rule_step_reference,
)
from tokenspeed_jax.pallas_kernels.gated_delta_rule.xla import (
    gated_delta_rule_all_chunks,
    gated_delta_rule_step_xla,
    gated_delta_rule_xla,
)
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.recurrent_rows import (
    RecurrentResult,
    RecurrentRows,
    check_matrix_states,
    with_gradients,
)
from tokenspeed_jax.pallas_kernels.state_scan import state_scan_refusal
from tokenspeed_jax.pallas_kernels.state_step import state_step_mosaic, state_step_refusal
from tokenspeed_jax.pallas_kernels.triton_calls import triton_missing

__all__ = ["DeltaRuleInputs", "gated_delta_rule", "gated_delta_rule_step", "triton_refusal"]

# Over many tokens, by the number of axes of the gates (bench/RESULTS.md): with a gate a head both Mosaic kernels lead;
# with one a channel Mosaic only walks, over terms that XLA makes, and Triton's kernels take a third of the time.
FASTEST_FIRST: dict[int, tuple[Implementation, ...]] = {2: ("mosaic", "triton", "xla"), 3: ("triton", "mosaic", "xla")}
TRITON_KEY_DIM = 128
TRITON_VALUE_TILE = 64


class DeltaRuleInputs(NamedTuple):
    """What each token brings to the recurrence (model-families.md 1.7).

    With state S [V, K] of a value head, per token: S <- S * exp(log_decay); S <- S + beta (v - S k) k^T; o = S q.

    Attributes:
        q, k: value head h reads key head h // (heads / key heads). Already normalised and scaled.
        log_decay: natural log, at or below 0: one per value head (`[tokens, heads]`), or one per value head and
            channel of K (`[tokens, heads, key_dim]`). Float32.
        beta: strength of the correction, in [0, 1]. Float32.
    """

    q: Float[Array, "tokens key_heads key_dim"]
    k: Float[Array, "tokens key_heads key_dim"]
    v: Float[Array, "tokens heads value_dim"]
    log_decay: Float[Array, "tokens heads"] | Float[Array, "tokens heads key_dim"]
    beta: Float[Array, "tokens heads"]


def triton_refusal(*, key_dim: int, value_dim: int, dtype: jnp.dtype | str) -> str | None:
    """Why the Triton kernels cannot serve many tokens of this shape on the default device; None when they can."""
    if refusal := hopper_refusal() or triton_missing():
        return refusal
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"values of {jnp.dtype(dtype)} are not bfloat16, the range and precision that its products have"
    if key_dim != TRITON_KEY_DIM:
        return f"key dim {key_dim} is not {TRITON_KEY_DIM}"
    if value_dim % TRITON_VALUE_TILE:
        return f"value dim {value_dim} is no multiple of {TRITON_VALUE_TILE}"
    return None


def gated_delta_rule(
    inputs: DeltaRuleInputs,
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
    check_delta_rule(inputs, initial_states.shape[1:])
    check_implementation(implementation)
    shape = {"key_dim": inputs.k.shape[2], "value_dim": inputs.v.shape[2], "dtype": inputs.v.dtype}
    refusal = hopper_refusal() or state_scan_refusal(**shape)
    implementation = choose_implementation(
        implementation, refusal, triton_refusal=triton_refusal(**shape), order=FASTEST_FIRST[inputs.log_decay.ndim]
    )
    functions = {
        "reference": gated_delta_rule_reference,
        "xla": gated_delta_rule_xla,
        "mosaic": gated_delta_rule_mosaic,
        "triton": _in_triton,
    }
    with jax.named_scope("gated_delta_rule"):
        return with_gradients(functions[implementation], gated_delta_rule_all_chunks)(inputs, initial_states, rows)


def _in_triton(
    inputs: DeltaRuleInputs, initial_states: Float[Array, "rows heads value_dim key_dim"], rows: RecurrentRows
) -> RecurrentResult:
    # Imported by the first call, since it imports an optional package.
    from tokenspeed_jax.pallas_kernels.gated_delta_rule.triton import gated_delta_rule_triton

    return gated_delta_rule_triton(inputs, initial_states, rows)


def gated_delta_rule_step(
    inputs: DeltaRuleInputs,
    states: BlockView,
    source_blocks: Int[Array, " tokens"],
    target_blocks: Int[Array, " tokens"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens heads value_dim"], BlockView]:
    """One token per row, states read from `source_blocks` and stored to `target_blocks` in place.

    Args:
        source_blocks: 0 or below reads zeros (a row without history).
        target_blocks: 0 or below stores nothing (a padding row, whose output means nothing but is finite for finite
            inputs). A block may be its row's source and target.
        implementation: None takes the fastest that serves the call.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_delta_rule(inputs, states.shape)
    check_implementation(implementation)
    implementation = choose_implementation(implementation, hopper_refusal() or state_step_refusal(states))
    functions = {
        "reference": gated_delta_rule_step_reference,
        "xla": gated_delta_rule_step_xla,
        "mosaic": lambda inputs, *blocks: state_step_mosaic(*inputs, *blocks),
    }
    with jax.named_scope("gated_delta_rule_step"):
        return functions[implementation](inputs, states, source_blocks, target_blocks)


def check_delta_rule(inputs: DeltaRuleInputs, state_shape: tuple[int, ...]) -> None:
    """Raises ValueError where inputs and states do not fit together."""
    check_matrix_states(inputs.q, inputs.k, inputs.v, state_shape)
    tokens, heads, _ = inputs.v.shape
    if inputs.log_decay.shape not in ((tokens, heads), (tokens, heads, inputs.q.shape[2])):
        raise ValueError(f"log_decay has shape {inputs.log_decay.shape}, expected {(tokens, heads)} with or without K")
    if inputs.beta.shape != (tokens, heads):
        raise ValueError(f"beta has shape {inputs.beta.shape}, expected {(tokens, heads)}")
    if jnp.dtype(inputs.log_decay.dtype).itemsize < 4 or jnp.dtype(inputs.beta.dtype).itemsize < 4:
        raise ValueError("log_decay and beta must be float32")
