"""Grouped-query attention whose heads can be closed: a sigmoid, projected beside the query, scales each output."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionPrologue, AttentionSpec, AttentionStep, attend_projected
from tokenspeed_jax.models.linear import Linear
from tokenspeed_jax.models.norms import GemmaRMSNorm
from tokenspeed_jax.models.rope import Rotation
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, reordered, same


class GatedAttention(nnx.Module):
    """out(attention * sigmoid(gate)); each query and key head is normed before it is rotated."""

    def __init__(
        self, hidden_size: int, spec: AttentionSpec, epsilon: float, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        self.proj = Linear(hidden_size, sum(_rows(spec)), dtype=dtype, rngs=rngs)  # rows of q, k, v, gate
        self.q_norm = GemmaRMSNorm(spec.head_dim, epsilon, dtype=dtype)
        self.k_norm = GemmaRMSNorm(spec.head_dim, epsilon, dtype=dtype)
        self.out = Linear(spec.num_heads * spec.head_dim, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        projected = self.proj(x)
        prologue = AttentionPrologue(rotate, self.q_norm.norm, self.k_norm.norm)
        mixed = attend_projected(projected, prologue, self.spec, step)
        gate = jax.nn.sigmoid(projected[:, sum(_rows(self.spec)[:3]) :].astype(jnp.float32))
        return self.out((mixed.reshape(x.shape[0], -1) * gate).astype(x.dtype))


def _rows(spec: AttentionSpec) -> tuple[int, int, int, int]:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return q, kv, kv, q


def gated_attention_rules(
    here: tuple[str | int, ...], there: str, hidden_size: int, spec: AttentionSpec
) -> Iterator[WeightRule]:
    """The rules of a `GatedAttention` whose `q_proj` holds each head's query and then its gate."""
    q, k, v, gate = _rows(spec)
    # [query or gate, head, channel], of rows stored by head
    halves = np.arange(q + gate).reshape(spec.num_heads, 2, spec.head_dim).swapaxes(0, 1)
    yield reordered(
        (*here, "proj", "weight"),
        tuple(f"{there}.{name}_proj.weight" for name in "qkv"),
        (q + gate, k, v),
        np.concatenate([halves[0].ravel(), np.arange(q + gate, q + gate + k + v), halves[1].ravel()]),
        (hidden_size,),
    )
    yield from linear_rules((*here, "out"), f"{there}.o_proj", bias=False)
    yield same((*here, "q_norm", "weight"), f"{there}.q_norm.weight")
    yield same((*here, "k_norm", "weight"), f"{there}.k_norm.weight")
