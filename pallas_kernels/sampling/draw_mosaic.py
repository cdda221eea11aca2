"""The draw for Hopper GPUs, written with Mosaic GPU: noise is made only where a token may be drawn.

    grid (part, row); one block = one warpgroup; a part is an equal share of a row's groups of 4 spans (512 tokens)

    a group whose maxima all lie below the row's cut         nothing is loaded
    any other    logits -> weight, added up                  noise(seed, index, token) -> highest logit + noise, its id

XLA takes the best of the parts. The generator costs about 80 integer operations a token, more than reading the logit
does: a row that keeps everything is bound by them, a truncated one looks at a few groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from tokenspeed_jax.pallas_kernels.sampling.mosaic import SPAN, cut_of_maxima, span_maxima
from tokenspeed_jax.pallas_kernels.sampling.noise import gumbel_of_bits, log1p_by_log, row_keys, threefry
from tokenspeed_jax.pallas_kernels.sampling.truncation import Truncation, kept_logprob, row_peak

SPANS = 4  # of a group
GROUP = SPANS * SPAN
PARTS = 16

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any
_LAYOUT = plgpu.Layout.WG_STRIDED((GROUP,), vec_size=SPANS)


@functools.partial(jax.jit, static_argnames=("interpret",))
def draw_mosaic(
    logits: Float32[Array, "rows vocab"],
    truncation: Truncation,
    is_greedy: Bool[Array, " rows"],
    seed: UInt32[Array, "rows 2"],
    output_index: Int32[Array, " rows"],
    *,
    interpret: Any = None,
) -> tuple[Int32[Array, " rows"], Float32[Array, " rows"]]:
    """See `draw`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    rows, vocab_size = logits.shape
    maxima = span_maxima(logits)
    peak = row_peak(maxima)
    cut = cut_of_maxima(logits, maxima, truncation, interpret=interpret)
    # Of a greedy row nothing but its highest logits are looked at, and without noise the lowest id is the first.
    cut = jnp.where(is_greedy, peak, cut)
    part = jax.ShapeDtypeStruct((rows, PARTS), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_block, groups=-(-vocab_size // GROUP), vocab_size=vocab_size),
        out_type=[part, jax.ShapeDtypeStruct(part.shape, jnp.int32), part],
        grid=(PARTS, rows),
        grid_names=("part", "row"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="draw",
    )
    noisy = jnp.where(is_greedy, 0.0, 1.0)
    keys = row_keys(seed, output_index)
    best, ids, mass = kernel(logits, maxima, cut, peak, truncation.temperature, noisy, *keys)
    # Parts follow each other as ids do: of equals the first has the lowest.
    token = jnp.take_along_axis(ids, jnp.argmax(best, axis=-1)[:, None], axis=-1)[:, 0]
    return token, kept_logprob(logits, token, peak, truncation, jnp.sum(mass, axis=-1))


def _block(
    logits_ref: Ref,
    maxima_ref: Ref,
    cut_ref: Ref,
    peak_ref: Ref,
    temperature_ref: Ref,
    noisy_ref: Ref,
    high_ref: Ref,
    low_ref: Ref,
    best_ref: Ref,
    id_ref: Ref,
    mass_ref: Ref,
    *,
    groups: int,
    vocab_size: int,
) -> None:
    part, row = lax.axis_index("part"), lax.axis_index("row")
    cut, peak, temperature, noisy = cut_ref[row], peak_ref[row], temperature_ref[row], noisy_ref[row]
    key = (high_ref[row], low_ref[row])

    def look(group: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        begin = group * GROUP
        # The last group ends with the row; what it shares with the one before is weighed once.
        start = jnp.minimum(begin, vocab_size - GROUP)
        values = gpu.load(logits_ref.at[row, pl.ds(start, GROUP)], layout=_LAYOUT, optimized=False)
        place = plgpu.broadcasted_iota(jnp.int32, (GROUP,), 0, layout=_LAYOUT)
        ids = place + start
        scaled = (values - peak) / temperature
        best, best_id, mass = state
        is_kept = values >= cut
        mass = mass + jnp.where(is_kept & (ids >= begin), jnp.exp(scaled), 0.0)
        words = threefry(key, (jnp.zeros_like(ids).astype(jnp.uint32), ids.astype(jnp.uint32)))
        noise = gumbel_of_bits(*words, log1p=log1p_by_log)
        value = jnp.where(is_kept, scaled + noise * noisy, -jnp.inf)
        is_better = value > best
        return jnp.where(is_better, value, best), jnp.where(is_better, ids, best_id), mass

    def visit(group: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        highest = functools.reduce(jnp.maximum, [maxima_ref[row, group * SPANS + i] for i in range(SPANS)])
        return lax.fori_loop(0, jnp.where(highest >= cut, 1, 0), lambda _, state: look(group, state), state)

    def full(value: float, dtype: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((GROUP,), value, dtype), _LAYOUT)

    first, last = lax.div(part * groups, PARTS), lax.div((part + 1) * groups, PARTS)
    start = (full(-jnp.inf, jnp.float32), full(0, jnp.int32), full(0, jnp.float32))
    best, ids, mass = lax.fori_loop(first, last, visit, start)
    highest = jnp.max(best)
    best_ref[row, part] = highest
    id_ref[row, part] = jnp.min(jnp.where(best == highest, ids, vocab_size - 1))
    mass_ref[row, part] = jnp.sum(mass)
