"""Traces: one span per request reaches an OpenTelemetry collector, and no collector can hurt a request."""

import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from starlette.testclient import TestClient

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.serve import tracing
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.options import parse_options
from tokenspeed_jax.serve.trace_endpoint import TraceEndpoint

from .fake_engine import FakeEngine
from .test_lifecycle import eventually

BODY = {"model": "fake/model", "prompt": ["abc", "ab"], "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.75}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What a collector was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: list[str] = []
        self.url = ""

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            self.services += [
                item.value.string_value for item in resource.resource.attributes if item.key == "service.name"
            ]
            for scope in resource.scope_spans:
                self.spans += scope.spans


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    yield collector
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            collector.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), server)
    collector.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield collector
    server.stop(None)


@contextmanager
def traced(engine: FakeEngine, url: str) -> Iterator[TestClient]:
    """A server that traces; what it still has is sent at the end."""
    config = ServerConfig(otlp_traces_endpoint=url, request_timeout=5.0)
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        yield client


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return [plain(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, str(kind))


def attributes(span: Span) -> dict[str, object]:
    return {item.key: plain(item.value) for item in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [http_collector, grpc_collector])
def test_a_request_is_one_span_with_vllms_attributes(engine: FakeEngine, make, stream: bool) -> None:
    before = time.time_ns()
    with make() as collector:
        with traced(engine, collector.url) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            reply = client.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
            assert reply.status_code == 200
        (span,) = collector.spans
    assert set(collector.services) == {"tokenspeed-jax"}
    assert (span.name, span.kind, span.status.code) == ("llm_request", Span.SPAN_KIND_SERVER, Status.STATUS_CODE_UNSET)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(span)
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.request.id": reply.headers["x-request-id"],
        "gen_ai.response.model": "fake/model",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.usage.num_sequences": 4,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.response.finish_reasons": ["length"] * 4,
    }
    assert [event.name for event in span.events] == ["queued", "scheduled", "first_token"]
    moments = [before, *(event.time_unix_nano for event in span.events), span.end_time_unix_nano, time.time_ns()]
    assert moments == sorted(moments)
    assert span.start_time_unix_nano == span.events[0].time_unix_nano
    queued, scheduled, first, end = (moment / 1e9 for moment in moments[1:-1])
    assert latencies == {
        "gen_ai.latency.time_in_queue": pytest.approx(scheduled - queued, abs=1e-5),
        "gen_ai.latency.time_to_first_token": pytest.approx(first - queued, abs=1e-5),
        "gen_ai.latency.e2e": pytest.approx(end - queued, abs=1e-5),
        "gen_ai.latency.time_in_model_prefill": pytest.approx(first - scheduled, abs=1e-5),
        "gen_ai.latency.time_in_model_decode": pytest.approx(end - first, abs=1e-5),
        "gen_ai.latency.time_in_model_inference": pytest.approx(end - scheduled, abs=1e-5),
    }


@pytest.mark.parametrize(
    "header", [None, "", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}", "€" * 9]
)
def test_a_request_without_a_usable_parent_begins_a_trace(engine: FakeEngine, header: str | None) -> None:
    with http_collector() as collector:
        with traced(engine, collector.url) as client:
            headers = {} if header is None else {"traceparent": header.encode()}
            assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        (span,) = collector.spans
    assert span.parent_span_id == b""
    assert span.trace_id.hex() != TRACE


def test_a_malformed_trace_state_leaves_no_lines_in_the_log(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with http_collector() as collector:
        with traced(engine, collector.url) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "=,a=b,!,a=" + "x" * 300}
            assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        (span,) = collector.spans
    assert span.parent_span_id.hex() == PARENT
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_parent_that_is_not_sampled_is_not_traced(engine: FakeEngine) -> None:
    with http_collector() as collector:
        with traced(engine, collector.url) as client:
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        assert collector.spans == []


def test_what_went_wrong_is_the_spans_error(engine: FakeEngine) -> None:
    engine.allow(1)
    with http_collector() as collector:
        with traced(engine, collector.url) as client:
            refused = client.post("/v1/completions", json=BODY | {"prompt": [[]]})
            assert refused.status_code == 400  # it never was a request to the engine
            threads = [threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": BODY})]
            threads[0].start()
            eventually(lambda: engine.stats().running == 4)
            eventually(lambda: engine.stats().generation_tokens == 4)
            engine.die()
            threads[0].join(30)
        (span,) = collector.spans
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "engine_failed")
    found = attributes(span)
    assert found["error.type"] == "engine_failed"
    assert "error" in found["gen_ai.response.finish_reasons"]
    assert {event.name for event in span.events} == {"queued", "scheduled", "first_token"}


@contextmanager
def silent_listener() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("address", ["http://{}/v1/traces", "grpc://{}"])
@pytest.mark.parametrize("answers", [False, True])
def test_a_collector_that_is_away_or_silent_delays_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, address: str, answers: bool
) -> None:
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 0.2)
    # A batch is sent as soon as there is one, so that the sender is busy while requests come and go.
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    with silent_listener() as host:
        with traced(engine, address.format(host if answers else "127.0.0.1:9")) as client:
            for _ in range(12):
                start = time.monotonic()
                assert client.post("/v1/completions", json=BODY).status_code == 200
                assert time.monotonic() - start < 2
            start = time.monotonic()
        assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("grpc://collector:4317", TraceEndpoint("grpc", "collector:4317")),
        ("grpc://[::1]:4317", TraceEndpoint("grpc", "[::1]:4317")),
        ("http://collector:4318/v1/traces", TraceEndpoint("http", "http://collector:4318/v1/traces")),
        ("https://collector/otlp/v1/traces", TraceEndpoint("http", "https://collector/otlp/v1/traces")),
    ],
)
def test_the_address_says_the_protocol(text: str, endpoint: TraceEndpoint) -> None:
    assert ServerConfig(otlp_traces_endpoint=text).trace_endpoint == endpoint


@pytest.mark.parametrize(
    "text",
    ["", "collector", "localhost:4317", "http://collector:4318", "http://collector:4317/", "grpc://collector",
     "grpc://collector:4317/v1/traces", "http:///v1/traces", "ftp://collector/x", "http://[/v1", "grpc://c:99999",
     "http://user:secret@collector/v1/traces"],
)  # fmt: skip
def test_an_address_that_says_no_protocol_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint") as refusal:
        ServerConfig(otlp_traces_endpoint=text)
    assert refusal.value.field == "otlp_traces_endpoint"


@pytest.mark.parametrize(("scheme", "package"), [("grpc://c:1", "grpc"), ("http://c/v1", "http")])
def test_traces_without_their_packages_are_refused(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{package}.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tokenspeed-jax\[otel\]"):
        ServerConfig(otlp_traces_endpoint=scheme)


def test_both_names_of_the_option_mean_the_same() -> None:
    for name in ("--otlp-traces-endpoint", "--otlp-endpoint"):
        _, config = parse_options(["--model", "m", name, "grpc://collector:4317"])
        assert config == ServerConfig(otlp_traces_endpoint="grpc://collector:4317")
