"""Mamba 2: linear attention with a decay per head and token (arXiv 2405.21060). Hugging Face `Mamba2ForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep, RecurrentSpec, convolve, recur
from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.norms import normalized
from tokenspeed_jax.models.state_space import (
    StateSpaceConfig,
    StateSpaceDecoder,
    state_space_fields,
    state_space_rules,
)
from tokenspeed_jax.models.weight_map import WeightRule, same
from tokenspeed_jax.pallas_kernels.linear_attention import LinearAttentionInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config(StateSpaceConfig):
    """Heads of `inner_size / num_heads` channels that share the keys and queries of their group.

    Attributes:
        num_groups: groups of heads, each with its own B and C.
        step_limits: bounds of a token's step size.
    """

    num_heads: int
    num_groups: int
    step_limits: tuple[float, float]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.inner_size // self.num_heads

    @property
    def convolution_channels(self) -> int:
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        return (self.num_heads, self.head_dim, self.state_size)

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        fields = state_space_fields(config)
        heads, head_dim = config.integer("num_heads", 128), config.integer("head_dim", 64)
        inner = int(config.number("expand", 2) * fields["hidden_size"])
        if heads * head_dim != inner:
            raise UnsupportedConfig(
                f"config.json: num_heads {heads} x head_dim {head_dim} is not expand x hidden_size = {inner}"
            )
        groups = config.integer("n_groups", 8)
        if heads % groups:
            raise UnsupportedConfig(f"config.json: num_heads {heads} is not a multiple of n_groups {groups}")
        limits = _step_limits(hf.get("time_step_limit"))
        return cls(**fields, inner_size=inner, num_heads=heads, num_groups=groups, step_limits=limits)


def _step_limits(limits: Any) -> tuple[float, float]:
    """Two numbers; infinity may be spelled as JSON writers do that refuse it."""
    if limits is None:
        return 0.0, float("inf")
    try:
        lowest, highest = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in limits)
    except (KeyError, TypeError, ValueError):
        lowest, highest = 1.0, 0.0
    if not 0 <= lowest <= highest:
        raise UnsupportedConfig(f"config.json: time_step_limit must be two numbers from 0 that rise, got {limits!r}")
    return lowest, highest


class Mamba2Mixer(nnx.Module):
    """out(norm((SSD(x, B, C, dt) + D x) * silu(z)))."""

    def __init__(self, config: Mamba2Config, spec: RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.spec = spec
        channels, inner, heads = config.convolution_channels, config.inner_size, config.num_heads
        bias = config.projection_bias
        self.proj = Linear(config.hidden_size, inner + channels + heads, bias=bias, dtype=dtype, rngs=rngs)
        self.filters = normal_weight((channels, config.convolution_width), dtype, rngs)
        self.filter_bias = nnx.Param(jnp.zeros((channels,), dtype)) if config.convolution_bias else None
        self.log_rate = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.step_bias = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.skip = nnx.Param(jnp.ones((heads,), dtype))
        self.norm_weight = nnx.Param(jnp.ones((inner,), dtype))
        self.out = Linear(inner, config.hidden_size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens hidden"], step: AttentionStep) -> Float[Array, "tokens hidden"]:
        config = self.config
        inner, heads, keys = config.inner_size, config.num_heads, config.num_groups * config.state_size
        z, mixed, raw_step = jnp.split(self.proj(x), (inner, inner + config.convolution_channels), axis=-1)
        bias = None if self.filter_bias is None else self.filter_bias[...]
        mixed = jax.nn.silu(convolve(mixed, self.filters[...], self.spec, step, bias=bias))
        values, b, c = jnp.split(mixed, (inner, inner + keys), axis=-1)
        values = values.reshape(-1, heads, config.head_dim)
        b, c = (side.reshape(-1, config.num_groups, config.state_size) for side in (b, c))
        step_size = jax.nn.softplus(raw_step.astype(jnp.float32) + self.step_bias[...])
        step_size = jnp.clip(step_size, *config.step_limits)
        inputs = LinearAttentionInputs(
            q=c,
            k=b,
            v=(values.astype(jnp.float32) * step_size[:, :, None]),
            log_decay=-jnp.exp(self.log_rate[...]) * step_size,
        )
        y = recur(inputs, self.spec, step) + values.astype(jnp.float32) * self.skip[...].astype(jnp.float32)[:, None]
        y = y.reshape(-1, inner) * jax.nn.silu(z.astype(jnp.float32))
        return self.out(self.norm_weight[...] * self._normalized(y).astype(x.dtype))

    def _normalized(self, y: Float[Array, "tokens inner"]) -> Float[Array, "tokens inner"]:
        """y over its root mean square, one per group of heads."""
        grouped = y.reshape(y.shape[0], self.config.num_groups, -1)
        return normalized(grouped, self.config.rms_norm_eps).reshape(y.shape)


class Mamba2(StateSpaceDecoder):
    """The whole model."""

    mixer_type = Mamba2Mixer

    @staticmethod
    def weight_map(config: Mamba2Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = list(state_space_rules(config))
        for index in range(config.num_layers):
            here, there = ("mixers", index), f"backbone.layers.{index}.mixer"
            rules.append(same((*here, "step_bias"), f"{there}.dt_bias"))
            rules.append(same((*here, "norm_weight"), f"{there}.norm.weight"))
        return tuple(rules)
