"""What a request may ask of the queue, and what happens when it is full, too slow, or the server stops."""

import asyncio
import json
import threading
import time
from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.generation import DeltaBridge
from tokenspeed_jax.serve.metrics import ServerMetrics

from .fake_engine import FakeEngine
from .test_lifecycle import eventually

COMPLETION = ("/v1/completions", {"model": "fake/model", "prompt": "abc"})
CHAT = ("/v1/chat/completions", {"model": "fake/model", "messages": [{"role": "user", "content": "x"}]})


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_priority_and_salt_reach_the_engine(client: TestClient, engine: FakeEngine, path: str, body: dict) -> None:
    for extra, options in (
        ({}, RequestOptions()),
        ({"priority": None, "cache_salt": None}, RequestOptions()),
        ({"priority": -3, "cache_salt": "tenant"}, RequestOptions(-3, "tenant")),
    ):
        assert client.post(path, json=body | extra).status_code == 200
        assert engine.options.pop() == options


@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_a_full_queue_is_429_until_there_is_room(engine: FakeEngine, path: str, body: dict) -> None:
    with TestClient(create_app(engine, ServerConfig(max_queued_requests=2))) as client:
        for queued in (2, 3):
            engine.num_queued_requests = queued
            for stream in (False, True):
                reply = client.post(path, json=body | {"stream": stream})
                assert reply.status_code == 429
                assert int(reply.headers["retry-after"]) > 0
                error = reply.json()["error"]
                assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "queue_full", None)
                assert "--max-queued-requests" in error["message"]
        assert engine.submitted == []
        assert client.get("/health").status_code == 200
        engine.num_queued_requests = 1
        assert client.post(path, json=body).status_code == 200


def test_a_batch_larger_than_the_queue_is_taken_whole(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(max_queued_requests=2))) as client:
        reply = client.post("/v1/completions", json={"model": "fake/model", "prompt": ["a", "b", "c", "d"]})
        assert len(reply.json()["choices"]) == 4


def test_a_queue_that_fills_while_the_prompt_is_tokenised_refuses_it(engine: FakeEngine) -> None:
    encode = engine.tokenizer.encode

    def slow_encode(*args):
        engine.num_queued_requests = 2
        return encode(*args)

    engine.tokenizer.encode = slow_encode
    with TestClient(create_app(engine, ServerConfig(max_queued_requests=2))) as client:
        assert client.post(COMPLETION[0], json=COMPLETION[1]).status_code == 429
    assert engine.submitted == []


def test_a_request_past_its_deadline_is_aborted_and_says_so(engine: FakeEngine) -> None:
    engine.allow(3)
    path, body = "/v1/completions", COMPLETION[1] | {"prompt": ["a", "b"], "n": 2}
    with TestClient(create_app(engine, ServerConfig(request_timeout=0.2))) as client:
        reply = client.post(path, json=body)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "request_timeout"
        assert "--request-timeout" in reply.json()["error"]["message"]
        assert reply.headers["x-should-retry"] == "false"
        stream = client.post(path, json=body | {"stream": True})
        *_, last = [block for block in stream.text.split("\n\n") if block]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        assert '"text":"Hello"' in stream.text
        assert "[DONE]" not in stream.text
        assert engine.stats().running == 0
        assert len(set(engine.aborted)) == 4


def test_a_request_within_its_deadline_is_not_aborted_later(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(request_timeout=0.3))) as client:
        for stream in (False, True):
            assert "error" not in client.post(COMPLETION[0], json=COMPLETION[1] | {"stream": stream}).text
        time.sleep(0.4)
        assert client.get("/health").status_code == 200
    assert engine.aborted == []


def in_bridge(engine: FakeEngine, timeout: float, act: Callable) -> Admission:
    """Runs `act(bridge)` on a loop to which the bridge delivers."""

    async def run() -> Admission:
        admission = Admission(engine, 10)
        bridge = DeltaBridge(engine, ServerMetrics(engine, "fake"), admission, timeout)
        async with bridge.attached():
            await act(bridge)
        return admission

    return asyncio.run(run())


def test_a_deadline_frees_the_engine_though_nobody_reads_the_reply(engine: FakeEngine) -> None:
    engine.allow(3)

    async def act(bridge: DeltaBridge) -> None:
        params = SamplingParams(max_tokens=50)
        generation = bridge.open([[5]], params, request_id="r", keeps_output=False, renamed={})
        await asyncio.sleep(0.3)
        assert engine.stats().running == 0
        with pytest.raises(ApiError, match="request-timeout"):
            await generation.finish()
        generation.close()

    assert not in_bridge(engine, 0.1, act).open_requests
    assert engine.aborted == ["r-0"]


def test_a_reply_that_is_complete_has_no_deadline(engine: FakeEngine) -> None:
    async def act(bridge: DeltaBridge) -> None:
        generation = bridge.open([[5]], SamplingParams(), request_id="r", keeps_output=True, renamed={})
        await asyncio.sleep(0.3)
        assert (await generation.finish())[0].finish_reason == "stop"
        generation.close()

    in_bridge(engine, 0.1, act)
    assert engine.aborted == []


def test_a_draining_server_refuses_what_is_new_and_finishes_what_runs(engine: FakeEngine) -> None:
    config = ServerConfig()
    admission = Admission(engine, config.max_queued_requests)
    engine.allow(2)
    with TestClient(create_app(engine, config, admission)) as client:
        replies = []
        thread = threading.Thread(target=lambda: replies.append(client.post(COMPLETION[0], json=COMPLETION[1])))
        thread.start()
        eventually(lambda: engine.stats().running == 1)
        admission.drain()
        for reply in (client.get("/health"), client.post(CHAT[0], json=CHAT[1] | {"stream": True})):
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "server_draining"
            assert int(reply.headers["retry-after"]) > 0
        assert client.get("/metrics").status_code == 200
        assert len(admission.open_requests) == 1
        engine.allow(10**9)
        thread.join(30)
        assert replies[0].status_code == 200
        assert not admission.open_requests
