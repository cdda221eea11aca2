"""Recurrent layers over cached states: reads each row's state, runs the recurrence, stores what a step leaves behind.

A decode step updates states in place in the arena. A step with prefill chunks walks every row once; the state at the
row's checkpoint and the state after its last token go to blocks of their own (cache-runtime.md 17).
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from tokenspeed_jax.cache.state_blocks import StateBlocks
from tokenspeed_jax.models.attention import RecurrenceInputs
from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.causal_convolution import causal_convolution, causal_convolution_step
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule, gated_delta_rule_step
from tokenspeed_jax.pallas_kernels.linear_attention import (
    LinearAttentionInputs,
    linear_attention,
    linear_attention_step,
)
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows
from tokenspeed_jax.pallas_kernels.selective_scan import SelectiveScanInputs, selective_scan, selective_scan_step

_KERNELS: dict[type, tuple[Callable[..., RecurrentResult], Callable[..., tuple[Any, BlockView]]]] = {
    DeltaRuleInputs: (gated_delta_rule, gated_delta_rule_step),
    LinearAttentionInputs: (linear_attention, linear_attention_step),
    SelectiveScanInputs: (selective_scan, selective_scan_step),
}
"""Type of a recurrence's inputs -> its walk over rows, and its single step."""


def convolve_cached(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: BlockView,
    blocks: StateBlocks,
    rows: RecurrentRows | None,
) -> tuple[Float[Array, "tokens channels"], BlockView]:
    """The causal convolution behind cached windows.

    Args:
        rows: the step's rows; None when every row has exactly one token.

    Returns:
        The outputs, and the view after the windows were stored.
    """
    if rows is None:
        return causal_convolution_step(x, weight, bias, windows, blocks.source, blocks.target)
    result = causal_convolution(x, weight, bias, windows.take(blocks.source), rows)
    return result.output, _stored(windows, blocks, result)


def recur_cached(
    inputs: RecurrenceInputs, states: BlockView, blocks: StateBlocks, rows: RecurrentRows | None
) -> tuple[Float[Array, "tokens ..."], BlockView]:
    """The recurrence from cached states; arguments and results as for `convolve_cached`."""
    scan, step = _KERNELS[type(inputs)]
    if rows is None:
        return step(inputs, states, blocks.source, blocks.target)
    result = scan(inputs, states.take(blocks.source), rows)
    return result.output, _stored(states, blocks, result)


def _stored(view: BlockView, blocks: StateBlocks, result: RecurrentResult) -> BlockView:
    return view.write(blocks.checkpoint, result.body_states).write(blocks.target, result.final_states)
