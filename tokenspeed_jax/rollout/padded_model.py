"""A model of `models/` as trainers call one that takes rows of padded tokens: Tunix's trainers do."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from tokenspeed_jax.models.plain_step import PlainStep

_BEFORE, _WITHIN, _BEHIND = range(3)
"""Segments of a row: padding, tokens, padding."""


class PaddedModel(nnx.Module):
    """Makes logits for rows of tokens with padding in front and behind, without a cache.

    Its parameters are those of the model inside, under `model`. Rows are computed one after another: not every kernel
    of every family can be batched.

    Attributes:
        config: the model's own.
    """

    def __init__(self, model: Any) -> None:
        """`model` is a `CausalLM` of `models/`."""
        self.model = model
        self.config = model.config

    def __call__(
        self,
        input_tokens: Int[Array, "rows tokens"],
        positions: Int[Array, "rows tokens"],
        cache: None,
        attention_mask: Bool[Array, "rows tokens tokens"] | None,
        segment_ids: Int[Array, "rows tokens"],
    ) -> tuple[Float[Array, "rows tokens vocab"], None]:
        """What Tunix's trainers call.

        Args:
            positions: of each token in its sequence; looked at where rows are packed.
            cache: none; who samples with a cache uses the engine.
            attention_mask: causal, and nothing but padding is masked in it; None says that rows are packed.
            segment_ids: 0 for padding and 1 for the rest, or in packed rows the sequence that a token belongs to.

        Raises:
            ValueError: there is a cache, or rows of a model with recurrent layers are packed.
        """
        if cache is not None:
            raise ValueError("PaddedModel has no cache: sample with an Engine")

        def of_packed(row: tuple[Array, Array, Array]) -> Array:
            tokens, places, segments = row
            return self._logits(tokens, places, PlainStep(segments, places))

        def of_padded(row: tuple[Array, Array, Array]) -> Array:
            tokens, _, is_token = row
            step = padded_step(is_token != 0)
            return self._logits(tokens, step.positions, step)

        each = of_packed if attention_mask is None else of_padded
        return lax.map(each, (input_tokens, positions, segment_ids)), None

    def _logits(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], step: PlainStep
    ) -> Float[Array, "tokens vocab"]:
        return self.model.logits(self.model(tokens, positions, step))


def padded_step(is_token: Bool[Array, " tokens"]) -> PlainStep:
    """The step of one row whose tokens stand between padding. What looks like padding between two tokens is none: the
    sampler saw it as a token too."""
    length = is_token.shape[0]
    places = jnp.arange(length, dtype=jnp.int32)
    first = jnp.argmax(is_token).astype(jnp.int32)
    end = length - jnp.argmax(is_token[::-1]).astype(jnp.int32)
    segments = jnp.where(places < first, _BEFORE, jnp.where(places < end, _WITHIN, _BEHIND)).astype(jnp.int32)
    starts = jnp.stack([jnp.zeros_like(first), first, end])
    return PlainStep(segments, places - starts[segments], num_segments=3)


def with_own_variables(model: PaddedModel, parameters: nnx.State) -> PaddedModel:
    """A model like `model` with other parameters, whose arrays are new objects over the same memory.

    Tunix takes two models for one where their arrays are the same objects, and would not tell the second of updates.
    """
    graph, _ = nnx.split(model.model)
    return PaddedModel(nnx.merge(graph, jax.tree.map(_alias, parameters)))


def _alias(array: jax.Array) -> jax.Array:
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)
