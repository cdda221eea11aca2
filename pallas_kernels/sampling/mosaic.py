"""The truncation for Hopper GPUs, written with Mosaic GPU: nothing is sorted, and few spans of a row are looked at.

    XLA      maxima[row, span] <- logits                     a span is 128 tokens; the one pass over all logits
    kernel   grid (row,); one block = one warpgroup

    top-k    floor <- the k-th largest maximum               k spans reach it, so the k-th largest logit does
             list  <- spans whose maximum reaches the floor  (shared memory)
             kth   <- the k-th largest logit of the list
    top-p    total <- mass of the list                       without top-k: of the whole row, twice read
             list  <- spans that reach a weight of 2**-3, 2**-6, .. until what they hold above it is mass enough
             least <- the weight at which the mass is reached
    cut      least logit of the list that reaches all three

A threshold is searched between two keys, 32-bit numbers in the order of the floats: a sweep over the list counts (or
weighs) what lies above three keys that cut the range into quarters. A list is re-read from the first-level cache.

Every thread of the block writes the whole list, the same ids to the same places, and reads what it has written itself:
therefore no barriers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from tokenspeed_jax.pallas_kernels.sampling.truncation import LIMB, MASS_BITS, Truncation, row_peak

SPAN = 128
MOST_VOCAB = 2**18  # whose masses fit the kernel's 32-bit sums with one bit left
GROUP = 8  # spans whose loads are issued together
SWEEPS = 17  # quarter a range of 2**32 keys to one key
BOUND_STEPS = 6
BOUND_BITS = 3  # the weights tried are 2**-3, 2**-6, ...

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any
Scalar = jax.Array
Vector = jax.Array
Fold = Callable[[Callable[[Vector, Any], Any], Any, Any], Any]
"""Adds vectors of logits to a state, one after the other: (add, start, whether it is needed) -> state."""
Sums = Callable[[tuple[Scalar, ...], Scalar], list[Scalar]]
Weights = Callable[[Vector], Vector]
_LAYOUT = plgpu.Layout.WG_STRIDED((SPAN,), vec_size=1)
_SIGN = -(2**31)
_ONE = 0x3F800000  # bits of 1.0
_LOWEST = -0x7F800001  # key of -inf
_WHOLE = float(2**23)  # floats from here on are whole numbers
_UNIT = float(1 << LIMB)
_MOST_SIGNED = float(2**31 - 128)  # the largest float that a signed number holds


@functools.partial(jax.jit, static_argnames=("interpret",))
def truncation_cut_mosaic(
    logits: Float32[Array, "rows vocab"], truncation: Truncation, *, interpret: Any = None
) -> Float32[Array, " rows"]:
    """See `truncation_cut`; `interpret` takes `plgpu.InterpretGPUParams` on a CPU."""
    return cut_of_maxima(logits, span_maxima(logits), truncation, interpret=interpret)


def span_maxima(logits: Float32[Array, "rows vocab"]) -> Float32[Array, "rows spans"]:
    """The highest logit of each span of a row; -inf fills up to a multiple of `SPAN`."""
    maxima = jnp.max(logits.reshape(logits.shape[0], -1, SPAN), axis=-1)
    return jnp.pad(maxima, ((0, 0), (0, -maxima.shape[1] % SPAN)), constant_values=-jnp.inf)


def cut_of_maxima(
    logits: Float32[Array, "rows vocab"],
    maxima: Float32[Array, "rows spans"],
    truncation: Truncation,
    *,
    interpret: Any = None,
) -> Float32[Array, " rows"]:
    """`truncation_cut_mosaic` of logits whose `span_maxima` are known."""
    rows, vocab_size = logits.shape
    spans = vocab_size // SPAN
    peak = row_peak(maxima)
    k = jnp.where(truncation.top_k < vocab_size, truncation.top_k, 0)
    kernel = plgpu.kernel(
        functools.partial(_block, spans=spans),
        out_type=jax.ShapeDtypeStruct((rows,), jnp.float32),
        scratch_types={"ids_smem": plgpu.SMEM((maxima.shape[1] + GROUP,), jnp.int32)},
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
        kernel_name="truncation_cut",
    )
    # -log2 of min_p: how many halvings of the peak's weight it leaves.
    halvings = -jnp.log2(jnp.maximum(truncation.min_p, jnp.finfo(jnp.float32).tiny))
    limits = (peak, truncation.temperature, truncation.top_p, truncation.min_p, halvings)
    return kernel(logits, maxima, k, *limits)


class _Row:
    """One row in the kernel: its logits, and the list of its spans that are still looked at."""

    def __init__(self, logits_ref: Ref, maxima_ref: Ref, ids_smem: Ref, spans: int) -> None:
        self._logits, self._maxima, self._ids, self._spans = logits_ref, maxima_ref, ids_smem, spans

    def over_maxima(self, add: Callable[[Vector, Any], Any], start: Any, needed: Any) -> Any:
        """Folds the spans' maxima, 128 at a time; none unless `needed`."""
        blocks = jnp.where(needed, self._maxima.shape[0] // SPAN, 0)
        return lax.fori_loop(0, blocks, lambda i, state: add(self._load(self._maxima, i), state), start)

    def list_spans(self, floor: Scalar, count: Any, needed: Any) -> Scalar:
        """Lists the spans whose maximum reaches `floor`; returns their number, or `count` and the old list."""

        def visit(block: Scalar, number: Scalar) -> Scalar:
            ids = [block * GROUP + i for i in range(GROUP)]
            reaches = [(self._maxima[span] >= floor) & (span < self._spans) for span in ids]
            for span, is_listed in zip(ids, reaches, strict=True):
                self._ids[number] = span
                number = number + jnp.where(is_listed, 1, 0)
            return number

        blocks = jnp.where(needed, -(-self._spans // GROUP), 0)
        return lax.fori_loop(0, blocks, visit, jnp.where(needed, 0, count))

    def over_list(self, number: Scalar) -> Fold:
        """Folds the logits of the first `number` spans of the list; -inf fills up the last group."""

        def fold(add: Callable[[Vector, Any], Any], start: Any, needed: Any) -> Any:
            def visit(group: Scalar, state: Any) -> Any:
                places = [group * GROUP + i for i in range(GROUP)]
                ids = [self._ids[jnp.minimum(place, number - 1)] for place in places]
                loaded = [self._load(self._logits, span) for span in ids]
                for place, values in zip(places, loaded, strict=True):
                    state = add(jnp.where(place < number, values, -jnp.inf), state)
                return state

            groups = jnp.where(needed, lax.div(number + (GROUP - 1), GROUP), 0)
            return lax.fori_loop(0, groups, visit, start)

        return fold

    def _load(self, ref: Ref, index: Scalar) -> Vector:
        return gpu.load(ref.at[pl.ds(index * SPAN, SPAN)], layout=_LAYOUT, optimized=False)


def _zeros() -> Vector:
    return plgpu.layout_cast(jnp.zeros((SPAN,), jnp.int32), _LAYOUT)


def _keys(values: Vector) -> Vector:
    """Signed numbers in the order of the floats; the two zeros are one number."""
    bits = lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _key(value: Scalar) -> Scalar:
    """`_keys` of one number."""
    return _keys(value)


def _value(key: Scalar) -> Scalar:
    """The float of a key."""
    return lax.bitcast_convert_type(jnp.where(key < 0, key ^ 0x7FFFFFFF, key), jnp.float32)


def _at_least(a: Scalar, b: Scalar) -> Scalar:
    """`a >= b` of unsigned numbers."""
    return (a ^ _SIGN) >= (b ^ _SIGN)


def _middle(low: Scalar, high: Scalar) -> Scalar:
    """Half-way between two signed numbers, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


def _search(sums: Sums, reaches: Callable[[Scalar], Scalar], low: Scalar, high: Scalar, needed: Any) -> Scalar:
    """The highest key in [low, high] whose sum reaches; `low` where none does or nobody asks.

    Args:
        sums: what lies at or above each of some keys; the second argument is false where no answer is needed.
    """

    def quarter(_: Any, bounds: tuple[Scalar, Scalar]) -> tuple[Scalar, Scalar]:
        low, high = bounds
        second = _middle(low, high)
        keys = (_middle(low, second), second, _middle(second, high))
        is_open = low < high
        first_reaches, second_reaches, third_reaches = map(reaches, sums(keys, is_open))
        reached = jnp.where(second_reaches, jnp.where(third_reaches, keys[2], keys[1]), keys[0])
        missed = jnp.where(first_reaches, jnp.where(second_reaches, keys[2], keys[1]), keys[0]) - 1
        return (
            jnp.where(is_open & first_reaches, reached, low),
            jnp.where(is_open & ~third_reaches, missed, high),
        )

    return lax.fori_loop(0, SWEEPS, quarter, (low, jnp.where(needed, high, low)))[0]


def _count(fold: Fold) -> Sums:
    """How many of the folded values have each of three keys or a higher one."""

    def sums(keys: tuple[Scalar, ...], needed: Scalar) -> list[Scalar]:
        def add(values: Vector, counts: tuple[Vector, ...]) -> tuple[Vector, ...]:
            own = _keys(values)
            return tuple(c + jnp.where(own >= key, 1, 0) for c, key in zip(counts, keys, strict=True))

        return [jnp.sum(count) for count in fold(add, tuple(_zeros() for _ in keys), needed)]

    return sums


def _weigh(fold: Fold, weights: Weights, scale: Scalar) -> Sums:
    """The mass of the folded values whose weight has each of some keys or a higher one."""

    def sums(keys: tuple[Scalar, ...], needed: Scalar) -> list[Scalar]:
        def add(values: Vector, masses: tuple[Vector, ...]) -> tuple[Vector, ...]:
            weight = weights(values)
            bits = lax.bitcast_convert_type(weight, jnp.int32)
            exact = weight * scale
            # Rounded to the nearest whole number, to the even one of two.
            units = jnp.where(exact >= _WHOLE, exact, (exact + _WHOLE) - _WHOLE).astype(jnp.int32)
            return tuple(m + jnp.where(bits >= key, units, 0) for m, key in zip(masses, keys, strict=True))

        return [jnp.sum(mass) for mass in fold(add, tuple(_zeros() for _ in keys), needed)]

    return sums


def _scale(fold: Fold, weights: Weights, needed: Scalar) -> Scalar:
    """See `mass_scale`."""

    def add(values: Vector, sums: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
        rest = weights(values) * _UNIT
        high = rest.astype(jnp.int32)
        low = ((rest - high.astype(jnp.float32)) * _UNIT).astype(jnp.int32)
        return sums[0] + high, sums[1] + low

    high, low = map(jnp.sum, fold(add, (_zeros(), _zeros()), needed))
    total = high + (low >> LIMB)
    exponent = 31 - lax.clz(jnp.where(total == 0, 1, total))
    return lax.bitcast_convert_type((127 + MASS_BITS + LIMB - exponent) << 23, jnp.float32)


def _target(p: Scalar, total: Scalar) -> Scalar:
    """See `mass_target`; both numbers are unsigned."""
    # The bit that is shifted out still decides how the conversion rounds.
    halved = ((total >> 1) & 0x7FFFFFFF) | (total & 1)
    share = p * jnp.where(total < 0, halved.astype(jnp.float32) * 2.0, total.astype(jnp.float32))
    small = jnp.minimum(share, _MOST_SIGNED).astype(jnp.int32)
    small = small + jnp.where(small.astype(jnp.float32) < share, 1, 0)
    large = jnp.maximum(share - float(2**31), 0.0).astype(jnp.int32) ^ _SIGN
    return jnp.where(share > _MOST_SIGNED, large, small)


def _rank(row: _Row, k: Scalar, peak: Scalar) -> tuple[Scalar, Scalar]:
    """The key of the k-th largest logit, and how many spans are listed; the lowest key and 0 for k = 0."""
    ranks, highest = k > 0, _key(peak)
    in_maxima = _search(_count(row.over_maxima), lambda n: n >= k, jnp.int32(_LOWEST), highest, ranks)
    number = row.list_spans(_value(in_maxima), jnp.int32(0), ranks)
    kth = _search(_count(row.over_list(number)), lambda n: n >= k, in_maxima, highest, ranks)
    return kth, number


def _nucleus(
    row: _Row, weights: Weights, reach: Callable[[Scalar], Scalar], p: Scalar, number: Scalar, ranks: Scalar
) -> tuple[Scalar, Scalar]:
    """Key of the least weight of the nucleus (0 for p = 1), and how many spans are listed after the search."""
    weighs = p < 1.0
    fold = row.over_list(number)
    scale = _scale(fold, weights, weighs)
    target = _target(p, _weigh(fold, weights, scale)((jnp.int32(0),), weighs)[0])

    def narrow(step: Scalar, state: tuple[Scalar, Scalar, Scalar]) -> tuple[Scalar, Scalar, Scalar]:
        """Lists what weighs 2**-halvings and more, at last all there is, until that is mass enough."""
        low, number, is_open = state
        halvings, is_last = (step + 1) * BOUND_BITS, step == BOUND_STEPS
        floor = jnp.where(is_last, -jnp.inf, reach(halvings.astype(jnp.float32)))
        key = jnp.where(is_last, 0, (127 - halvings) << 23)
        number = row.list_spans(floor, number, is_open > 0)
        mass = _weigh(row.over_list(number), weights, scale)((key,), is_open > 0)[0]
        found = (is_open > 0) & _at_least(mass, target)
        return jnp.where(found, key, low), number, jnp.where(found, 0, is_open)

    start = (jnp.int32(0), number, jnp.where(weighs & ~ranks, 1, 0))
    low, number, _ = lax.fori_loop(0, BOUND_STEPS + 1, narrow, start)
    sums = _weigh(row.over_list(number), weights, scale)
    return _search(sums, lambda mass: _at_least(mass, target), low, jnp.int32(_ONE), weighs), number


def _block(
    logits_ref: Ref,
    maxima_ref: Ref,
    k_ref: Ref,
    peak_ref: Ref,
    temperature_ref: Ref,
    p_ref: Ref,
    min_p_ref: Ref,
    halvings_ref: Ref,
    cut_ref: Ref,
    *,
    ids_smem: Ref,
    spans: int,
) -> None:
    index = lax.axis_index("row")
    k, peak, temperature = k_ref[index], peak_ref[index], temperature_ref[index]
    p, min_p, min_p_halvings = p_ref[index], min_p_ref[index], halvings_ref[index]
    row = _Row(logits_ref.at[index], maxima_ref.at[index], ids_smem, spans)
    ranks, weighs = k > 0, p < 1.0
    is_cut = ranks | weighs | (min_p > 0.0)
    kth, number = _rank(row, k, peak)

    def reach(halvings: Scalar) -> Scalar:
        """A logit below every one whose weight is at least 2**-halvings, whatever is rounded on the way."""
        return peak - temperature * (halvings * math.log(2) + 0.01) - jnp.maximum(peak, -peak) * 2.0**-20

    def weights(values: Vector) -> Vector:
        return jnp.where(_keys(values) >= kth, jnp.exp((values - peak) / temperature), 0.0)

    floor = jnp.where(weighs, -jnp.inf, reach(min_p_halvings))
    number = row.list_spans(floor, number, is_cut & ~ranks)
    least, number = _nucleus(row, weights, reach, p, number, ranks)

    def lower(values: Vector, cut: Vector) -> Vector:
        weight = weights(values)
        bits = lax.bitcast_convert_type(weight, jnp.int32)
        is_kept = (_keys(values) >= kth) & (bits >= least) & (weight >= min_p)
        return jnp.minimum(cut, jnp.where(is_kept, values, jnp.inf))

    highest = plgpu.layout_cast(jnp.full((SPAN,), jnp.inf, jnp.float32), _LAYOUT)
    cut = jnp.min(row.over_list(number)(lower, highest, is_cut))
    cut_ref[index] = jnp.where(is_cut, cut, -jnp.inf)
