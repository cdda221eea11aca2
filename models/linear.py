"""Matrix products with weights in the checkpoint's own orientation, `[out, in]`, and the embedding table."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.pallas_kernels.linear import linear

INITIAL_STDDEV = 0.02


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    return INITIAL_STDDEV * jax.random.normal(key, shape, dtype)


def normal_weight(shape: tuple[int, ...], dtype: DTypeLike, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter of `shape`, normally distributed around 0.

    It is drawn on the device by one small program per shape, so a model larger than the host can be initialised, and
    models of many equal layers compile few programs.
    """
    return nnx.Param(_normal(rngs.params(), shape, jnp.dtype(dtype)))


class Linear(nnx.Module):
    """x W^T (+ b)."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.weight = normal_weight((out_features, in_features), dtype, rngs)  # [out, in]
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "tokens in"]) -> Float[Array, "tokens out"]:
        return linear(x, self.weight[...], None if self.bias is None else self.bias[...])


class QKVLinear(nnx.Module):
    """The query, key and value projections as one product: a token's heads of q, then of k, then of v."""

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        bias: bool = False,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.head_dim = spec.head_dim
        kv_rows = spec.num_kv_heads * spec.head_dim
        self.rows = (spec.num_heads * spec.head_dim, kv_rows, kv_rows)
        self.proj = Linear(hidden_size, sum(self.rows), bias=bias, dtype=dtype, rngs=rngs)

    def flat(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Float[Array, "tokens q"], Float[Array, "tokens kv"], Float[Array, "tokens kv"]]:
        """q, k and v with all heads of a token in one row."""
        q_rows, k_rows, _ = self.rows
        q, k, v = jnp.split(self(x), (q_rows, q_rows + k_rows), axis=-1)
        return q, k, v

    def heads(self, flat: Float[Array, "tokens heads*dim"]) -> Float[Array, "tokens heads dim"]:
        """Cuts rows into heads."""
        return flat.reshape(flat.shape[0], -1, self.head_dim)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens columns"]:
        return self.proj(x)


class Embedding(nnx.Module):
    """A table of token vectors."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.weight = normal_weight((vocab_size, hidden_size), dtype, rngs)  # [vocab, hidden]

    def __call__(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        return self.weight[...].at[token_ids].get(mode="clip")


def vocabulary_scores(
    hidden: Float[Array, "rows hidden"], weight: Float[Array, "vocab hidden"]
) -> Float[Array, "rows vocab"]:
    """Logits in float32, accumulated in float32, from an output head or a tied embedding."""
    return jnp.einsum("nh,vh->nv", hidden, weight, preferred_element_type=jnp.float32)
