"""The definition: every token through every expert, and the chosen ones' results weighted and summed."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.experts.activations import GatedActivation
from tokenspeed_jax.pallas_kernels.experts.weights import ExpertWeights


def expert_mlp_reference(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
    activation: GatedActivation,
) -> Float[Array, "tokens hidden"]:
    """See `expert_mlp`; time and memory for all experts."""
    gate_up = jnp.einsum("th,eih->tei", x, weights.gate_up, preferred_element_type=jnp.float32)
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias.astype(jnp.float32)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = activation(gate, up).astype(x.dtype)
    y = jnp.einsum("tei,ehi->teh", inner, weights.down, preferred_element_type=jnp.float32)
    if weights.down_bias is not None:
        y = y + weights.down_bias.astype(jnp.float32)
    chosen = jnp.take_along_axis(y, expert_ids[:, :, None], axis=1)
    return jnp.sum(chosen * expert_weights[:, :, None], axis=1).astype(x.dtype)
