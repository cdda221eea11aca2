"""Histograms count what was observed, each value in the range that holds it."""

from hypothesis import given
from hypothesis import strategies as st

from tokenspeed_jax.engine.histogram import Histogram

VALUES = st.integers(-5, 25)


@given(
    bounds=st.lists(VALUES, unique=True, min_size=1).map(sorted), values=st.lists(st.tuples(VALUES, st.integers(1, 3)))
)
def test_every_value_counts_in_the_first_range_whose_bound_it_does_not_exceed(
    bounds: list[int], values: list[tuple[int, int]]
) -> None:
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    seen = histogram.snapshot()
    every = [value for value, times in values for _ in range(times)]
    assert seen.cumulative() == [*(sum(value <= bound for value in every) for bound in bounds), len(every)]
    assert seen.count == len(every)
    assert seen.total == sum(every)
    assert seen.bounds == tuple(bounds)
