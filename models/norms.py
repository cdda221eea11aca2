"""Root-mean-square norms. Statistics are float32; the families differ in where they round to the input's dtype."""

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32


def normalized(x: Float[Array, "... dim"], epsilon: float) -> Float[Array, "... dim"]:
    """x / rms(x) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)


def unit_vectors(x: Float[Array, "... dim"]) -> Float32[Array, "... dim"]:
    """x / |x| over the last axis, in float32; what is near 0 stays there (an epsilon of 1e-6 under the root)."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


class RMSNorm(nnx.Module):
    """w * round(x / rms(x)): Llama, Mistral, Qwen3."""

    def __init__(self, dim: int, epsilon: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return self.weight[...] * normalized(x, self.epsilon).astype(x.dtype)


class LateRoundingRMSNorm(nnx.Module):
    """round(w * x / rms(x)): OLMo."""

    def __init__(self, dim: int, epsilon: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return (self.weight[...].astype(jnp.float32) * normalized(x, self.epsilon)).astype(x.dtype)


class GemmaRMSNorm(nnx.Module):
    """round((1 + w) * x / rms(x)): Gemma."""

    def __init__(self, dim: int, epsilon: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((dim,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... dim"]) -> Float[Array, "... dim"]:
        return ((1.0 + self.weight[...].astype(jnp.float32)) * normalized(x, self.epsilon)).astype(x.dtype)
