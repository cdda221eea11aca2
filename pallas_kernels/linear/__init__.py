"""Linear layers: x W^T, and the gated pair of products that opens a feed-forward block."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.linear.mosaic import linear_mosaic, mosaic_shape_refusal
from tokenspeed_jax.pallas_kernels.linear.reference import linear_reference
from tokenspeed_jax.pallas_kernels.linear.xla import linear_xla

__all__ = ["GateActivation", "linear", "mosaic_refusal"]

GateActivation = Literal["silu", "gelu_tanh"]


def mosaic_refusal(x: jax.Array, weight: jax.Array, *, gated: bool) -> str | None:
    """Why the kernel for Hopper GPUs does not serve this product on the default device; None when it does."""
    return hopper_refusal() or mosaic_shape_refusal(
        tokens=x.shape[0],
        outputs=weight.shape[0],
        channels=weight.shape[1],
        dtypes={x.dtype.name, weight.dtype.name},
        gated=gated,
    )


def linear(
    x: Float[Array, "tokens in"],
    weight: Float[Array, "out in"],
    bias: Float[Array, " out"] | None = None,
    *,
    gate: GateActivation | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "tokens outputs"]:
    """y = x W^T + b; with a gate, f(y[:, :out / 2]) * y[:, out / 2:].

    Products accumulate in float32. `mosaic`, for few tokens, rounds once, to the result; the other forms also round y
    before the gate.

    Args:
        gate: f, by name; `weight` then holds the gate's rows before the up projection's.
        implementation: None takes the fastest that serves the call.

    Returns:
        In x's dtype, `out` columns, or half as many with a gate.

    Raises:
        ValueError: shapes that do not fit; an unknown gate; an implementation that is unknown or, with the reason,
            cannot serve.
    """
    check_implementation(implementation)
    _check(x, weight, bias, gate)
    implementation = choose_implementation(implementation, mosaic_refusal(x, weight, gated=gate is not None))
    functions = {"reference": linear_reference, "xla": linear_xla, "mosaic": linear_mosaic}
    with jax.named_scope("linear"):
        return functions[implementation](x, weight, bias, gate)


def _check(x: jax.Array, weight: jax.Array, bias: jax.Array | None, gate: str | None) -> None:
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [tokens, in] and weight [out, in], got {x.shape} and {weight.shape}")
    if bias is not None and (bias.shape != weight.shape[:1] or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(f"bias must be {weight.shape[0]} floats, got {bias.dtype}{list(bias.shape)}")
    if gate is None:
        return
    if gate not in get_args(GateActivation):
        raise ValueError(f"gate must be None or one of {get_args(GateActivation)}, got {gate!r}")
    if weight.shape[0] % 2:
        raise ValueError(f"a gated weight has an even number of rows, got {weight.shape[0]}")
