"""`Rotation`: what a rotary embedding does to the heads of a step's tokens."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Rotation(NamedTuple):
    """Cosine and sine of every (token, pair of channels), float32: of the channels that turn, i turns with i + half."""

    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]

    def __call__(self, x: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens heads dim"]:
        """Turns each head's leading pairs of channels; computed in float32, returned in x's dtype."""
        half = self.cos.shape[-1]
        turning, rest = x[..., : 2 * half], x[..., 2 * half :]
        first, second = jnp.split(turning.astype(jnp.float32), 2, axis=-1)
        cos, sin = self.cos[:, None, :], self.sin[:, None, :]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
        return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
