"""The gated feed-forward block of dense models."""

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.linear import Linear
from tokenspeed_jax.models.norms import Residual, RMSNorm
from tokenspeed_jax.pallas_kernels.decoder_tail import decoder_tail
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

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        return self.down(linear(x, self.gate_up.weight[...], gate=self.activation))

    def after_attention(
        self, x: Float[Array, "tokens hidden"], mixed: Float[Array, "tokens heads*dim"], out: Linear, norm: RMSNorm
    ) -> Residual:
        """A layer that normed x and attended, from there on: the output projection, and this block behind its norm.

        Args:
            x: the residual stream before the layer.
            out: the attention's, without a bias.
        """
        weights = (out.weight[...], norm.norm, self.gate_up.weight[...], self.down.weight[...])
        return Residual(*decoder_tail(x, mixed, *weights, activation=self.activation))
