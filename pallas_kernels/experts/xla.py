"""Portable: tokens sorted by expert into tiles (`tiles.py`), one tile after another through its expert's weights.

Memory is for the tiles' rows, never for tokens x experts. Dead tiles are skipped. A choice's result depends on its own
token and expert alone, and a token's choices are summed in their own order, so the tokens beside it do not matter.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.experts.activations import GatedActivation
from tokenspeed_jax.pallas_kernels.experts.tiles import ExpertTiles, tile_rows_for
from tokenspeed_jax.pallas_kernels.experts.weights import ExpertWeights


def expert_mlp_xla(
    x: Float[Array, "tokens hidden"],
    weights: ExpertWeights,
    expert_ids: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
    activation: GatedActivation,
) -> Float[Array, "tokens hidden"]:
    """See `expert_mlp`."""
    num_experts = weights.gate_up.shape[0]
    rows = tile_rows_for(expert_ids.size, num_experts)
    tiles = ExpertTiles.of(expert_ids, num_experts, rows)

    def tile(_: None, number: Int[Array, ""]) -> tuple[None, Float[Array, "rows hidden"]]:
        def through_expert() -> Float[Array, "rows hidden"]:
            tokens = lax.dynamic_slice_in_dim(tiles.token_of_slot, number * rows, rows)
            return _one_expert(x[tokens], weights, tiles.expert_of_tile[number], activation)

        dead = jnp.zeros((rows, x.shape[1]), jnp.float32)
        return None, lax.cond(number < tiles.num_live, through_expert, lambda: dead)

    _, y = lax.scan(tile, None, jnp.arange(tiles.expert_of_tile.size))
    return combine(y.reshape(-1, x.shape[1]), tiles.slot_of_choice, expert_weights).astype(x.dtype)


def _one_expert(
    x: Float[Array, "rows hidden"], weights: ExpertWeights, expert: Int[Array, ""], activation: GatedActivation
) -> Float[Array, "rows hidden"]:
    """Float32 results of one expert."""
    gate_up = jnp.einsum("rh,ih->ri", x, weights.gate_up[expert], preferred_element_type=jnp.float32)
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[expert].astype(jnp.float32)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    inner = activation(gate, up).astype(x.dtype)
    y = jnp.einsum("ri,hi->rh", inner, weights.down[expert], preferred_element_type=jnp.float32)
    return y if weights.down_bias is None else y + weights.down_bias[expert].astype(jnp.float32)


def combine(
    y: Float[Array, "slots hidden"],
    slot_of_choice: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
) -> Float[Array, "tokens hidden"]:
    """The weighted sum of each token's choices in float32, in the order of the choices."""
    total = jnp.zeros((slot_of_choice.shape[0], y.shape[1]), jnp.float32)
    for choice in range(slot_of_choice.shape[1]):
        total = total + expert_weights[:, choice, None] * y[slot_of_choice[:, choice]].astype(jnp.float32)
    return total
