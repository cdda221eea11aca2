"""The weighted sum of each token's choices, for Hopper GPUs, written with Mosaic GPU.

    grid: one block (one warpgroup) for each token and part of its columns; a thread has 8 neighbouring columns of 1024

    slot, weight <- slot_of_choice, expert_weights
    y[slot of choice 0 .. top_k - 1] --> registers --> sum of weight * y, in the order of the choices --> out[token]

All rows of a block are on their way before the first is added.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

THREADS = 128
MAX_COLUMNS = 1024  # of a block

Ref = Any


def combination_refusal(hidden: int) -> str | None:
    """Why the kernel cannot sum rows of this size; None when it can."""
    if hidden % THREADS:
        return f"hidden size {hidden} is no multiple of {THREADS}"
    return None


def combine_mosaic(
    y: Float[Array, "slots hidden"],
    slot_of_choice: Int[Array, "tokens top_k"],
    expert_weights: Float[Array, "tokens top_k"],
    *,
    interpret: Any = None,
) -> Float[Array, "tokens hidden"]:
    """sum_j expert_weights[t, j] * y[slot_of_choice[t, j]] in float32, rounded to y's dtype."""
    tokens, top_k = slot_of_choice.shape
    hidden = y.shape[1]
    columns = max(i for i in range(THREADS, min(hidden, MAX_COLUMNS) + 1, THREADS) if hidden % i == 0)
    kernel = plgpu.kernel(
        functools.partial(_block, top_k=top_k, columns=columns),
        out_type=jax.ShapeDtypeStruct((tokens, hidden), y.dtype),
        grid=(tokens, hidden // columns),
        grid_names=("token", "part"),
        interpret=interpret,
        kernel_name="experts_combine",
    )
    return kernel(y, slot_of_choice.reshape(-1), expert_weights.astype(jnp.float32).reshape(-1))


def _block(y_ref: Ref, slots_ref: Ref, weights_ref: Ref, out_ref: Ref, *, top_k: int, columns: int) -> None:
    token = lax.axis_index("token")
    part = pl.ds(lax.axis_index("part") * columns, columns)
    places = [token * top_k + i for i in range(top_k)]
    slots, weights = [slots_ref[i] for i in places], [weights_ref[i] for i in places]
    rows = [y_ref[slot, part] for slot in slots]
    total = weights[0] * rows[0].astype(jnp.float32)
    for weight, row in zip(weights[1:], rows[1:], strict=True):
        total = total + weight * row.astype(jnp.float32)
    out_ref[token, part] = total.astype(out_ref.dtype)
