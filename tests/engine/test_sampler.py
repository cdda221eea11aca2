"""The sampler against a slow reference that sorts in float64, and the promises about streams, batches and state."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenspeed_jax.engine import sampler
from tokenspeed_jax.engine.sampler import sample, sample_greedy, sample_seed, seed_words
from tokenspeed_jax.engine.sampling_state import init_sampling_state
from tokenspeed_jax.pallas_kernels.sampling import MAX_VOCAB, Truncation, truncation_cut, xla
from tokenspeed_jax.pallas_kernels.sampling.truncation import mass_scale

from .sampling_rows import (
    VOCAB,
    Row,
    any_row,
    batch,
    reference_kept,
    reference_penalised,
)

SORTS = ("sort", "top_k", "approx_top_k")
step = jax.jit(sample)


@jax.jit
def distribution(logits, rows, state):
    """The kept set and the log-probabilities from which `sample` draws, through its own inner functions."""
    penalised = sampler._penalised(logits, rows, state)
    scaled = (penalised - penalised.max(-1, keepdims=True)) / rows.temperature[:, None]
    cut = truncation_cut(penalised, Truncation(rows.temperature, rows.top_k, rows.top_p, rows.min_p))
    kept = penalised >= cut[:, None]
    weights = jnp.where(kept, jnp.exp(scaled), 0.0)
    return penalised, kept, jnp.log(weights / weights.sum(-1, keepdims=True))


@settings(max_examples=150, deadline=None)
@given(st.lists(any_row, min_size=4, max_size=4))
def test_every_combination_of_parameters_keeps_and_weighs_what_the_sorting_reference_does(rows: list[Row]) -> None:
    logits, row_sampling, state = batch(rows, [1, 2, 3, 4])
    penalised, kept, log_probabilities = map(np.asarray, distribution(logits, row_sampling, state))
    result, _ = step(logits, row_sampling, state)
    for index, row in enumerate(rows):
        expected = reference_penalised(row)
        np.testing.assert_array_equal(penalised[index], expected)  # the grid stays exact in float32
        # A mass within rounding of p may fall on either side of it.
        smaller = reference_kept(expected, row, row.top_p * (1 - 1e-5) if row.top_p < 1 else 1.0)
        larger = reference_kept(expected, row, row.top_p * (1 + 1e-5) if row.top_p < 1 else 1.0)
        assert not (smaller & ~kept[index]).any()
        assert not (kept[index] & ~larger).any()
        weights = np.where(kept[index], np.exp((expected - expected.max()) / np.float32(row.temperature)), 0.0)
        with np.errstate(divide="ignore"):
            reference_log = np.log(weights / weights.sum())
        visible = reference_log > -80
        np.testing.assert_allclose(log_probabilities[index][visible], reference_log[visible], rtol=1e-5, atol=2e-5)
        token = int(result.token[index])
        assert kept[index, token]
        assert result.sampling_logprob[index] == pytest.approx(reference_log[token], rel=1e-5, abs=2e-5)
        raw = np.asarray(row.logits, np.float64)
        assert result.logprob[index] == pytest.approx(raw[token] - np.logaddexp.reduce(raw), rel=1e-5, abs=2e-5)


def neighbours(value: float) -> list[float]:
    """A value and the next float above it: an order that any loss of a bit would break."""
    return [value, float(np.nextafter(np.float32(value), np.float32(np.inf)))]


# XLA flushes denormals in comparisons, so they are no test of the order.
any_float = st.one_of(
    st.floats(width=32, allow_nan=False, allow_subnormal=False), st.sampled_from([0.0, -0.0, 1.0, -np.inf])
)
near_floats = st.floats(2.0**-100, 2.0**100, width=32).flatmap(lambda x: st.sampled_from([*neighbours(x), -x]))
in_top_k, in_top_p = jax.jit(xla.in_top_k), jax.jit(xla.in_top_p)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(any_float, near_floats), min_size=VOCAB, max_size=VOCAB), st.integers(1, VOCAB))
@example([0.0, -0.0] * (VOCAB // 2), 1)
@example(neighbours(1.0) * (VOCAB // 2), 1)
@example(neighbours(-1.0) * (VOCAB // 2), 1)
def test_top_k_is_exact_for_every_float(values: list[float], k: int) -> None:
    array = np.asarray(values, np.float32)
    kept = in_top_k(array[None], jnp.asarray([k], jnp.int32))[0]
    np.testing.assert_array_equal(kept, array >= np.sort(array)[::-1][k - 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.5, 3.0, 12.0]), st.sampled_from([0.1, 0.5, 0.9, 0.99, 0.9999]))
def test_top_p_of_a_large_vocabulary_is_that_of_float64_whatever_the_order(seed: int, spread: float, p: float) -> None:
    rng = np.random.default_rng(seed)
    weights = np.exp(-rng.exponential(spread, 20_000)).astype(np.float32)
    weights[rng.integers(20_000)] = 1.0
    falling = np.sort(weights)[::-1].astype(np.float64)
    shares = np.cumsum(falling) / falling.sum()
    order = rng.permutation(20_000)
    share = jnp.asarray([p], jnp.float32)
    kept = np.asarray(in_top_p(weights[None], share)[0])
    np.testing.assert_array_equal(np.asarray(in_top_p(weights[order][None], share)[0]), kept[order])
    fewest, most = np.searchsorted(shares, p - 1e-5) + 1, np.searchsorted(shares, p + 1e-5) + 1
    assert fewest <= kept.sum() <= max(most, (weights >= falling[min(most, 20_000) - 1]).sum())
    assert weights[kept].min() > weights[~kept].max(initial=0.0)


def test_top_p_that_is_reached_exactly_takes_no_further_token() -> None:
    weights = jnp.asarray([[0.25, 1.0, 0.25, 0.5]], jnp.float32)  # of a mass of 2
    for share, count in ((0.5, 1), (0.75, 2), (0.875, 4)):
        assert int(in_top_p(weights, jnp.asarray([share], jnp.float32)).sum()) == count


@pytest.mark.parametrize("weight", [1.0, 1.0 - 2.0**-24])
def test_the_largest_vocabulary_does_not_overflow_the_integer_sums(weight: float) -> None:
    weights = jnp.full((1, MAX_VOCAB), 2.0**-20, jnp.float32).at[0, : MAX_VOCAB // 2].set(weight)
    kept = in_top_p(weights, jnp.asarray([0.9], jnp.float32))
    assert int(kept.sum()) == MAX_VOCAB // 2
    full = jnp.full((1, MAX_VOCAB), weight, jnp.float32)
    units = float(mass_scale(full)[0]) * weight * MAX_VOCAB
    assert 2**30 * 0.999 <= units < 2**31 * 1.001


def test_a_tail_of_many_small_weights_does_not_overflow_the_integer_sums() -> None:
    weights = jnp.full((1, MAX_VOCAB), 2.0**-14, jnp.float32).at[0, 0].set(1.0)  # a mass of 33
    kept = in_top_p(jnp.repeat(weights, 2, axis=0), jnp.asarray([0.02, 0.5], jnp.float32))
    assert kept.sum(axis=-1).tolist() == [1, MAX_VOCAB]


def test_a_vocabulary_beyond_the_integer_sums_is_refused() -> None:
    rows = jax.ShapeDtypeStruct((1, MAX_VOCAB + 1), jnp.float32)
    with pytest.raises(ValueError, match=str(MAX_VOCAB)):
        jax.eval_shape(sample, rows, *batch([Row(logits=(0.0,) * VOCAB)], [1])[1:])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 19, 20, 21, 127, 128, 129, 2560, 2561, 5000]),
    st.sampled_from([0.05, 0.5, 0.9]),
)
def test_top_logits_are_those_of_top_k_ties_included(seed: int, vocab: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.geometric(rate, size=(3, vocab)).astype(np.float32)  # few high, with equals in many spans below them
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    count = min(20, vocab)
    jax.tree.map(
        np.testing.assert_array_equal,
        sampler.highest_logits(jnp.asarray(logits), count),
        tuple(jax.lax.top_k(logits, count)),
    )


def test_top_k_keeps_all_that_tie_with_the_kth() -> None:
    row = Row(logits=(5.0, 3.0, 3.0, 3.0, 1.0) + (0.0,) * (VOCAB - 5), top_k=2)
    _, kept, _ = distribution(*batch([row], [1]))
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0, 1, 2, 3])


def test_top_p_counts_mass_within_the_top_k_set_and_keeps_ties() -> None:
    base = tuple(np.log([4.0, 2.0, 2.0, 1.0, 1.0])) + (0.0,) * (VOCAB - 5)
    # Alone the first token has 4 / 37 of the mass; among the top three, half.
    _, kept, _ = distribution(*batch([Row(logits=base, top_k=3, top_p=0.49), Row(logits=base, top_p=0.1)], [1, 2]))
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0])
    np.testing.assert_array_equal(np.flatnonzero(kept[1]), [0])
    _, kept, _ = distribution(*batch([Row(logits=base, top_k=3, top_p=0.6)], [1]))
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0, 1, 2])


def test_min_p_is_taken_after_the_temperature() -> None:
    logits = (0.0, -1.0, -2.0) + (-50.0,) * (VOCAB - 3)
    hot, cold = Row(logits=logits, min_p=0.3, temperature=2.0), Row(logits=logits, min_p=0.3, temperature=0.5)
    _, kept, _ = distribution(*batch([hot, cold], [1, 2]))
    np.testing.assert_array_equal(np.flatnonzero(kept[0]), [0, 1, 2])
    np.testing.assert_array_equal(np.flatnonzero(kept[1]), [0])


def test_greedy_takes_the_lowest_id_among_equals_with_its_raw_log_probability() -> None:
    logits = jnp.asarray([[1.0, 4.0, 4.0, 0.0], [-1.0, -jnp.inf, -1.0, -3.0]], jnp.float32)
    result = sample_greedy(logits)
    np.testing.assert_array_equal(result.token, [1, 0])
    expected = [4.0 - np.logaddexp.reduce([1.0, 4.0, 4.0, 0.0]), -1.0 - np.logaddexp.reduce([-1.0, -1.0, -3.0])]
    np.testing.assert_allclose(result.logprob, expected, rtol=1e-6)
    np.testing.assert_array_equal(result.sampling_logprob, [0.0, 0.0])
    assert result.top_ids.shape == result.top_logprobs.shape == (2, 0)


@settings(max_examples=30, deadline=None)
@given(any_row)
def test_temperature_zero_is_greedy_on_the_penalised_logits(row: Row) -> None:
    logits, row_sampling, state = batch([replace(row, temperature=0.0)], [3])
    result, _ = step(logits, row_sampling, state)
    assert int(result.token[0]) == int(np.argmax(reference_penalised(row)))
    assert float(result.sampling_logprob[0]) == 0.0


def test_a_neutral_row_at_temperature_zero_equals_the_greedy_mode() -> None:
    logits = jax.random.normal(jax.random.key(1), (4, VOCAB))
    rows = [Row(logits=tuple(np.asarray(line).tolist()), temperature=0.0, uses_history=False) for line in logits]
    full, _ = step(*batch(rows, [1, 2, 3, 4]))
    greedy = sample_greedy(logits)
    np.testing.assert_array_equal(full.token, greedy.token)
    np.testing.assert_allclose(full.logprob, greedy.logprob, atol=1e-6)


def test_top_logprobs_are_the_raw_ones_in_falling_order() -> None:
    logits = np.random.default_rng(3).normal(size=VOCAB)
    row = Row(logits=tuple(logits), temperature=0.3, top_k=1, bias=((4, 100.0),), uses_history=True)
    result, _ = step(*batch([row], [1]))
    order = np.argsort(-logits, kind="stable")[:20]
    np.testing.assert_array_equal(result.top_ids[0], order)
    np.testing.assert_allclose(result.top_logprobs[0], logits[order] - np.logaddexp.reduce(logits), atol=1e-5)
    assert int(result.token[0]) == 4


@pytest.mark.parametrize(
    "row",
    [
        Row(logits=(0.0,) * VOCAB),
        Row(logits=tuple(np.linspace(2, -2, VOCAB)), temperature=1.5),
        Row(logits=tuple(np.linspace(2, -2, VOCAB)), temperature=0.7, top_k=9, top_p=0.8),
        Row(logits=tuple(np.linspace(2, -2, VOCAB)), min_p=0.2, bias=((30, 3.0),), blocked=(0,), min_tokens=4000),
    ],
    ids=["uniform", "tempered", "truncated", "biased"],
)
def test_draws_follow_the_distribution(row: Row) -> None:
    draws = 4000
    logits, row_sampling, state = batch([row], [1])
    _, kept, log_probabilities = distribution(logits, row_sampling, state)
    many = jax.tree.map(lambda a: jnp.repeat(a, draws, axis=0), row_sampling)
    many = replace(many, output_index=jnp.arange(draws, dtype=jnp.int32), samples=jnp.zeros(draws, jnp.bool_))
    result, _ = step(jnp.repeat(logits, draws, axis=0), many, state)
    seen = np.bincount(np.asarray(result.token), minlength=VOCAB)
    expected = draws * np.exp(np.asarray(log_probabilities[0], np.float64))
    inside = np.asarray(kept[0])
    assert seen[~inside].sum() == 0
    chi_square = ((seen - expected)[inside] ** 2 / expected[inside]).sum()
    freedom = inside.sum() - 1
    # Wilson and Hilferty's normal approximation of the 99.99 % quantile; the seed is fixed, so this never flickers.
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    vocab, draws = 40_000, 600
    logits = jnp.zeros((1, vocab)).at[0, 0].set(float(np.log(vocab)))  # half the mass on one, half spread thin
    row_sampling = batch([Row(logits=(0.0,) * vocab, uses_history=False)], [1])[1]
    many = jax.tree.map(lambda a: jnp.repeat(a, 50, axis=0), row_sampling)
    hits = []
    for first in range(0, draws, 50):
        many = replace(many, output_index=jnp.arange(first, first + 50, dtype=jnp.int32))
        result, _ = step(jnp.repeat(logits, 50, axis=0), many, init_sampling_state(1, vocab))
        hits += np.asarray(result.token).tolist()
    rest = [token for token in hits if token]
    assert abs(len(rest) - draws / 2) < 4 * (draws / 4) ** 0.5
    assert len(set(rest)) > 0.98 * len(rest)
    assert abs(np.mean(rest) - vocab / 2) < 4 * vocab / (12 * len(rest)) ** 0.5


@settings(max_examples=25, deadline=None)
@given(any_row, st.lists(any_row, min_size=4, max_size=4), st.integers(0, 4))
def test_a_row_does_not_depend_on_its_batch(row: Row, others: list[Row], place: int) -> None:
    alone, alone_state = step(*batch([row], [2]))
    rows = [*others[:place], row, *others[place:]]
    slots = [1, 3, 4, 5]
    slots.insert(place, 2)
    mixed, mixed_state = step(*batch(rows, slots))
    assert int(mixed.token[place]) == int(alone.token[0])
    for name in ("logprob", "sampling_logprob", "top_logprobs"):
        np.testing.assert_allclose(getattr(mixed, name)[place], getattr(alone, name)[0], atol=1e-5)
    np.testing.assert_array_equal(mixed.top_ids[place], alone.top_ids[0])
    np.testing.assert_array_equal(mixed_state.output_counts[2], alone_state.output_counts[2])


def test_noise_is_a_function_of_seed_and_output_index() -> None:
    row = Row(logits=(0.0,) * VOCAB, uses_history=False)
    rows = [
        replace(row, seed=seed, output_index=index, samples=True)
        for seed in (0, 1, 2**32, 2**62 + 1)
        for index in range(8)
    ]
    slots = [0] * len(rows)
    first, _ = step(*batch(rows, slots))
    again, _ = step(*batch(rows[::-1], slots))
    np.testing.assert_array_equal(first.token, again.token[::-1])
    streams = np.asarray(first.token).reshape(4, 8)
    assert len({tuple(stream) for stream in streams.tolist()}) == 4
    assert all(len(set(stream)) > 3 for stream in streams.tolist())


def test_the_noise_of_a_seed_is_pinned() -> None:
    """A request with a seed must draw the same tokens after an upgrade of JAX or of the engine."""
    rows = [Row(logits=(0.0,) * VOCAB, seed=1234, output_index=i, uses_history=False) for i in range(8)]
    # With equal logits the largest noise wins, which is the smallest of the drawn bits.
    assert np.asarray(step(*batch(rows, [0] * 8))[0].token).tolist() == [8, 25, 9, 29, 18, 10, 23, 27]
    assert [sample_seed(1234, i) for i in range(2)] == [4255046344572935387, 1713515437845669156]


def test_sample_seeds_are_distinct_63_bit_numbers() -> None:
    # Output of the published generator for state 0 is 0xE220A8397B1DCDAF; the top bit is dropped.
    assert sample_seed(0, 0) == 0xE220A8397B1DCDAF & (2**63 - 1)
    seeds = {sample_seed(seed, index) for seed in (0, 1, 7, 2**63 - 1) for index in range(128)}
    assert len(seeds) == 4 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    high, low = seed_words(2**63 - 2)
    assert (high, low) == (0x7FFFFFFF, 0xFFFFFFFE)


def test_blocked_ids_are_never_drawn_before_min_tokens_and_may_be_after() -> None:
    logits = (8.0,) + (0.0,) * (VOCAB - 1)
    row = Row(logits=logits, blocked=(0,), min_tokens=3, seed=5)
    drawn = [int(step(*batch([replace(row, output=(1,) * n)], [1]))[0].token[0]) for n in range(5)]
    assert all(token != 0 for token in drawn[:3])
    assert drawn[3:] == [0, 0]


@pytest.mark.parametrize(
    "row",
    [
        Row(logits=(-np.inf,) * VOCAB),
        Row(logits=(-np.inf,) * (VOCAB - 1) + (0.0,), top_k=5, top_p=0.5, min_p=0.5),
        Row(logits=(3e38,) + (-3e38,) * (VOCAB - 1), temperature=1e-30),
        Row(logits=(1.0,) + (0.0,) * (VOCAB - 1), temperature=1e-38, top_p=1e-9),
        Row(logits=(3e38, 2e38) + (0.0,) * (VOCAB - 2), repetition=1e-3, prompt=(0, 1), top_p=0.5),
    ],
    ids=["all masked", "one left", "tiny temperature", "tiny top_p", "overflowing repetition"],
)
def test_extreme_rows_stay_in_range_and_harm_no_neighbour(row: Row) -> None:
    neighbour = Row(logits=tuple(np.linspace(0, 1, VOCAB)), seed=11)
    result, _ = step(*batch([row, neighbour], [1, 2]))
    alone, _ = step(*batch([neighbour], [2]))
    assert 0 <= int(result.token[0]) < VOCAB
    assert not np.isnan(float(result.sampling_logprob[0]))
    assert int(result.token[1]) == int(alone.token[0])
    assert np.isfinite(float(result.sampling_logprob[1]))


def equations(jaxpr):
    """All equations of a program, those of its loops and calls included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_the_full_mode_sorts_nothing_the_size_of_the_vocabulary() -> None:
    vocab = 40_000
    row_sampling = batch([Row(logits=(0.0,) * VOCAB)] * 2, [1, 2])[1]
    logits = jax.ShapeDtypeStruct((2, vocab), jnp.float32)
    state = jax.eval_shape(lambda: init_sampling_state(2, vocab))
    program = jax.make_jaxpr(sample)(logits, row_sampling, state)
    sorted_widths = [e.invars[0].aval.shape[-1] for e in equations(program.jaxpr) if e.primitive.name in SORTS]
    assert sorted_widths
    assert max(sorted_widths) < vocab / 10
