"""The selective scan of Mamba 1: every channel has its own small state and its own decays."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
)
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows, with_gradients
from tokenspeed_jax.pallas_kernels.selective_scan.reference import (
    selective_scan_reference,
    selective_scan_step_reference,
)
from tokenspeed_jax.pallas_kernels.selective_scan.xla import (
    selective_scan_all_chunks,
    selective_scan_step_xla,
    selective_scan_xla,
)

__all__ = ["SelectiveScanInputs", "selective_scan", "selective_scan_step"]

NO_KERNEL = "there is no kernel for it"


class SelectiveScanInputs(NamedTuple):
    """What each token brings to the recurrence, and the channels' rates (arXiv 2312.00752, section 3).

    With state S [channels, states], per token: S <- S * exp(step_size * rate) + (step_size * x) b^T; o = S c.

    Attributes:
        step_size: above 0; float32.
        b, c: shared by all channels.
        rate: below 0, the same for every token; float32.
    """

    x: Float[Array, "tokens channels"]
    step_size: Float[Array, "tokens channels"]
    b: Float[Array, "tokens states"]
    c: Float[Array, "tokens states"]
    rate: Float[Array, "channels states"]


def selective_scan(
    inputs: SelectiveScanInputs,
    initial_states: Float[Array, "rows channels states"],
    rows: RecurrentRows,
    *,
    implementation: Implementation | None = None,
) -> RecurrentResult:
    """The recurrence over each row's tokens, float32 inside; outputs `[tokens, channels]` in x's dtype.

    Args:
        implementation: None takes the fastest that serves the call.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_selective_scan(inputs, initial_states.shape[1:])
    check_implementation(implementation)
    implementation = choose_implementation(implementation, NO_KERNEL)
    functions = {"reference": selective_scan_reference, "xla": selective_scan_xla}
    with jax.named_scope("selective_scan"):
        return with_gradients(functions[implementation], selective_scan_all_chunks)(inputs, initial_states, rows)


def selective_scan_step(
    inputs: SelectiveScanInputs,
    states: BlockView,
    source_blocks: Int[Array, " tokens"],
    target_blocks: Int[Array, " tokens"],
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens channels"], BlockView]:
    """One token per row, states in place; blocks as in `gated_delta_rule_step`."""
    check_selective_scan(inputs, states.shape)
    check_implementation(implementation)
    implementation = choose_implementation(implementation, NO_KERNEL)
    functions = {"reference": selective_scan_step_reference, "xla": selective_scan_step_xla}
    with jax.named_scope("selective_scan_step"):
        return functions[implementation](inputs, states, source_blocks, target_blocks)


def check_selective_scan(inputs: SelectiveScanInputs, state_shape: tuple[int, ...]) -> None:
    """Raises ValueError where inputs and states do not fit together."""
    channels, states = inputs.rate.shape
    tokens = inputs.x.shape[0]
    expected = {"x": (tokens, channels), "step_size": (tokens, channels), "b": (tokens, states), "c": (tokens, states)}
    for name, shape in expected.items():
        if getattr(inputs, name).shape != shape:
            raise ValueError(f"{name} has shape {getattr(inputs, name).shape}, expected {shape}")
    if tuple(state_shape) != (channels, states):
        raise ValueError(f"states have shape {tuple(state_shape)}, expected {(channels, states)}")
