"""Rotary position embedding in the half ("neox") pairing: of the channels that turn, i turns with i + dim/2.

Frequencies are computed once in NumPy float32, angles inside the step from the positions, in float32.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig, positive_number
from tokenspeed_jax.pallas_kernels.rotation import Rotation


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        del theta
        return frequencies / np.float32(self.factor)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between blended.

    Attributes:
        original_context: context length in tokens of the pre-training.
        low_frequency_factor: wavelengths above original_context / this are slowed entirely.
        high_frequency_factor: wavelengths below original_context / this are kept.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        del theta
        turns = self.original_context * frequencies / np.float32(2 * math.pi)
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = np.clip(kept, 0.0, 1.0).astype(np.float32)
        return (1 - kept) * frequencies / np.float32(self.factor) + kept * frequencies


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, section 3.2): channels are slowed by how many turns they make in the original context.

    Attributes:
        attention_factor: multiplies cos and sin, and so scales scores by its square.
        original_context: context length in tokens of the pre-training.
        fast_turns: channels that turn more often than this are kept (`beta_fast`).
        slow_turns: channels that turn less often than this are slowed entirely (`beta_slow`).
        whole_channels: round the two bounds of the blend outwards to whole channels (`truncate`).
    """

    factor: float
    attention_factor: float
    original_context: int
    fast_turns: float
    slow_turns: float
    whole_channels: bool

    def scale(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        dim = 2 * len(frequencies)

        def channel(turns: float) -> float:
            return dim * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(self.fast_turns), channel(self.slow_turns)
        if self.whole_channels:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 0.001  # a step, without dividing by zero
        slowed = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / width, 0, 1)
        return slowed * frequencies / np.float32(self.factor) + (1 - slowed) * frequencies


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind of layer.

    Attributes:
        theta: base of the geometric series of frequencies.
        dim: leading channels of a head that turn; those behind them pass through.
    """

    theta: float
    dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def frequencies(self) -> np.ndarray:
        """Radians per token, float32 [dim / 2]."""
        exponents = np.arange(0, self.dim, 2, dtype=np.float32) / np.float32(self.dim)
        plain = (1.0 / np.power(np.float32(self.theta), exponents)).astype(np.float32)
        return plain if self.scaling is None else self.scaling.scale(plain, self.theta).astype(np.float32)

    def at(self, positions: Int[Array, " tokens"]) -> Rotation:
        """The rotation of each position."""
        angles = positions.astype(jnp.float32)[:, None] * self.frequencies()
        factor = self.scaling.attention_factor if isinstance(self.scaling, YarnScaling) else 1.0
        return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)

    @classmethod
    def from_hf(
        cls,
        config: HfConfig,
        head_dim: int,
        *,
        default_theta: float = 10_000.0,
        kind: str | None = None,
        theta_field: str = "rope_theta",
        scaled: bool = True,
        partial_rotary_factor: float | None = None,
    ) -> Self:
        """Reads `rope_parameters` (new configs), or `rope_theta` and `rope_scaling` (older ones).

        Args:
            kind: key within a `rope_parameters` that has one entry per layer type.
            theta_field: the older config's name for the base of this kind of layer.
            scaled: whether the older config's `rope_scaling` applies to this kind of layer.
            partial_rotary_factor: which part of a head's channels turns where the config does not say; None for a
                family whose heads turn as a whole, which refuses a config that says otherwise.
        """
        if head_dim % 2:
            raise UnsupportedConfig(f"config.json: head_dim = {head_dim} is odd, so its channels cannot be paired")
        parameters = config.fields.get("rope_parameters")
        if parameters is None:
            parameters = (config.fields.get("rope_scaling") if scaled else None) or {}
            theta = config.number(theta_field, default_theta)
            path = "rope_scaling"
        else:
            path = "rope_parameters"
            if kind is not None and kind in parameters:
                path, parameters = f"rope_parameters.{kind}", parameters[kind]
            theta = positive_number(parameters.get("rope_theta", default_theta), f"{path}.rope_theta")
        dim = _turning_channels(parameters, config, head_dim, partial_rotary_factor)
        return cls(theta, dim, _scaling(parameters, path, config))


def _turning_channels(parameters: Mapping[str, Any], config: HfConfig, head_dim: int, default: float | None) -> int:
    """How many of `head_dim` channels turn; see `Rope.from_hf`."""
    field = "partial_rotary_factor"
    stated = parameters.get(field)
    stated = config.fields.get(field) if stated is None else stated
    if default is None:
        if stated not in (None, 1.0):
            raise UnsupportedConfig(f"config.json: {field} = {stated!r} is not supported (served: 1.0)")
        return head_dim
    factor = positive_number(default if stated is None else stated, field)
    dim = int(head_dim * factor)
    if dim % 2 or not 0 < dim <= head_dim:
        raise UnsupportedConfig(
            f"config.json: {field} = {factor} turns {dim} of {head_dim} channels, not a positive even number of them"
        )
    return dim


def _scaling(
    parameters: Mapping[str, Any], path: str, config: HfConfig
) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    """The scaling that a `rope_scaling` or `rope_parameters` dictionary describes."""

    def number(field: str, default: float | None = None) -> float:
        value = parameters.get(field)
        return positive_number(default if value is None else value, f"{path}.{field}")

    kind = parameters.get("rope_type", parameters.get("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(number("factor"))
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if low >= high:
                raise UnsupportedConfig(
                    f"config.json: {path}.low_freq_factor {low} is not below high_freq_factor {high}"
                )
            return Llama3Scaling(number("factor"), low, high, int(number("original_max_position_embeddings")))
        case "yarn":
            return _yarn(parameters, number, int(config.integer("max_position_embeddings")))
    raise UnsupportedConfig(
        f"config.json: {path}.rope_type = {kind!r} is not supported (served: default, linear, llama3, yarn)"
    )


def _yarn(parameters: Mapping[str, Any], number: Any, max_position_embeddings: int) -> YarnScaling:
    original = int(number("original_max_position_embeddings", max_position_embeddings))
    factor = number("factor", max_position_embeddings / original)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if parameters.get("attention_factor") is not None:
        attention_factor = number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        attention_factor = magnitude(number("mscale")) / magnitude(number("mscale_all_dim"))
    else:
        attention_factor = magnitude(1.0)
    return YarnScaling(
        factor=factor,
        attention_factor=attention_factor,
        original_context=original,
        fast_turns=number("beta_fast", 32.0),
        slow_turns=number("beta_slow", 1.0),
        whole_channels=bool(parameters.get("truncate", True)),
    )
