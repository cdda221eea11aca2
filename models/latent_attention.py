"""Multi-head latent attention (arXiv 2405.04434, section 2.1): DeepSeek-V3 with rotary channels, Kimi Linear without.

A token's keys and values are compressed to one latent row that all heads share; the step expands it, or absorbs the
expansion into queries and outputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep, LatentAttentionSpec, LatentExpansion, attend_latent
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.norms import RMSNorm
from tokenspeed_jax.models.weight_map import WeightRule, fused_rules, linear_rules, same

_NORM_EPSILON = 1e-6  # of the norms on the latents, whatever the config says of the others

HeadRotation = Callable[[Float[Array, "tokens heads rope_dim"]], Float[Array, "tokens heads rope_dim"]]


def latent_dimensions(config: HfConfig) -> dict[str, Any]:
    """The fields of `LatentAttentionSpec` that a `config.json` gives: all but the layer's id and its scale."""
    return {
        "num_heads": config.integer("num_attention_heads"),
        "latent_dim": config.integer("kv_lora_rank", 512),
        "rope_dim": config.integer("qk_rope_head_dim", 64),
        "nope_dim": config.integer("qk_nope_head_dim", 128),
        "value_dim": config.integer("v_head_dim", 128),
    }


class LatentAttention(nnx.Module):
    """Queries from the token or its own low-rank latent, keys and values from the row that the cache keeps."""

    def __init__(
        self, hidden_size: int, spec: LatentAttentionSpec, q_lora_rank: int | None, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        """Args: q_lora_rank: channels of the queries' latent; None projects queries directly."""
        self.spec = spec
        heads, latent = spec.num_heads, spec.latent_dim
        query_rows = heads * (spec.nope_dim + spec.rope_dim)
        self.first_rows = query_rows if q_lora_rank is None else q_lora_rank
        self.down = Linear(hidden_size, self.first_rows + latent + spec.rope_dim, dtype=dtype, rngs=rngs)
        self.q_norm = None if q_lora_rank is None else RMSNorm(q_lora_rank, _NORM_EPSILON, dtype=dtype)
        self.q_up = None if q_lora_rank is None else Linear(q_lora_rank, query_rows, dtype=dtype, rngs=rngs)
        self.latent_norm = RMSNorm(latent, _NORM_EPSILON, dtype=dtype)
        self.key = normal_weight((heads, spec.nope_dim, latent), dtype, rngs)
        self.value = normal_weight((heads, spec.value_dim, latent), dtype, rngs)
        self.out = Linear(heads * spec.value_dim, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: HeadRotation | None, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        """Args: rotate: turns the positional channels; None leaves them as they are projected."""
        tokens, spec = x.shape[0], self.spec
        q, latent, shared = jnp.split(self.down(x), (self.first_rows, self.first_rows + spec.latent_dim), axis=-1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        q = q.reshape(tokens, spec.num_heads, -1)
        if rotate is not None:
            q_nope, q_rope = jnp.split(q, (spec.nope_dim,), axis=-1)
            q = jnp.concatenate([q_nope, rotate(q_rope)], axis=-1)
            shared = rotate(shared[:, None])[:, 0]
        rows = jnp.concatenate([self.latent_norm(latent), shared], axis=-1)
        expansion = LatentExpansion(self.key[...], self.value[...])
        mixed = attend_latent(q, rows, expansion, spec, step)
        return self.out(mixed.reshape(tokens, -1))


def latent_rules(
    here: tuple[str | int, ...], there: str, spec: LatentAttentionSpec, q_lora_rank: int | None
) -> Iterator[WeightRule]:
    """Where a `LatentAttention` at the path `here` finds its tensors below the name `there`."""
    query_rows = spec.num_heads * (spec.nope_dim + spec.rope_dim)
    first, rows = ("q_proj", query_rows) if q_lora_rank is None else ("q_a_proj", q_lora_rank)
    down = (f"{there}.{first}", f"{there}.kv_a_proj_with_mqa")
    yield from fused_rules((*here, "down"), down, (rows, spec.latent_dim + spec.rope_dim))
    if q_lora_rank is not None:
        yield same((*here, "q_norm", "weight"), f"{there}.q_a_layernorm.weight")
        yield from linear_rules((*here, "q_up"), f"{there}.q_b_proj", bias=False)
    yield same((*here, "latent_norm", "weight"), f"{there}.kv_a_layernorm.weight")
    yield _expansion_rule((*here, "key"), f"{there}.kv_b_proj.weight", spec, slice(0, spec.nope_dim))
    yield _expansion_rule((*here, "value"), f"{there}.kv_b_proj.weight", spec, slice(spec.nope_dim, None))
    yield from linear_rules((*here, "out"), f"{there}.o_proj", bias=False)


def _expansion_rule(
    parameter: tuple[str | int, ...], tensor: str, spec: LatentAttentionSpec, channels: slice
) -> WeightRule:
    """Some channels of each head of `kv_b_proj`, whose rows are a head's key channels, then its value's."""
    per_head = spec.nope_dim + spec.value_dim
    shape = (spec.num_heads * per_head, spec.latent_dim)

    def cut(parts: Any) -> Array:
        return parts[0].reshape(spec.num_heads, per_head, spec.latent_dim)[:, channels]

    return WeightRule(parameter, (tensor,), join=cut, tensor_shapes=(shape,))
