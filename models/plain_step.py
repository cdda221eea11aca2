"""`PlainStep`: a forward pass without a cache, for scoring and training, and the tests' own reference."""

import dataclasses

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
    """

    segment_ids: Int[Array, " tokens"]
    positions: Int[Array, " tokens"]
    num_segments: int | None = None

    def attend(
        self,
        q: Float[Array, "tokens heads dim"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
    ) -> Float[Array, "tokens heads dim"]:
        """Dense attention, a block of queries at a time so that scores never exceed tokens x `_QUERY_BLOCK`."""
        tokens = q.shape[0]
        blocks = -(-tokens // _QUERY_BLOCK)
        if blocks == 1:
            return self._attend_block(q, self.segment_ids, self.positions, k, v, layer, sinks)
        padding = blocks * _QUERY_BLOCK - tokens
        padded = [jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for x in (q, self.segment_ids, self.positions)]
        cut = [x.reshape(blocks, _QUERY_BLOCK, *x.shape[1:]) for x in padded]
        out = lax.map(lambda block: self._attend_block(block[0], block[1], block[2], k, v, layer, sinks), tuple(cut))
        return out.reshape(-1, *q.shape[1:])[:tokens]

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

    def _attend_block(
        self,
        q: Float[Array, "queries heads dim"],
        segment_ids: Int[Array, " queries"],
        positions: Int[Array, " queries"],
        k: Float[Array, "tokens kv_heads dim"],
        v: Float[Array, "tokens kv_heads dim"],
        layer: AttentionSpec,
        sinks: Float[Array, " heads"] | None,
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
        scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        if sinks is not None:
            column = sinks.astype(jnp.float32).reshape(layer.num_kv_heads, groups, 1, 1)
            scores = jnp.concatenate([scores, jnp.broadcast_to(column, (*scores.shape[:-1], 1))], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[0]]
        out = jnp.einsum("hgqk,khd->qhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out.reshape(q.shape).astype(q.dtype)

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

    def _rows(self) -> RecurrentRows:
        if self.num_segments is None:
            raise ValueError("a model with recurrent layers needs PlainStep(..., num_segments=...)")
        return RecurrentRows.of_segments(self.segment_ids, self.num_segments)
