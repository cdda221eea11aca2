"""What both Mosaic GPU attention kernels do with a block of keys: scores, online softmax, product with the values.

One warpgroup holds 64 query rows. Its registers keep the highest score and the sum of weights of each row, and the
output in chunks of 64 columns; keys and values lie in shared memory, 128-byte swizzled, as TMA left them. Exponents
are base 2, as the hardware computes them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.scores import ScoreRule

ROWS = 64  # rows of one wgmma
CHUNK = 64  # output columns per accumulator; one 128-byte swizzle of 16-bit values
MASKED = -1e30  # finite, so that rows which saw nothing yet stay free of NaN; wiped out by the first real score
LOG2_E = math.log2(math.e)

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any
Mask = Callable[[jax.Array], jax.Array]


class RowState(NamedTuple):
    """Running softmax of 64 query rows, in registers.

    Attributes:
        top: highest score of each row so far, in base-2 units.
        weight: sum of exp2(score - top).
        values: sum of exp2(score - top) * value, in chunks of columns.
    """

    top: jax.Array
    weight: jax.Array
    values: tuple[jax.Array, ...]


def swizzled(*shape: int, dtype: jnp.dtype) -> Any:
    """Shared memory that TMA fills and wgmma reads."""
    return plgpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)))


def swizzled_rows(*shape: int, dtype: jnp.dtype) -> Any:
    """Shared memory with rows of any multiple of 32 bytes, in the widest swizzle that divides them, for copies out."""
    row = shape[-1] * jnp.dtype(dtype).itemsize
    swizzle = next(size for size in (128, 64, 32) if row % size == 0)
    tile = gpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tile, gpu.SwizzleTransform(swizzle)))


def empty_state(head_dim: int) -> RowState:
    """The state before any key."""
    row = plgpu.Layout.WGMMA.reduce(1)
    return RowState(
        plgpu.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), row),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row),
        tuple(
            plgpu.layout_cast(jnp.zeros((ROWS, CHUNK), jnp.float32), plgpu.Layout.WGMMA)
            for _ in range(head_dim // CHUNK)
        ),
    )


def add_block(
    state: RowState,
    q_smem: Ref,
    k_smem: Ref,
    v_smem: Ref,
    *,
    rule: ScoreRule,
    mask: Mask | None,
    keys_read: Callable[[], None],
    await_values: Callable[[], None],
    interpreted: bool,
    issued: Callable[[], None] = lambda: None,
) -> RowState:
    """The state after one block of keys.

    Args:
        q_smem, k_smem, v_smem: [64, dim] queries, or [dim / 64, 64, 64] in chunks of columns; [keys, dim] keys and
            values.
        mask: scores -> scores with what is not visible at `MASKED`; None when all is visible.
        keys_read: called once the keys are no longer needed.
        await_values: called after the softmax, before the values are read.
        interpreted: the CPU interpreter multiplies registers with a plain dot, since its wgmma takes only refs.
        issued: called once the first product is on its way.
    """
    keys = k_smem.shape[0]

    def multiply(acc: Ref) -> jax.Array:
        if len(q_smem.shape) == 2:
            plgpu.wgmma(acc, q_smem, k_smem.transpose((1, 0)))
        else:
            for i in range(q_smem.shape[0]):
                plgpu.wgmma(acc, q_smem.at[i], k_smem.at[:, pl.ds(i * CHUNK, CHUNK)].transpose((1, 0)))
        issued()
        return acc[...]

    scores = pl.run_scoped(multiply, gpu.ACC((ROWS, keys), jnp.float32))
    keys_read()
    scores = _scaled(scores, rule)
    if mask is not None:
        scores = mask(scores)
    top = jnp.maximum(state.top, scores.max(axis=1))
    keep = jnp.exp2(state.top - top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
    weight = state.weight * keep + p.sum(axis=1)
    kept = tuple(chunk * lax.broadcast_in_dim(keep, chunk.shape, [0]) for chunk in state.values)
    # Nothing of the softmax may slip past the wait: what follows it belongs to the matrix units.
    kept, top, weight, p16 = lax.optimization_barrier((kept, top, weight, p.astype(v_smem.dtype)))
    await_values()
    if interpreted:
        values = tuple(
            chunk + jnp.dot(p16, v_smem[:, i * CHUNK : (i + 1) * CHUNK], preferred_element_type=jnp.float32)
            for i, chunk in enumerate(kept)
        )
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
        return RowState(top, weight, values)

    def accumulate(accs: tuple[Ref, ...]) -> None:
        for i, acc in enumerate(accs):
            plgpu.wgmma(acc, p16, v_smem.at[:, pl.ds(i * CHUNK, CHUNK)])

    values = pl.run_state(accumulate)(tuple(gpu.ACC.init(chunk) for chunk in kept))
    return RowState(top, weight, values)


def join_sinks(state: RowState, sinks: jax.Array) -> RowState:
    """The state with one more logit in each row's denominator, which brings no value.

    Args:
        sinks: float32, a scalar or one per row; far above the row's scores it gives weight infinity and output 0.
    """
    return state._replace(weight=state.weight + jnp.exp2(sinks * LOG2_E - state.top))


def outputs(state: RowState) -> tuple[jax.Array, ...]:
    """Attention outputs in chunks of columns; zeros for rows that took no block."""
    weight = jnp.where(state.weight > 0, state.weight, 1.0)
    return tuple(chunk / lax.broadcast_in_dim(weight, chunk.shape, [0]) for chunk in state.values)


def log_weights(state: RowState) -> jax.Array:
    """log2 of each row's sum of exp2(score); `MASKED` for rows that took no block, finite for any sink."""
    taken = state.weight > 0
    weight = jnp.where(taken, state.weight, 1.0)
    return jnp.minimum(jnp.where(taken, state.top + jnp.log(weight) * LOG2_E, MASKED), -MASKED)


def visible_columns(scores: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Scores with `MASKED` at every column outside [low, high); the same columns for all rows."""
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    return jnp.where((column >= low) & (column < high), scores, MASKED)


def base_two_scores(products: jax.Array, rule: ScoreRule) -> tuple[jax.Array, float]:
    """Scores, and the positive factor that makes them `ScoreRule.score` in base-2 units.

    A peak times the factor is the peak of the products, and the factor costs nothing inside the exponent's
    multiply-add.
    """
    if rule.soft_cap is None and rule.scale > 0:
        return products, rule.scale * LOG2_E
    return _scaled(products, rule), 1.0


def _scaled(products: jax.Array, rule: ScoreRule) -> jax.Array:
    """`ScoreRule.score` in base-2 units."""
    if rule.soft_cap is None:
        return products * (rule.scale * LOG2_E)
    # The hardware's tanh errs by 2^-11, too much for a score of 50; this form is as exact as exp2.
    grown = jnp.exp2(products * (2 * LOG2_E * rule.scale / rule.soft_cap))
    return (rule.soft_cap * LOG2_E) * (1.0 - 2.0 / (grown + 1.0))
