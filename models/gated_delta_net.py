"""Gated DeltaNet: a recurrent layer that corrects what its state says of a key (arXiv 2412.06464)."""

import dataclasses
from collections.abc import Iterator
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from tokenspeed_jax.models.attention import AttentionStep, RecurrentSpec, convolve, recur
from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.norms import RMSNorm, unit_vectors
from tokenspeed_jax.models.rope import Rotation
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, reshaped, same
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaNetShape:
    """The sizes of a Gated DeltaNet layer; value head h shares the query and key of head h // (heads / key heads).

    Attributes:
        key_dim, value_dim: channels of one head.
        convolution_width: tokens that a filter spans, the current one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution_width: int

    @property
    def key_rows(self) -> int:
        """Channels of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def value_rows(self) -> int:
        """Channels of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def convolution(self) -> tuple[int, int]:
        """(channels, width): queries, keys and values pass through it."""
        return 2 * self.key_rows + self.value_rows, self.convolution_width

    def spec(self, layer_id: int) -> RecurrentSpec:
        """What the layer carries."""
        return RecurrentSpec(layer_id, self.convolution, (self.value_heads, self.value_dim, self.key_dim))

    @classmethod
    def from_hf(cls, config: HfConfig) -> Self:
        """Reads the `linear_*` fields; raises `UnsupportedConfig` where heads cannot be grouped."""
        shape = cls(
            key_heads=config.integer("linear_num_key_heads", 16),
            value_heads=config.integer("linear_num_value_heads", 32),
            key_dim=config.integer("linear_key_head_dim", 128),
            value_dim=config.integer("linear_value_head_dim", 128),
            convolution_width=config.integer("linear_conv_kernel_dim", 4),
        )
        if shape.value_heads % shape.key_heads:
            raise UnsupportedConfig(
                f"config.json: linear_num_value_heads {shape.value_heads} is not a multiple of linear_num_key_heads "
                f"{shape.key_heads}"
            )
        return shape


class GatedDeltaNet(nnx.Module):
    """out(norm(recurrence(silu(convolution(q, k, v)))) * silu(z)), with everything projected from the hidden state."""

    def __init__(
        self,
        hidden_size: int,
        shape: DeltaNetShape,
        spec: RecurrentSpec,
        epsilon: float,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.shape = shape
        self.spec = spec
        rows = shape.convolution[0] + shape.value_rows + 2 * shape.value_heads
        self.proj = Linear(hidden_size, rows, dtype=dtype, rngs=rngs)  # rows of q, k, v, z, b, a
        self.filters = normal_weight(shape.convolution, dtype, rngs)
        self.log_rate = nnx.Param(jnp.zeros((shape.value_heads,), jnp.float32))
        self.decay_bias = nnx.Param(jnp.zeros((shape.value_heads,), jnp.float32))
        self.norm = RMSNorm(shape.value_dim, epsilon, dtype=dtype)
        self.out = Linear(shape.value_rows, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], rotate: Rotation, step: AttentionStep
    ) -> Float[Array, "tokens hidden"]:
        del rotate  # the recurrence knows the order of its tokens
        shape, tokens = self.shape, x.shape[0]
        z_start = shape.convolution[0]
        b_start = z_start + shape.value_rows
        qkv, z, b, a = jnp.split(self.proj(x), (z_start, b_start, b_start + shape.value_heads), axis=-1)
        qkv = jax.nn.silu(convolve(qkv, self.filters[...], self.spec, step))
        q, k, v = jnp.split(qkv, (shape.key_rows, 2 * shape.key_rows), axis=-1)
        q, k = (unit_vectors(part.reshape(tokens, shape.key_heads, shape.key_dim)) for part in (q, k))
        inputs = DeltaRuleInputs(
            q=q * shape.key_dim**-0.5,
            k=k,
            v=v.reshape(tokens, shape.value_heads, shape.value_dim),
            log_decay=self.log_decay(a),
            beta=jax.nn.sigmoid(b.astype(jnp.float32)),
        )
        y = self.norm(recur(inputs, self.spec, step))
        y = y.astype(jnp.float32) * jax.nn.silu(z.reshape(y.shape).astype(jnp.float32))
        return self.out(y.astype(x.dtype).reshape(tokens, -1))

    def log_decay(self, a: Float[Array, "tokens heads"]) -> Float32[Array, "tokens heads"]:
        """Natural log of what each head's state is multiplied with, below 0."""
        return -jnp.exp(self.log_rate[...]) * jax.nn.softplus(a.astype(jnp.float32) + self.decay_bias[...])


def delta_net_rules(here: tuple[str | int, ...], there: str, shape: DeltaNetShape) -> Iterator[WeightRule]:
    """The rules of a `GatedDeltaNet` but that of `proj`, whose rows the families store differently."""
    channels, width = shape.convolution
    yield reshaped((*here, "filters"), f"{there}.conv1d.weight", (channels, 1, width), (channels, width))
    yield same((*here, "log_rate"), f"{there}.A_log")
    yield same((*here, "decay_bias"), f"{there}.dt_bias")
    yield same((*here, "norm", "weight"), f"{there}.norm.weight")
    yield from linear_rules((*here, "out"), f"{there}.out_proj", bias=False)
