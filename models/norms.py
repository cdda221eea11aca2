"""Root-mean-square norms. Statistics are float32; the families differ in where they round to the input's dtype."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from tokenspeed_jax.pallas_kernels.add_norm import add_norm
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule, normalized

__all__ = ["GemmaRMSNorm", "LateRoundingRMSNorm", "RMSNorm", "Residual", "normalized", "unit_vectors"]


def unit_vectors(x: Float[Array, "... dim"]) -> Float32[Array, "... dim"]:
    """x / |x| over the last axis, in float32; what is near 0 stays there (an epsilon of 1e-6 under the root)."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class Residual(NamedTuple):
    """The residual stream between two blocks: what the last one adds is added where the next one's norm reads the sum.

    Attributes:
        x: the stream before the last block.
        update: the last block's result; None when it is in x already.
    """

    x: Float[Array, "tokens hidden"]
    update: Float[Array, "tokens hidden"] | None = None

    @property
    def total(self) -> Float[Array, "tokens hidden"]:
        """The stream after the last block."""
        return self.x if self.update is None else self.x + self.update


class RMSNorm(nnx.Module):
    """w * round(x / rms(x)): Llama, Mistral, Qwen3."""

    def __init__(self, dim: int, epsilon: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.epsilon = epsilon

    @property
    def norm(self) -> Norm:
        """What kernels take of it."""
        return Norm(self.weight[...], self.rule)

    @property
    def rule(self) -> NormRule:
        """Where it rounds."""
        return NormRule(self.epsilon)

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return self.norm(x)

    def after(self, residual: Residual) -> tuple[Float[Array, "tokens dim"], Float[Array, "tokens dim"]]:
        """The stream after its last block, and the norm of it."""
        if residual.update is None:
            return residual.x, self(residual.x)
        return add_norm(residual.x, residual.update, self.norm)


class LateRoundingRMSNorm(RMSNorm):
    """round(w * x / rms(x)): OLMo."""

    @property
    def rule(self) -> NormRule:
        return NormRule(self.epsilon, rounds_first=False)


class GemmaRMSNorm(RMSNorm):
    """round((1 + w) * x / rms(x)): Gemma; w begins at 0."""

    def __init__(self, dim: int, epsilon: float, *, dtype: DTypeLike) -> None:
        super().__init__(dim, epsilon, dtype=dtype)
        self.weight = nnx.Param(jnp.zeros((dim,), dtype))

    @property
    def rule(self) -> NormRule:
        return NormRule(self.epsilon, rounds_first=False, gain_offset=1.0)
