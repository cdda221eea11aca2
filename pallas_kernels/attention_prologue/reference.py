"""The attention prologue as its definition reads: cut into heads, norm, rotate, store."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.norm_rules import Norm
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.rotation import Rotation


class AttentionPrologue(NamedTuple):
    """What becomes of a token's projections before attention: queries and keys are normed head by head, then rotated.

    Attributes:
        rotation: None leaves heads as they are.
        q_norm, k_norm: norms over one head's channels; None for none.
    """

    rotation: Rotation | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def heads(
        self, projected: Float[Array, "tokens columns"], num_heads: int, num_kv_heads: int, head_dim: int
    ) -> tuple[
        Float[Array, "tokens heads dim"], Float[Array, "tokens kv_heads dim"], Float[Array, "tokens kv_heads dim"]
    ]:
        """Queries, keys and values, in plain JAX; columns as in `attention_prologue`."""
        ends = (num_heads * head_dim, (num_heads + num_kv_heads) * head_dim, (num_heads + 2 * num_kv_heads) * head_dim)
        parts = jnp.split(projected[:, : ends[2]], ends[:2], axis=-1)
        q, k, v = (part.reshape(part.shape[0], -1, head_dim) for part in parts)
        return self._prepared(q, self.q_norm), self._prepared(k, self.k_norm), v

    def _prepared(self, x: Float[Array, "tokens heads dim"], norm: Norm | None) -> Float[Array, "tokens heads dim"]:
        x = x if norm is None else norm(x)
        return x if self.rotation is None else self.rotation(x)


def attention_prologue_reference(
    projected: Float[Array, "tokens columns"],
    k: PageView,
    v: PageView,
    slots: Int[Array, " tokens"],
    prologue: AttentionPrologue,
    num_heads: int,
    shared_plane: bool,
) -> tuple[Float[Array, "tokens heads dim"], PageView, PageView]:
    """See `attention_prologue`."""
    _, num_kv_heads, head_dim = k.page_shape
    q, keys, values = prologue.heads(projected, num_heads, num_kv_heads, head_dim)
    k = k.write(slots, keys)
    v = dataclasses.replace(v, plane=k.plane) if shared_plane else v
    v = v.write(slots, values)
    return q, dataclasses.replace(k, plane=v.plane) if shared_plane else k, v
