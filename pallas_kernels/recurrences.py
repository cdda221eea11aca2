"""Every recurrence by the type of its inputs: the walk over a step's rows, and the single step."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule, gated_delta_rule_step
from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.linear_attention import (
    LinearAttentionInputs,
    linear_attention,
    linear_attention_step,
)
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult
from tokenspeed_jax.pallas_kernels.selective_scan import (
    NO_KERNEL,
    SelectiveScanInputs,
    selective_scan,
    selective_scan_step,
)
from tokenspeed_jax.pallas_kernels.state_scan import state_scan_refusal

RecurrenceInputs = DeltaRuleInputs | LinearAttentionInputs | SelectiveScanInputs


class Recurrence(NamedTuple):
    """One recurrence.

    Attributes:
        walk: (inputs, initial states, rows, implementation=) -> `RecurrentResult`.
        step: (inputs, states as a `BlockView`, source blocks, target blocks, implementation=) -> (output, the view
            after the step).
    """

    walk: Callable[..., RecurrentResult]
    step: Callable[..., tuple[Any, BlockView]]


RECURRENCES: dict[type, Recurrence] = {
    DeltaRuleInputs: Recurrence(gated_delta_rule, gated_delta_rule_step),
    LinearAttentionInputs: Recurrence(linear_attention, linear_attention_step),
    SelectiveScanInputs: Recurrence(selective_scan, selective_scan_step),
}
"""Type of a recurrence's inputs -> the recurrence, one line each."""


def mosaic_refusal(state_shape: tuple[int, ...], dtype: str) -> str | None:
    """Why the kernels for Hopper GPUs cannot serve a layer with such a state on the default device; None when they can.

    Args:
        dtype: of the layer's activations.
    """
    match state_shape:
        case (_, value_dim, key_dim):
            return hopper_refusal() or state_scan_refusal(key_dim=key_dim, value_dim=value_dim, dtype=dtype)
        case _:
            return f"states {list(state_shape)} belong to a selective scan: {NO_KERNEL}"
