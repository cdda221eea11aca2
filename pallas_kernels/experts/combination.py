"""The weighted sum of each token's choices, for Hopper GPUs, written with Mosaic GPU.

    grid: one block (one warpgroup) for each token; a thread has every 128th vector of its columns

    slot, weight <- slot_of_choice, expert_weights
    y[slot of choice 0 .. top_k - 1] --> registers --> sum of weight * y, in the order of the choices --> out[token]
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

Ref = Any


def combine_mosaic(
    y: Float[Array, "slots hidden"],
    slot_of_choice: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
    *,
    interpret: Any = None,
) -> Float[Array, "tokens hidden"]:
    """sum_j expert_weights[t, j] * y[slot_of_choice[t, j]] in float32, rounded to y's dtype."""
    tokens, top_k = slot_of_choice.shape
    kernel = plgpu.kernel(
        functools.partial(_block, top_k=top_k),
        out_type=jax.ShapeDtypeStruct((tokens, y.shape[1]), y.dtype),
        grid=(tokens,),
        grid_names=("token",),
        interpret=interpret,
        kernel_name="experts_combine",
    )
    return kernel(y, slot_of_choice.reshape(-1), expert_weights.astype(jnp.float32).reshape(-1))


def _block(y_ref: Ref, slots_ref: Ref, weights_ref: Ref, out_ref: Ref, *, top_k: int) -> None:
    token = lax.axis_index("token")
    places = [token * top_k + i for i in range(top_k)]
    slots, weights = [slots_ref[i] for i in places], [weights_ref[i] for i in places]
    rows = [y_ref[slot] for slot in slots]
    total = weights[0] * rows[0].astype(jnp.float32)
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        total = total + weight * row.astype(jnp.float32)
    out_ref[token] = total.astype(out_ref.dtype)
