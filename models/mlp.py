"""The gated feed-forward block of dense models."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep
from tokenspeed_jax.models.linear import Linear
from tokenspeed_jax.pallas_kernels.linear import GateActivation, linear


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product, gate's rows first."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: GateActivation,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.activation: GateActivation = activation
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, dtype=dtype, rngs=rngs)
        self.down = Linear(intermediate_size, hidden_size, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], step: AttentionStep | None = None
    ) -> Float[Array, "tokens hidden"]:
        """The step is for blocks with experts, in whose place this one may stand."""
        del step
        return self.down(linear(x, self.gate_up.weight[...], gate=self.activation))
