"""The weights of a layer's experts, as every implementation takes them."""

from typing import NamedTuple

from jaxtyping import Array, Float


class ExpertWeights(NamedTuple):
    """All experts of one layer.

    Attributes:
        gate_up: `[out, in]` of each expert; the gate's rows first, then the up projection's.
        down: `[out, in]` of each expert.
        gate_up_bias, down_bias: one per expert; None without.
    """

    gate_up: Float[Array, "experts 2*inner hidden"]
    down: Float[Array, "experts hidden inner"]
    gate_up_bias: Float[Array, "experts 2*inner"] | None = None
    down_bias: Float[Array, "experts hidden"] | None = None
