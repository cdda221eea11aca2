"""`/metrics`: the engine's counters, read when scraped, and latencies that the server observes itself."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed_jax.serve.served_engine import ServedEngine
from tokenspeed_jax.serve.status_page.latencies import RecentLatencies

PREFIX = "tokenspeed:"
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN_TOKENS_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_WHOLE_REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)

# (name, attribute of EngineStats, help)
_GAUGES = (
    ("num_requests_running", "running", "samples that hold cache blocks"),
    ("num_requests_waiting", "waiting", "samples that wait to be admitted"),
    ("kv_cache_usage", "kv_usage", "share of the cache referenced by running samples, 0 to 1"),
    ("arena_bytes", "arena_bytes", "bytes of the cache arena"),
)
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompt tokens of admitted requests"),
    ("generation_tokens", "generation_tokens", "generated tokens"),
    ("prefix_cache_queries", "prefix_query_tokens", "prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "cached_tokens", "prompt tokens taken from the prefix cache"),
    ("checkpoint_lost_tokens", "checkpoint_lost_tokens", "cached prompt tokens without a state snapshot at their end"),
    ("retractions", "retractions", "running samples that lost their blocks to others and started over"),
    ("compilations_after_warmup", "compilations_after_warmup", "programs compiled since the engine was ready"),
    ("steps", "steps", "steps landed"),
    ("step_seconds", "step_seconds_total", "time from dispatch to landing, summed over steps"),
)


class EngineCollector(Collector):
    """Reads `engine.stats()` once per scrape."""

    def __init__(self, engine: ServedEngine, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> list[Metric]:
        """No names in advance: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for family, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, attribute, text in metrics:
                metric = family(PREFIX + name, text, labels=["model_name"])
                metric.add_metric([self._model], float(getattr(stats, attribute)))
                yield metric
        finished = CounterMetricFamily(
            PREFIX + "request_finished", "samples that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for reason in sorted({"stop", "length", "abort", "error"} | set(stats.finished)):
            finished.add_metric([self._model, reason], stats.finished.get(reason, 0))
        yield finished


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Attributes:
        recent: the latencies once more, for the status page.
    """

    def __init__(self, engine: ServedEngine, model: str) -> None:
        self.recent = RecentLatencies()
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model))
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "from submission to the first token of a request", _FIRST_TOKEN_BUCKETS
        ).labels(model)
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "between two tokens of a sample", _BETWEEN_TOKENS_BUCKETS
        ).labels(model)
        self.whole_request = self._histogram(
            "e2e_request_latency_seconds", "from submission to the end of a request", _WHOLE_REQUEST_BUCKETS
        ).labels(model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)

    def timer(self, num_choices: int) -> "RequestTimer":
        """A timer that starts now."""
        return RequestTimer(self, num_choices)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Latencies of one HTTP request; times are monotonic seconds."""

    def __init__(self, metrics: ServerMetrics, num_choices: int) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._has_first = False
        self._last: list[float | None] = [None] * num_choices

    def observe(self, choice: int, num_tokens: int, now: float) -> None:
        """`num_tokens` more tokens of a choice; tokens that come together share the time since the last ones."""
        if num_tokens == 0:
            return
        if not self._has_first:
            self._has_first = True
            self._metrics.first_token.observe(now - self._start)
            self._metrics.recent.first_token.add(now - self._start)
        last = self._last[choice]
        if last is not None:
            for _ in range(num_tokens):
                self._metrics.between_tokens.observe((now - last) / num_tokens)
            self._metrics.recent.between_tokens.add((now - last) / num_tokens, num_tokens)
        self._last[choice] = now

    def finish(self, now: float) -> None:
        """Every choice has ended."""
        self._metrics.whole_request.observe(now - self._start)
