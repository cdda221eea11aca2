"""The activations of gated feed-forward blocks, by the names of their checkpoints' configurations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def gate_function(name: str) -> Callable[[jax.Array], jax.Array]:
    """`silu`: x * sigmoid(x). `gelu_tanh`: GELU by its tanh approximation, as Gemma was trained with."""
    return {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}[name]


def gate_by_exponential(name: str, x: jax.Array) -> jax.Array:
    """The same with exp alone, as kernels compute it: tanh(z) is 2 sigmoid(2 z) - 1."""
    if name == "silu":
        return x / (1.0 + jnp.exp(-x))
    z = x * (0.7978845608028654 + 0.035677408136300125 * x * x)
    return x / (1.0 + jnp.exp(-2.0 * z))
