"""The last minutes, second by second: what the page's charts draw.

Kept whether somebody looks or not, so that who comes after an incident sees it; a second costs one `engine.stats()`.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields

from tokenspeed_jax.serve.served_engine import ServedEngine, ServedStats
from tokenspeed_jax.serve.status_page.latencies import RecentLatencies

SAMPLE_SECONDS = 1.0
MAX_SAMPLES = 300


@dataclass(frozen=True)
class Sample:
    """One second. Rates are per second of the time that really went by.

    Attributes:
        at: seconds since the server began to watch, when the sample ended.
        prompt_tokens, cached_tokens, generation_tokens: tokens per second of admitted prompts, those of them that came
            from the prefix cache, and generated.
        prefix_hit_share: share of the prompt tokens looked up in this second that were found; None without any.
        running, waiting: samples at the end of the second.
        kv_usage: share of the cache that running samples hold, then.
        first_token_p50 and so on: latencies that ended in this second, in seconds; None without any.
        step_seconds: mean time of a step, from dispatch to landing; None without any.
        steps: steps per second.
    """

    at: float
    prompt_tokens: float
    cached_tokens: float
    generation_tokens: float
    prefix_hit_share: float | None
    running: int
    waiting: int
    kv_usage: float
    first_token_p50: float | None
    first_token_p95: float | None
    between_tokens_p50: float | None
    between_tokens_p95: float | None
    step_seconds: float | None
    steps: float


class History:
    """The last `MAX_SAMPLES` samples; they are numbered from 1."""

    def __init__(self, engine: ServedEngine, latencies: RecentLatencies) -> None:
        self._engine = engine
        self._latencies = latencies
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._num_taken = 0
        self._began = self._last_time = time.monotonic()
        self._last: ServedStats = engine.stats()

    @property
    def age(self) -> float:
        """Seconds since the server began to watch."""
        return time.monotonic() - self._began

    def take(self) -> None:
        """Ends a sample and begins the next one."""
        now, stats = time.monotonic(), self._engine.stats()
        self._samples.append(self._sample(now - self._began, max(now - self._last_time, 1e-3), self._last, stats))
        self._num_taken += 1
        self._last_time, self._last = now, stats

    def since(self, number: int) -> Mapping[str, object]:
        """Samples behind the one of this number, by column, and the number of the last one.

        A number that has not been given out yet is another server's, and all samples are behind it.
        """
        fresh = self._num_taken - number if 0 <= number <= self._num_taken else self._num_taken
        samples = list(self._samples)[-fresh:] if fresh else []
        columns = {item.name: [getattr(sample, item.name) for sample in samples] for item in fields(Sample)}
        return {"last": self._num_taken, "columns": columns}

    def _sample(self, at: float, seconds: float, before: ServedStats, after: ServedStats) -> Sample:
        queried = after.prefix_query_tokens - before.prefix_query_tokens
        cached = after.cached_tokens - before.cached_tokens
        steps = after.steps - before.steps
        first, between = self._latencies.first_token.take(), self._latencies.between_tokens.take()
        return Sample(
            at=at,
            prompt_tokens=(after.prompt_tokens - before.prompt_tokens) / seconds,
            cached_tokens=cached / seconds,
            generation_tokens=(after.generation_tokens - before.generation_tokens) / seconds,
            prefix_hit_share=cached / queried if queried else None,
            running=after.running,
            waiting=after.waiting,
            kv_usage=after.kv_usage,
            first_token_p50=first.quantile(0.5),
            first_token_p95=first.quantile(0.95),
            between_tokens_p50=between.quantile(0.5),
            between_tokens_p95=between.quantile(0.95),
            step_seconds=(after.step_seconds_total - before.step_seconds_total) / steps if steps else None,
            steps=steps / seconds,
        )
