"""What a layer's attention computes, and how a model calls it.

A model declares one `AttentionSpec` per layer and calls `attend(q, k, v, layer, step)`. It names no cache group:
serving passes a step that writes and reads paged caches, scoring and training pass a `PlainStep` without any.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

_QUERY_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The mask and geometry of one layer's attention.

    Attributes:
        layer_id: position of the layer in the model, from 0.
        scale: factor on q.k before the mask.
        sliding_window: tokens a query sees, itself included; None sees all before it.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); None leaves them.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ValueError(f"sliding_window must be positive, got {self.sliding_window}")


class AttentionStep(Protocol):
    """One forward pass's view of what came before its tokens."""

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
    ) -> Float[Array, "tokens heads dim"]:
        """Attends each token to its own sequence up to itself; keys and values are those of the step's tokens."""
        ...


def attend(
    q: Float[Array, "tokens heads dim"],
    k: Float[Array, "tokens kv_heads dim"],
    v: Float[Array, "tokens kv_heads dim"],
    layer: AttentionSpec,
    step: AttentionStep,
) -> Float[Array, "tokens heads dim"]:
    """Attention of one layer: causal within each sequence, masked as `layer` says, softmax in float32."""
    return step.attend(q, k, v, layer)


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """Attention without a cache, over sequences packed one after another.

    Attributes:
        segment_ids: which sequence each token belongs to; tokens of different ids never see each other.
        positions: position of each token within its sequence.
    """

    segment_ids: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
    ) -> Float[Array, "tokens heads dim"]:
        """Dense attention, a block of queries at a time so that scores never exceed tokens x `_QUERY_BLOCK`."""
        tokens = q.shape[0]
        blocks = -(-tokens // _QUERY_BLOCK)
        if blocks == 1:
            return self._attend_block(q, self.segment_ids, self.positions, k, v, layer)
        padding = blocks * _QUERY_BLOCK - tokens
        padded = [jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (q, self.segment_ids, self.positions)]
        cut = [x.reshape(blocks, _QUERY_BLOCK, *x.shape[1:]) for x in padded]
        out = lax.map(lambda block: self._attend_block(block[0], block[1], block[2], k, v, layer), tuple(cut))
        return out.reshape(-1, *q.shape[1:])[:tokens]

    def _attend_block(
        self,
        q: Float[Array, "queries heads dim"],
        segment_ids: Int[Array, " queries"],
        positions: Int[Array, " queries"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
    ) -> Float[Array, "queries heads dim"]:
        groups = layer.num_heads // layer.num_kv_heads
        grouped = q.reshape(q.shape[0], layer.num_kv_heads, groups, layer.head_dim)
        scores = jnp.einsum("qhgd,khd->hgqk", grouped, k, preferred_element_type=jnp.float32) * layer.scale
        if layer.soft_cap is not None:
            scores = layer.soft_cap * jnp.tanh(scores / layer.soft_cap)
        distance = positions[:, None] - self.positions[None, :]
        visible = (segment_ids[:, None] == self.segment_ids[None, :]) & (distance >= 0)
        if layer.sliding_window is not None:
            visible &= distance < layer.sliding_window
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
        out = jnp.einsum("hgqk,khd->qhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)
