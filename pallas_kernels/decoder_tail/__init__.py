"""A decoder layer after its attention: output projection, residual sum, norm, gated feed-forward, residual sum."""

import functools

import jax
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.add_norm import add_norm
from tokenspeed_jax.pallas_kernels.decoder_tail.mosaic import decoder_tail_mosaic, mosaic_shape_refusal
from tokenspeed_jax.pallas_kernels.decoder_tail.reference import decoder_tail_reference
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.linear import GateActivation, linear
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

ORDER: tuple[Implementation, ...] = ("xla", "mosaic")
"""The separate operations are as fast as the one launch so far, see docs/kernels.md."""

__all__ = ["decoder_tail", "mosaic_refusal"]

Tail = tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"] | None]


def mosaic_refusal(x: jax.Array, mixed: jax.Array, out_weight: jax.Array, norm: Norm, down: jax.Array) -> str | None:
    """Why the kernel for Hopper GPUs does not serve this layer on the default device; None when it does."""
    return hopper_refusal() or mosaic_shape_refusal(
        tokens=x.shape[0],
        hidden=x.shape[1],
        mixed=mixed.shape[1],
        inner=down.shape[1],
        dtypes={array.dtype.name for array in (x, mixed, out_weight, norm.weight, down)},
    )


def decoder_tail(
    x: Float[Array, "tokens hidden"],
    mixed: Float[Array, "tokens mixed"],
    out_weight: Float[Array, "hidden mixed"],
    norm: Norm,
    gate_up: Float[Array, "gates hidden"],
    down: Float[Array, "hidden inner"],
    *,
    activation: GateActivation,
    implementation: Implementation | None = None,
) -> Tail:
    """s = x + mixed out_weight^T; then s + (f(left) * right) down^T, where left, right = norm(s) gate_up^T.

    Args:
        x: the residual stream before the layer.
        mixed: what the layer's attention saw, all heads of a token in a row.
        gate_up: the gate's rows before the up projection's.
        activation: f, by name.
        implementation: None takes the first of `ORDER` that serves the call. `mosaic`, for at most 64 tokens of
            bfloat16, is one launch; `xla` are the operations `linear` and `add_norm`, of which each takes its own
            fastest form, and the definition of the gradients.

    Returns:
        The stream, and what is still to be added to it, in x's dtype; None where it is in it already.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    _check(x, mixed, out_weight, norm, gate_up, down)
    arguments = (x, mixed, out_weight, norm.weight, gate_up, down)
    refusal = mosaic_refusal(x, mixed, out_weight, norm, down)
    implementation = choose_implementation(implementation, refusal, order=ORDER)
    with jax.named_scope("decoder_tail"):
        if implementation == "mosaic":
            return _fused(norm.rule, activation, *arguments), None
        if implementation == "reference":
            return decoder_tail_reference(x, mixed, out_weight, norm, gate_up, down, activation).astype(x.dtype), None
        return _composed(norm.rule, activation, *arguments)


def _composed(
    rule: NormRule,
    activation: GateActivation,
    x: jax.Array,
    mixed: jax.Array,
    out_weight: jax.Array,
    norm_weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    total, normed = add_norm(x, linear(mixed, out_weight), Norm(norm_weight, rule))
    return total, linear(linear(normed, gate_up, gate=activation), down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(rule: NormRule, activation: GateActivation, *arguments: jax.Array) -> Float[Array, "tokens hidden"]:
    return decoder_tail_mosaic(*arguments, rule=rule, activation=activation)


def _forward(
    rule: NormRule, activation: GateActivation, *arguments: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _fused(rule, activation, *arguments), arguments


def _backward(
    rule: NormRule, activation: GateActivation, arguments: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, ...]:
    """Through the separate operations, which compute the same."""
    _, pull = jax.vjp(functools.partial(_composed, rule, activation), *arguments)
    return pull((gradient, gradient))


_fused.defvjp(_forward, _backward)


def _check(
    x: jax.Array, mixed: jax.Array, out_weight: jax.Array, norm: Norm, gate_up: jax.Array, down: jax.Array
) -> None:
    hidden = x.shape[-1]
    wanted = {
        "mixed": (mixed, (x.shape[0], mixed.shape[-1])),
        "out_weight": (out_weight, (hidden, mixed.shape[-1])),
        "norm": (norm.weight, (hidden,)),
        "gate_up": (gate_up, (2 * down.shape[-1], hidden)),
        "down": (down, (hidden, down.shape[-1])),
    }
    if x.ndim != 2:
        raise ValueError(f"x must be [tokens, hidden], got {x.shape}")
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} beside x of {x.shape}, got {array.shape}")
