"""Recurrent layers over cached states: reads each row's state, runs the recurrence, stores what a step leaves behind.

A decode step updates states in place in the arena. A step with prefill chunks walks every row once; the state at the
row's checkpoint and the state after its last token go to blocks of their own (cache-runtime.md 17).
"""

from jax import lax
from jaxtyping import Array, Float, Shaped

from tokenspeed_jax.cache.state_blocks import StateBlocks
from tokenspeed_jax.models.attention import RecurrenceInputs
from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.causal_convolution import causal_convolution, causal_convolution_step
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.recurrences import RECURRENCES
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentResult, RecurrentRows


def convolve_cached(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    windows: BlockView,
    blocks: StateBlocks,
    rows: RecurrentRows | None,
) -> tuple[Float[Array, "tokens channels"], BlockView]:
    """The causal convolution behind cached windows.

    Args:
        rows: the step's rows; None when every row has exactly one token.

    Returns:
        The outputs, and the view after the windows were stored.
    """
    if rows is None:
        return causal_convolution_step(x, weight, bias, windows, blocks.source, blocks.target)
    result = causal_convolution(x, weight, bias, _taken(windows, blocks), rows)
    return result.output, _stored(windows, blocks, result)


def recur_cached(
    inputs: RecurrenceInputs,
    states: BlockView,
    blocks: StateBlocks,
    rows: RecurrentRows | None,
    *,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens ..."], BlockView]:
    """The recurrence from cached states; arguments and results as for `convolve_cached`.

    Args:
        implementation: None takes the fastest that serves the call.
    """
    recurrence = RECURRENCES[type(inputs)]
    if rows is None:
        return recurrence.step(inputs, states, blocks.source, blocks.target, implementation=implementation)
    result = recurrence.walk(inputs, _taken(states, blocks), rows, implementation=implementation)
    return result.output, _stored(states, blocks, result)


def _taken(view: BlockView, blocks: StateBlocks) -> Shaped[Array, "rows ..."]:
    """What the rows start from, read before anything is written.

    Without the barrier XLA repeats the read in each fusion that uses it; one of them may come after the write, and then
    the whole plane is copied for it.
    """
    return lax.optimization_barrier(view.take(blocks.source))


def _stored(view: BlockView, blocks: StateBlocks, result: RecurrentResult) -> BlockView:
    return view.write(blocks.checkpoint, result.body_states).write(blocks.target, result.final_states)
