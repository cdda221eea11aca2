"""Latencies since somebody last asked, and their quantiles.

A latency counts in a bucket that is a twelfth of a doubling wide, so that a busy second costs no list to sort, and a
quantile is right within three hundredths.
"""

import math
from collections import Counter

_BUCKETS_PER_DOUBLING = 12
_SHORTEST = 1e-6


class LatencyCounts:
    """Latencies by bucket."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """`count` latencies of this length."""
        self._counts[math.floor(math.log2(max(seconds, _SHORTEST)) * _BUCKETS_PER_DOUBLING)] += count

    def take(self) -> "LatencyCounts":
        """What has been counted since the last call."""
        taken = LatencyCounts()
        taken._counts, self._counts = self._counts, Counter()
        return taken

    def quantile(self, share: float) -> float | None:
        """The latency in seconds that this share of all does not exceed; None when there are none.

        Args:
            share: in (0, 1].
        """
        rank = math.ceil(self._counts.total() * share)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return 2.0 ** ((bucket + 0.5) / _BUCKETS_PER_DOUBLING)
        return None


class RecentLatencies:
    """Those that the page draws.

    Attributes:
        first_token: from a request's submission to its first token.
        between_tokens: between two tokens of a sample.
    """

    def __init__(self) -> None:
        self.first_token = LatencyCounts()
        self.between_tokens = LatencyCounts()
