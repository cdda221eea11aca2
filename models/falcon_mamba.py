"""Falcon Mamba: Mamba 1 with norms on what selects (arXiv 2410.05355). Hugging Face `FalconMambaForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep, RecurrentSpec, convolve, recur
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Linear, normal_weight
from tokenspeed_jax.models.norms import normalized
from tokenspeed_jax.models.state_space import (
    StateSpaceConfig,
    StateSpaceDecoder,
    state_space_fields,
    state_space_rules,
)
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, same
from tokenspeed_jax.pallas_kernels.selective_scan import SelectiveScanInputs


@dataclasses.dataclass(frozen=True, kw_only=True)
class FalconMambaConfig(StateSpaceConfig):
    """Every channel has a state of its own.

    Attributes:
        step_rank: rank of the projection that makes each token's step sizes.
        selection_eps: epsilon of the unweighted norms of step sizes, B and C.
    """

    step_rank: int
    selection_eps: float

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        fields = state_space_fields(config)
        hidden = fields["hidden_size"]
        rank = hf.get("time_step_rank", "auto")
        return cls(
            **fields,
            inner_size=config.integer("intermediate_size", int(config.number("expand", 2) * hidden)),
            step_rank=-(-hidden // 16) if rank == "auto" else config.integer("time_step_rank"),
            selection_eps=config.number("mixer_rms_eps", 1e-6),
        )


class FalconMambaMixer(nnx.Module):
    """out((scan(x, dt, B, C) + D x) * silu(z)), with dt, B and C projected from x."""

    def __init__(self, config: FalconMambaConfig, spec: RecurrentSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.spec = spec
        inner, states, rank = config.inner_size, config.state_size, config.step_rank
        bias = config.projection_bias
        self.proj = Linear(config.hidden_size, 2 * inner, bias=bias, dtype=dtype, rngs=rngs)  # rows of x, z
        self.filters = normal_weight((inner, config.convolution_width), dtype, rngs)
        self.filter_bias = nnx.Param(jnp.zeros((inner,), dtype)) if config.convolution_bias else None
        self.selection = Linear(inner, rank + 2 * states, dtype=dtype, rngs=rngs)  # rows of dt, B, C
        self.step_proj = Linear(rank, inner, bias=True, dtype=dtype, rngs=rngs)
        self.log_rate = nnx.Param(jnp.zeros((inner, states), jnp.float32))
        self.skip = nnx.Param(jnp.ones((inner,), dtype))
        self.out = Linear(inner, config.hidden_size, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "tokens hidden"], step: AttentionStep) -> Float[Array, "tokens hidden"]:
        config = self.config
        rank, states = config.step_rank, config.state_size
        mixed, z = jnp.split(self.proj(x), 2, axis=-1)
        bias = None if self.filter_bias is None else self.filter_bias[...]
        mixed = jax.nn.silu(convolve(mixed, self.filters[...], self.spec, step, bias=bias))
        selected = jnp.split(self.selection(mixed), (rank, rank + states), axis=-1)
        raw_step, b, c = (normalized(part, config.selection_eps).astype(x.dtype) for part in selected)
        inputs = SelectiveScanInputs(
            x=mixed.astype(jnp.float32),
            step_size=jax.nn.softplus(self.step_proj(raw_step).astype(jnp.float32)),
            b=b.astype(jnp.float32),
            c=c.astype(jnp.float32),
            rate=-jnp.exp(self.log_rate[...]),
        )
        y = recur(inputs, self.spec, step) + inputs.x * self.skip[...].astype(jnp.float32)
        return self.out((y * jax.nn.silu(z.astype(jnp.float32))).astype(x.dtype))


class FalconMamba(StateSpaceDecoder):
    """The whole model."""

    mixer_type = FalconMambaMixer

    @staticmethod
    def weight_map(config: FalconMambaConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = list(state_space_rules(config))
        for index in range(config.num_layers):
            here, there = ("mixers", index), f"backbone.layers.{index}.mixer"
            rules.append(same((*here, "selection", "weight"), f"{there}.x_proj.weight"))
            rules += linear_rules((*here, "step_proj"), f"{there}.dt_proj", bias=True)
        return tuple(rules)
