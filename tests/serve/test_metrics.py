"""What /metrics exposes: the values, vLLM's names and labels, and that the documentation lists exactly this."""

import re
import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.request_metrics import RequestMetrics, RequestWatch

from .fake_engine import FakeEngine
from .test_lifecycle import BODY, eventually, metric

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"\| `([a-z]+:\w+)`(?: \(`(\w+(?:`, `\w+)*)`\))? \| (gauge|counter|histogram) \| (.+) \|")

VLLM = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "request_success_total", "iteration_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "cache_config_info",
}  # fmt: skip
"""vLLM's own names of what both measure, V1, as its dashboards and routers read them."""


def exposed(page: str) -> dict[str, tuple[str, str, frozenset[str]]]:
    """Name -> type, help, and labels beyond those that all metrics have."""
    found = {}
    for family in text_string_to_metric_families(page):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert {"model_name", "engine"} <= labels, name
        found[name] = (family.type, family.documentation, frozenset(labels - {"model_name", "engine"}))
    return found


def test_the_documentation_lists_what_is_exposed_and_nothing_else(client: TestClient) -> None:
    client.post("/v1/completions", json=BODY)
    documented = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if match := ROW.fullmatch(line):
            labels = frozenset((match[2] or "").split("`, `")) - {""}
            assert match[1] not in documented, match[1]
            documented[match[1]] = (match[3], match[4], labels)
    assert documented == exposed(client.get("/metrics").text)


def test_what_vllm_measures_too_has_its_name(client: TestClient) -> None:
    names = [name.split(":") for name in exposed(client.get("/metrics").text)]
    assert {name for prefix, name in names if prefix == "vllm"} == VLLM
    assert {prefix for prefix, _ in names} == {"vllm", "tokenspeed"}


def test_the_engines_counters_are_shown(client: TestClient) -> None:
    tokens = client.post("/v1/completions", json=BODY | {"n": 2}).json()["usage"]["completion_tokens"]
    labels = {"model_name": "fake/model", "engine": "0"}
    for name, value in {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": tokens,
        "vllm:prefix_cache_queries_total": 3,
        "vllm:prefix_cache_hits_total": 3,
        "vllm:num_preemptions_total": 2,
        "vllm:iteration_tokens_total_count": 3,
        "vllm:iteration_tokens_total_sum": 12,
        "tokenspeed:arena_bytes": 4096,
        "tokenspeed:checkpoint_lost_tokens_total": 5,
        "tokenspeed:compilations_after_warmup_total": 0,
        "tokenspeed:compile_seconds_total": 20.5,
        "tokenspeed:overlapped_steps_total": 6,
        "tokenspeed:late_steps_total": 2,
        "tokenspeed:overlap_efficiency": 0.75,
        "tokenspeed:weight_version": 4,
        "tokenspeed:step_time_seconds_count": 3,
        "tokenspeed:step_time_seconds_sum": 1.5,
    }.items():
        assert metric(client, name, **labels) == value, name
    assert metric(client, "vllm:request_success_total", finished_reason="stop") == 2
    assert metric(client, "vllm:request_success_total", finished_reason="abort") == 0
    assert metric(client, "tokenspeed:group_hit_tokens_total", group="layers.full") == 6
    assert metric(client, "tokenspeed:group_hit_tokens_total", group="layers.window") == 2
    buckets = [metric(client, "tokenspeed:step_time_seconds_bucket", le=le) for le in ("0.001", "1.0", "+Inf")]
    assert buckets == [0, 2, 3]
    config = {"block_size": "16", "num_gpu_blocks": "16", "num_parents": "16", "enable_prefix_caching": "True"}
    assert metric(client, "vllm:cache_config_info", **config) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_every_sample_is_observed_once_it_has_ended(client: TestClient, engine: FakeEngine, stream: bool) -> None:
    body = {"model": "fake/model", "prompt": ["abc", "ab"], "n": 2, "max_tokens": 3, "stream": stream}
    assert client.post("/v1/completions", json=body).status_code == 200
    for name, count, total in (
        ("time_to_first_token_seconds", 4, None),
        ("inter_token_latency_seconds", 8, None),
        ("request_time_per_output_token_seconds", 4, None),
        ("e2e_request_latency_seconds", 4, None),
        ("request_queue_time_seconds", 4, None),
        ("request_prefill_time_seconds", 4, None),
        ("request_decode_time_seconds", 4, None),
        ("request_inference_time_seconds", 4, None),
        ("request_prompt_tokens", 4, 2 * 3 + 2 * 2),
        ("request_generation_tokens", 4, 12),
        ("request_params_max_tokens", 4, 12),
        ("request_max_num_generation_tokens", 2, 6),
        ("request_params_n", 2, 4),
    ):
        assert metric(client, f"vllm:{name}_count") == count, name
        assert total is None or metric(client, f"vllm:{name}_sum") == total, name


def test_a_request_that_is_aborted_has_no_end_to_observe(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": BODY})
    thread.start()
    eventually(lambda: metric(client, "vllm:inter_token_latency_seconds_count") == 1)
    engine.abort(engine._samples[0].request_id)
    thread.join(30)
    assert metric(client, "vllm:request_success_total", finished_reason="abort") == 1
    assert metric(client, "vllm:time_to_first_token_seconds_count") == 1
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_params_n"):
        assert metric(client, f"vllm:{name}_count") == 0, name


def sums(metrics: RequestMetrics) -> dict[str, tuple[float, float]]:
    """Name -> count and sum."""
    found = {}
    for family in metrics.collect():
        values = {sample.name: sample.value for sample in family.samples}
        found[family.name.removeprefix("vllm:")] = (values[family.name + "_count"], values[family.name + "_sum"])
    return found


def test_the_times_of_a_sample_are_those_between_its_moments() -> None:
    metrics = RequestMetrics("m", 4096)
    watch = RequestWatch(metrics, [[1, 2, 3]], SamplingParams(max_tokens=None))
    start = watch.times.submitted

    def delta(tokens: list[int], reason=None) -> RequestDelta:
        return RequestDelta("r", 0, [1, 2, 3], 0, tokens, finish_reason=reason, scheduled_at=start + 2)

    watch.take(0, delta([5]), start + 5)
    watch.take(0, delta([6, 7]), start + 6)
    watch.take(0, delta([8], "stop"), start + 9)
    expected = {
        "time_to_first_token_seconds": (1, 5),
        "inter_token_latency_seconds": (3, 4),
        "request_time_per_output_token_seconds": (1, 4 / 3),
        "e2e_request_latency_seconds": (1, 9),
        "request_queue_time_seconds": (1, 2),
        "request_prefill_time_seconds": (1, 3),
        "request_decode_time_seconds": (1, 4),
        "request_inference_time_seconds": (1, 7),
        "request_prompt_tokens": (1, 3),
        "request_generation_tokens": (1, 4),
        "request_max_num_generation_tokens": (1, 4),
        "request_params_n": (1, 1),
        "request_params_max_tokens": (1, 4093),
    }
    found = sums(metrics)
    assert found.keys() == expected.keys()
    for name, (count, total) in expected.items():
        assert found[name] == (count, pytest.approx(total)), name
