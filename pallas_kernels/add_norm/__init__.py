"""The sum of the residual stream and a block's result, and the norm that the next block reads it through."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tokenspeed_jax.pallas_kernels.add_norm.mosaic import THREADS, add_norm_mosaic, vector_length
from tokenspeed_jax.pallas_kernels.add_norm.reference import add_norm_reference
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

__all__ = ["add_norm", "mosaic_refusal"]

Rows = Float[Array, "tokens dim"]


def mosaic_refusal(*, dim: int, dtype: str) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve rows of this kind on the default device; None when it can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16"
    if vector_length(dim, jnp.dtype(dtype).itemsize) is None:
        return f"rows of {dim} are not cut into vectors of {THREADS} threads"
    return hopper_refusal()


def add_norm(x: Rows, update: Rows, norm: Norm, *, implementation: Implementation | None = None) -> tuple[Rows, Rows]:
    """`x + update`, rounded to their dtype, and its norm.

    Args:
        x, update: rows of one shape and dtype.
        norm: weights of that dtype.
        implementation: None takes the fastest that serves the call. The plain form is one, named both `reference` and
            `xla`; gradients are its gradients.

    Returns:
        The sum and its norm, in the dtype of x.

    Raises:
        ValueError: shapes or dtypes that do not fit; an implementation that is unknown or, with the reason, cannot
            serve.
    """
    check_implementation(implementation)
    if x.ndim != 2 or (x.shape, x.dtype) != (update.shape, update.dtype):
        raise ValueError(f"cannot add {update.dtype}{list(update.shape)} to rows {x.dtype}{list(x.shape)}")
    if (norm.weight.shape, norm.weight.dtype) != (x.shape[1:], x.dtype):
        raise ValueError(
            f"rows {x.dtype}{list(x.shape)} do not fit weights {norm.weight.dtype}{list(norm.weight.shape)}"
        )
    refusal = mosaic_refusal(dim=x.shape[1], dtype=x.dtype.name) if x.size else "there are no rows"
    with jax.named_scope("add_norm"):
        if choose_implementation(implementation, refusal) == "mosaic":
            return _with_gradients(x, update, norm.weight, norm.rule)
        return add_norm_reference(x, update, norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _with_gradients(x: Rows, update: Rows, weight: Float[Array, " dim"], rule: NormRule) -> tuple[Rows, Rows]:
    return add_norm_mosaic(x, update, weight, rule=rule)


def _forward(
    x: Rows, update: Rows, weight: Float[Array, " dim"], rule: NormRule
) -> tuple[tuple[Rows, Rows], tuple[Rows, Float[Array, " dim"]]]:
    total, normed = add_norm_mosaic(x, update, weight, rule=rule)
    return (total, normed), (total, weight)


def _backward(
    rule: NormRule, kept: tuple[Rows, Float[Array, " dim"]], gradients: tuple[Rows, Rows]
) -> tuple[Rows, Rows, Float[Array, " dim"]]:
    total, weight = kept
    _, pull = jax.vjp(lambda total, weight: Norm(weight, rule)(total), total, weight)
    of_norm, of_weight = pull(gradients[1])
    of_total = gradients[0] + of_norm
    return of_total, of_total, of_weight


_with_gradients.defvjp(_forward, _backward)
