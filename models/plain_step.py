"""`PlainStep`: a forward pass without a cache, for scoring and training, and the tests' own reference."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import (
    AttentionPrologue,
    AttentionSpec,
    LatentAttentionSpec,
    LatentExpansion,
    RecurrenceInputs,
    RecurrentSpec,
)
from tokenspeed_jax.pallas_kernels.causal_convolution import causal_convolution
from tokenspeed_jax.pallas_kernels.recurrences import RECURRENCES
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows

_QUERY_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """Attention and recurrences without a cache, over sequences packed one after another.

    Attributes:
        segment_ids: which sequence each token belongs to; tokens of different ids never see each other, and the
            tokens of one id stand together.
        positions: position of each token within its sequence.
        num_segments: how many runs of equal ids there are, or more; models with recurrent layers need it.
        row_length: the tokens are rows of this many, and no sequence goes on in the next row; None for one row. The
            cost of attention grows with tokens x row_length.
        expert_ids: by layer, the experts that tokens go to instead of the router's; a token whose first one is negative
            goes to the router's. None: all do.
    """

    segment_ids: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    num_segments: int | None = None
    row_length: int | None = None
    expert_ids: Mapping[int, Int[Array, "tokens top_k"]] | None = None

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """Dense attention, a block of queries at a time so that scores never exceed tokens x `_QUERY_BLOCK`."""
        length = q.shape[0] if self.row_length is None else self.row_length
        rows = [x.reshape(-1, length, *x.shape[1:]) for x in (q, k, v, self.segment_ids, self.positions)]
        queries, keys = _Queries(rows[0], *rows[3:]), _Keys(*rows[1:])
        blocks = -(-length // _QUERY_BLOCK)
        if blocks == 1:
            return _attend_block(queries, keys, layer, sinks).reshape(q.shape)
        # Blocks are also what the backward pass works in: it computes each one's scores again.
        one_block = jax.checkpoint(lambda block: _attend_block(block, keys, layer, sinks))
        out = lax.map(one_block, jax.tree.map(lambda x: _cut(x, blocks), queries))
        return jnp.moveaxis(out, 0, 1).reshape(-1, blocks * _QUERY_BLOCK, *q.shape[1:])[:, :length].reshape(q.shape)

    def attend_projected(
        self,
        projected: Float[Array, "tokens columns"],
        prologue: AttentionPrologue,
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """One thing after the other."""
        q, k, v = prologue.heads(projected, layer.num_heads, layer.num_kv_heads, layer.head_dim)
        return self.attend(q, k, v, layer, sinks)

    def attend_latent(
        self,
        q: Float[Array, "tokens heads query_dim"],
        rows: Float[Array, "tokens row_dim"],
        expansion: LatentExpansion,
        layer: LatentAttentionSpec,
    ) -> Float[Array, "tokens heads value_dim"]:
        """Expanded: every token's keys and values are made, and attention is the ordinary one."""
        latent, shared = jnp.split(rows, (layer.latent_dim,), axis=-1)
        keys = jnp.einsum("tl,hnl->thn", latent, expansion.key)
        shared = jnp.broadcast_to(shared[:, None, :], (*keys.shape[:2], layer.rope_dim))
        keys = jnp.concatenate([keys, shared], axis=-1)
        values = jnp.einsum("tl,hvl->thv", latent, expansion.value)
        dim = max(keys.shape[-1], layer.value_dim)
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, dim - x.shape[-1]))) for x in (q, keys, values)]
        heads = layer.num_heads
        spec = AttentionSpec(layer.layer_id, heads, heads, head_dim=dim, scale=layer.scale)
        return self.attend(padded[0], padded[1], padded[2], spec, None)[..., : layer.value_dim]

    def convolve(
        self,
        x: Float[Array, "tokens channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        layer: RecurrentSpec,
    ) -> Float[Array, "tokens channels"]:
        """From windows of zeros."""
        del layer
        rows = self._rows()
        windows = jnp.zeros((rows.num_rows, weight.shape[0], weight.shape[1] - 1), x.dtype)
        return causal_convolution(x, weight, bias, windows, rows).output

    def recur(self, inputs: RecurrenceInputs, layer: RecurrentSpec) -> Float[Array, "tokens ..."]:
        """From states of zeros."""
        rows = self._rows()
        assert layer.state_shape is not None
        initial = jnp.zeros((rows.num_rows, *layer.state_shape), jnp.float32)
        return RECURRENCES[type(inputs)].walk(inputs, initial, rows).output

    def routed(self, expert_ids: Int[Array, "tokens top_k"], layer_id: int) -> Int[Array, "tokens top_k"]:
        """The given ones, where there are any."""
        if self.expert_ids is None:
            return expert_ids
        given = self.expert_ids[layer_id]
        return jnp.where(given[:, :1] >= 0, given.astype(expert_ids.dtype), expert_ids)

    def _rows(self) -> RecurrentRows:
        if self.num_segments is None:
            raise ValueError("a model with recurrent layers needs PlainStep(..., num_segments=...)")
        return RecurrentRows.of_segments(self.segment_ids, self.num_segments)


class _Queries(NamedTuple):
    """Queries of some rows, and where they stand."""

    q: Float[Array, "rows queries heads dim"]
    segment_ids: Int[Array, "rows queries"]
    positions: Int[Array, "rows queries"]


class _Keys(NamedTuple):
    """Keys and values of the same rows, and where they stand."""

    k: Float[Array, "rows keys kv_heads dim"]
    v: Float[Array, "rows keys kv_heads dim"]
    segment_ids: Int[Array, "rows keys"]
    positions: Int[Array, "rows keys"]


def _cut(x: Array, blocks: int) -> Array:
    """[rows, length, ...] to [blocks, rows, _QUERY_BLOCK, ...], padded with zeros."""
    padding = blocks * _QUERY_BLOCK - x.shape[1]
    padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(padded.reshape(x.shape[0], blocks, _QUERY_BLOCK, *x.shape[2:]), 1, 0)


def _attend_block(
    queries: _Queries, keys: _Keys, layer: AttentionSpec, sinks: Float[Array, " heads"] | None
) -> Float[Array, "rows queries heads dim"]:
    """Attention of some queries of each row to all keys of their row that they may see."""
    q, (k, v) = queries.q, keys[:2]
    groups = layer.num_heads // layer.num_kv_heads
    grouped = q.reshape(*q.shape[:2], layer.num_kv_heads, groups, layer.head_dim)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", grouped, k, preferred_element_type=jnp.float32) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * jnp.tanh(scores / layer.soft_cap)
    distance = queries.positions[:, :, None] - keys.positions[:, None, :]
    visible = (queries.segment_ids[:, :, None] == keys.segment_ids[:, None, :]) & (distance >= 0)
    if layer.sliding_window is not None:
        visible &= distance < layer.sliding_window
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(layer.num_kv_heads, groups, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    # Weights are not rounded to v's dtype: the kernels that serve do not, and samples are compared with this.
    out = jnp.einsum("rhgqk,rkhd->rqhgd", weights, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)
