"""`NormRule`: a root-mean-square norm as the model families round it, shared by all kernels that norm."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


@dataclasses.dataclass(frozen=True)
class NormRule:
    """The norm of a row x with learned weights w: float32 statistics, and where results are rounded to x's dtype.

    Attributes:
        epsilon: added to the mean square under the root.
        rounds_first: x / rms(x) is rounded before w multiplies it, in x's dtype (Llama); else once, after (OLMo).
        gain_offset: added to w, in float32 (1 for Gemma, whose weights are offsets from 1). Only where it rounds once.
    """

    epsilon: float
    rounds_first: bool = True
    gain_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.rounds_first and self.gain_offset:
            raise ValueError(f"a norm that rounds first multiplies by its weights as they are, got {self}")

    def weigh(
        self, unit: Float[Array, "*shape"], weight: Float[Array, "*shape"], dtype: DTypeLike
    ) -> Float[Array, "*shape"]:
        """The norm's result for x of `dtype`, from x / rms(x) in float32."""
        if self.rounds_first:
            return weight * unit.astype(dtype)
        gain = weight.astype(jnp.float32)
        gain = gain + self.gain_offset if self.gain_offset else gain
        return (gain * unit).astype(dtype)


def normalized(x: Float[Array, "... dim"], epsilon: float) -> Float32[Array, "... dim"]:
    """x / rms(x) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


class Norm(NamedTuple):
    """A norm with its weights."""

    weight: Float[Array, " dim"]
    rule: NormRule

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        """The norm of each row over the last axis, in plain JAX."""
        unit = normalized(x, self.rule.epsilon)
        return self.rule.weigh(unit, jnp.broadcast_to(self.weight, x.shape), x.dtype)
