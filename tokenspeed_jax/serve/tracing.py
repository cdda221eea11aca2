"""One OpenTelemetry span per request, under the attribute names that vLLM uses.

A span is made when its request ends, from the times that were noted on the way, and handed to the SDK's queue. A thread
of the SDK exports what is there; when the queue is full, as with a collector that cannot be reached, spans are dropped.
The packages are imported by those who trace, and by nobody else.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tokenspeed_jax import __version__
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.request_times import RequestTimes
from tokenspeed_jax.serve.trace_endpoint import TraceEndpoint

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.util.types import AttributeValue

_LOG = logging.getLogger(__name__)

SPAN_NAME = "llm_request"
CLIENT_GONE = "client_disconnected"
"""What went wrong with a request whose client left."""
_FLUSH_SECONDS = 3.0
"""Time for the last spans to leave when the server stops."""
_EXPORT_SECONDS = 10.0

type OnEnd = Callable[[str | None], None]
"""Told once of a request's end: None, or what went wrong."""


class RequestTracer:
    """Makes spans and exports them. Belongs to the event loop.

    Args:
        model: the name that requests call the model by.

    Raises:
        ConfigError: OpenTelemetry's packages are not installed.
    """

    def __init__(self, endpoint: TraceEndpoint, model: str) -> None:
        make_exporter = endpoint.exporter()
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        options = {"insecure": True} if endpoint.protocol == "grpc" else {}
        exporter = make_exporter(endpoint=endpoint.address, timeout=_EXPORT_SECONDS, **options)
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenspeed_jax", __version__)
        self._propagator = TraceContextTextMapPropagator()
        # It would warn of every malformed part of `tracestate`, which clients write.
        logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
        self._model = model

    def follow(self, request_id: str, times: RequestTimes, params: SamplingParams, headers: Mapping[str, str]) -> OnEnd:
        """What to call when this request ends.

        Args:
            headers: those of the HTTP request; `traceparent` and `tracestate` name the span that it is a part of.
        """
        parent = self._propagator.extract(headers)

        def end(failure: str | None) -> None:
            attributes = {"gen_ai.request.id": request_id, "gen_ai.response.model": self._model}
            attributes |= _parameters(params) | _usage(times)
            try:
                self._emit(parent, times, attributes, failure)
            except Exception:
                _LOG.exception("request %s could not be traced", request_id)

        return end

    def _emit(
        self, parent: "Context", times: RequestTimes, attributes: "dict[str, AttributeValue]", failure: str | None
    ) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        now = time.monotonic()
        end = now if failure is not None or times.last_token is None else times.last_token
        to_wall = time.time_ns() - _nanoseconds(now)
        span = self._tracer.start_span(
            SPAN_NAME,
            context=parent,
            kind=SpanKind.SERVER,
            attributes=attributes | _latencies(times, end),
            start_time=to_wall + _nanoseconds(times.submitted),
        )
        moments = {"queued": times.submitted, "scheduled": times.scheduled, "first_token": times.first_token}
        for name, moment in moments.items():
            if moment is not None:
                span.add_event(name, timestamp=to_wall + _nanoseconds(moment))
        if failure is not None:
            span.set_attribute("error.type", failure)
            span.set_status(StatusCode.ERROR, failure)
        span.end(to_wall + _nanoseconds(end))

    async def close(self) -> None:
        """Exports what is left, for a few seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, name="tokenspeed-last-spans", daemon=True)
        thread.start()
        give_up_at = time.monotonic() + _FLUSH_SECONDS
        while thread.is_alive() and time.monotonic() < give_up_at:
            await asyncio.sleep(0.02)


def _resource() -> "Resource":
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": "tokenspeed-jax", "service.version": __version__}
    # What OpenTelemetry's own variables say of the service has the last word, as in every program that it traces.
    return Resource.create(own | dict(OTELResourceDetector().detect().attributes))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _parameters(params: SamplingParams) -> "dict[str, AttributeValue]":
    found: dict[str, AttributeValue] = {
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
    }
    return found if params.max_tokens is None else found | {"gen_ai.request.max_tokens": params.max_tokens}


def _usage(times: RequestTimes) -> "dict[str, AttributeValue]":
    return {
        "gen_ai.usage.num_sequences": len(times.choices),
        "gen_ai.usage.prompt_tokens": times.prompt_tokens,
        "gen_ai.usage.completion_tokens": times.num_tokens,
        "gen_ai.response.finish_reasons": [choice.finish_reason or "error" for choice in times.choices],
    }


def _latencies(times: RequestTimes, end: float) -> "dict[str, AttributeValue]":
    """Those whose ends were reached, in seconds; of several choices, from the first one's moments to the last token."""
    scheduled, first, last = times.scheduled, times.first_token, times.last_token
    found: dict[str, AttributeValue] = {"gen_ai.latency.e2e": end - times.submitted}
    if scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = scheduled - times.submitted
    if first is not None and last is not None:
        found["gen_ai.latency.time_to_first_token"] = first - times.submitted
        found["gen_ai.latency.time_in_model_decode"] = last - first
        if scheduled is not None:
            found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
            found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return found
