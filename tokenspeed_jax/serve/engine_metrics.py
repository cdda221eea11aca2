"""What /metrics says of the engine: its counters, read when scraped."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed_jax.serve.metric_families import ENGINE, LABELS, Definition, histogram_family
from tokenspeed_jax.serve.served_engine import ServedEngine, ServedStats

# Attribute of EngineStats -> metric.
_GAUGES = {
    "running": Definition("vllm:num_requests_running", "samples that hold cache blocks"),
    "waiting": Definition("vllm:num_requests_waiting", "samples that wait to be started"),
    "kv_usage": Definition("vllm:kv_cache_usage_perc", "share of the cache that running samples hold, 0 to 1"),
    "arena_bytes": Definition("tokenspeed:arena_bytes", "bytes of the cache arena; 0 while the engine sleeps"),
    "weight_version": Definition(
        "tokenspeed:weight_version", "version of the weights that the next step runs with; 0 for the checkpoint's own"
    ),
    "overlap_efficiency": Definition(
        "tokenspeed:overlap_efficiency",
        "overlapped steps as a share of overlapped and late ones, since the start; 1 when the device never waited",
    ),
}
_COUNTERS = {
    "prompt_tokens": Definition("vllm:prompt_tokens", "prompt tokens of started requests; a prompt counts once"),
    "generation_tokens": Definition("vllm:generation_tokens", "generated tokens"),
    "prefix_query_tokens": Definition("vllm:prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    "cached_tokens": Definition("vllm:prefix_cache_hits", "prompt tokens taken from the prefix cache"),
    "retractions": Definition(
        "vllm:num_preemptions", "retractions: running samples that lost their blocks to others and start again"
    ),
    "checkpoint_lost_tokens": Definition(
        "tokenspeed:checkpoint_lost_tokens",
        "prompt tokens whose keys and values were cached, computed again for want of a state snapshot at their end",
    ),
    "compilations_after_warmup": Definition(
        "tokenspeed:compilations_after_warmup", "programs compiled since the engine was ready; should stay 0"
    ),
    "compile_seconds": Definition("tokenspeed:compile_seconds", "seconds spent compiling, at start and since"),
    "overlapped_steps": Definition(
        "tokenspeed:overlapped_steps", "steps that were queued on the device before it was done with the one before"
    ),
    "late_steps": Definition(
        "tokenspeed:late_steps", "steps that reached a device that had run dry, although there was work"
    ),
    "kv_events_dropped": Definition(
        "tokenspeed:kv_events_dropped", "cached pages of which routers were never told, since they read too slowly"
    ),
}
_HISTOGRAMS = {
    "step_tokens": Definition("vllm:iteration_tokens_total", "tokens computed in a step"),
    "step_seconds": Definition(
        "tokenspeed:step_time_seconds", "from a step's dispatch, or the landing before it if later, to its landing"
    ),
}
_FINISHED = Definition("vllm:request_success", "samples that ended, by reason")
_GROUP_HITS = Definition(
    "tokenspeed:group_hit_tokens",
    "tokens that prompts took over from the cached blocks of each cache group, those of retracted samples included",
)
_CACHE_CONFIG = Definition("vllm:cache_config_info", "1; the labels say how the cache is set up")


class EngineCollector(Collector):
    """Reads `engine.stats()` once per scrape."""

    def __init__(self, engine: ServedEngine, model: str) -> None:
        self._engine = engine
        self._labels = [model, ENGINE]

    def describe(self) -> list[Metric]:
        """No names in advance: registering must not ask the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for family, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for attribute, definition in metrics.items():
                metric = family(definition.name, definition.text, labels=LABELS)
                metric.add_metric(self._labels, float(getattr(stats, attribute)))
                yield metric
        for attribute, definition in _HISTOGRAMS.items():
            yield histogram_family(definition, self._labels, getattr(stats, attribute))
        yield self._finished(stats)
        yield self._group_hits(stats)
        yield self._cache_config()

    def _finished(self, stats: ServedStats) -> Metric:
        metric = CounterMetricFamily(_FINISHED.name, _FINISHED.text, labels=[*LABELS, "finished_reason"])
        for reason in sorted({"stop", "length", "abort", "error"} | set(stats.finished)):
            metric.add_metric([*self._labels, reason], stats.finished.get(reason, 0))
        return metric

    def _group_hits(self, stats: ServedStats) -> Metric:
        metric = CounterMetricFamily(_GROUP_HITS.name, _GROUP_HITS.text, labels=[*LABELS, "group"])
        for group, tokens in stats.group_hit_tokens.items():
            metric.add_metric([*self._labels, group], tokens)
        return metric

    def _cache_config(self) -> Metric:
        report, config = self._engine.memory_report, self._engine.config
        shown = {
            "block_size": report.prefix_granularity,
            "num_gpu_blocks": report.token_capacity // report.prefix_granularity,
            "num_parents": report.num_parents,
            "parent_bytes": report.parent_bytes,
            "enable_prefix_caching": config.enable_prefix_caching,
            "gpu_memory_utilization": config.gpu_memory_utilization,
        }
        metric = GaugeMetricFamily(_CACHE_CONFIG.name, _CACHE_CONFIG.text, labels=[*LABELS, *shown])
        metric.add_metric([*self._labels, *map(str, shown.values())], 1)
        return metric
