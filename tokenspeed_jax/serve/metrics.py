"""`/metrics`: the engine's counters, read when scraped, and what the server observes of requests itself."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.engine_metrics import EngineCollector
from tokenspeed_jax.serve.request_metrics import RequestMetrics, RequestWatch
from tokenspeed_jax.serve.served_engine import ServedEngine


class ServerMetrics:
    """All metrics of one server, in a registry of its own.

    Args:
        model: the name that requests call the model by.

    Attributes:
        recent: latencies since somebody last took them, for the status page.
    """

    def __init__(self, engine: ServedEngine, model: str) -> None:
        self._requests = RequestMetrics(model, engine.max_model_len)
        self.recent = self._requests.recent
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(engine, model))
        self._registry.register(self._requests)

    def watch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> RequestWatch:
        """Begins to observe an HTTP request that is submitted now."""
        return RequestWatch(self._requests, prompts, params)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)
