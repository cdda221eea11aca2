"""The short causal convolution in front of recurrent layers, one filter a channel, and the windows it carries."""

import jax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.causal_convolution.xla import causal_convolution_step_xla, causal_convolution_xla
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows

__all__ = ["causal_convolution", "causal_convolution_step"]


def causal_convolution(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: Float[Array, "rows channels kept"],
    rows: RecurrentRows,
) -> RecurrentResult:
    """out[t, c] = bias[c] + sum_i weight[c, i] * x[t - (width - 1) + i, c] within a row (model-families.md 1.6).

    Args:
        windows: the `width - 1` raw inputs before each row, newest last; zeros where a sequence begins.

    Returns:
        Outputs in x's dtype, accumulated in float32; as states the windows of raw inputs, in x's dtype.

    Raises:
        ValueError: shapes that do not fit.
    """
    check_convolution(x, weight, bias, windows.shape[1:])
    with jax.named_scope("causal_convolution"):
        return causal_convolution_xla(x, weight, bias, windows, rows)


def causal_convolution_step(
    x: Float[Array, "rows channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: BlockView,
    source_blocks: Int[Array, " rows"],
    target_blocks: Int[Array, " rows"],
) -> tuple[Float[Array, "rows channels"], BlockView]:
    """One token per row, windows in place; blocks as in `gated_delta_rule_step`."""
    check_convolution(x, weight, bias, windows.shape)
    with jax.named_scope("causal_convolution_step"):
        return causal_convolution_step_xla(x, weight, bias, windows, source_blocks, target_blocks)


def check_convolution(x: jax.Array, weight: jax.Array, bias: jax.Array | None, window_shape: tuple[int, ...]) -> None:
    """Raises ValueError where inputs, filters and windows do not fit together."""
    channels, width = weight.shape
    if width < 2:
        raise ValueError(f"a causal convolution needs a width of at least 2, got {width}")
    if x.ndim != 2 or x.shape[1] != channels:
        raise ValueError(f"x has shape {x.shape}, the filters have {channels} channels")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias has shape {bias.shape}, expected {(channels,)}")
    if tuple(window_shape) != (channels, width - 1):
        raise ValueError(f"windows have shape {tuple(window_shape)}, expected {(channels, width - 1)}")
