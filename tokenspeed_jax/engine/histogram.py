"""`Histogram`: how often values fell into fixed ranges, as a metrics page shows it."""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class HistogramCounts:
    """A snapshot of a histogram.

    Attributes:
        bounds: upper bounds of the ranges, inclusive, increasing; a last range is above them all.
        counts: values in each range, one more than bounds.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Values up to each bound, and last the count of all."""
        return list(accumulate(self.counts))


class Histogram:
    """Counts values. Thread-safe.

    Args:
        bounds: upper bounds of the ranges, increasing.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, as often as it occurred."""
        index = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[index] += times
            self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """What was counted so far."""
        with self._lock:
            return HistogramCounts(self._bounds, tuple(self._counts), self._total)
