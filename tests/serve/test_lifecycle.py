"""Disconnects, engine failures, health: nothing keeps running that nobody waits for."""

import http.client
import json
import threading
import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from .fake_engine import FakeEngine

BODY = {"model": "fake/model", "prompt": "abc", "max_tokens": 100}


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def metric(client: TestClient, name: str, **labels: str) -> float:
    page = client.get("/metrics").text
    found = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, page)
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 4])
def test_a_client_that_leaves_frees_its_request(
    engine: FakeEngine, address: tuple[str, int], stream: bool, tokens_before: int
) -> None:
    engine.allow(tokens_before)
    connection = http.client.HTTPConnection(*address)
    body = BODY | {"prompt": ["a", "b"], "n": 2, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body))
    eventually(lambda: engine.stats().running == 4)
    if stream:
        # The stream is open by now, so the server is sending and not preparing when the client goes.
        response = connection.getresponse()
        if tokens_before:
            assert response.read1()
        response.close()
    connection.close()
    eventually(lambda: engine.stats().running == 0)
    assert len(set(engine.aborted)) == 2
    engine.allow(10**9)
    check = http.client.HTTPConnection(*address)
    check.request("POST", "/v1/completions", json.dumps(BODY))
    assert check.getresponse().status == 200


def test_a_finished_request_is_not_aborted(client: TestClient, engine: FakeEngine) -> None:
    for stream in (False, True):
        assert client.post("/v1/completions", json=BODY | {"stream": stream}).status_code == 200
    assert engine.aborted == []


@pytest.mark.parametrize("silently", [False, True])
def test_a_dying_engine_ends_every_request_with_an_error(
    client: TestClient, engine: FakeEngine, silently: bool
) -> None:
    engine.allow(3)
    replies: dict[bool, object] = {}

    def post(stream: bool) -> None:
        replies[stream] = client.post("/v1/completions", json=BODY | {"stream": stream})

    threads = [threading.Thread(target=post, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(len(sample.token_ids) for sample in engine._samples) == 6)
    engine.die(silently=silently)
    for thread in threads:
        thread.join(30)
    assert replies[False].status_code == 500
    assert replies[False].json()["error"]["code"] == "engine_failed"
    *_, last = [block for block in replies[True].text.split("\n\n") if block]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert '"text":"Hello"' in replies[True].text
    assert "[DONE]" not in replies[True].text

    assert client.get("/health").status_code == 503
    refused = client.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "engine_unavailable"
    assert set(refused.json()["error"]) == {"message", "type", "param", "code"}


def test_an_abort_by_a_healthy_engine_is_an_error(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    replies = []
    thread = threading.Thread(target=lambda: replies.append(client.post("/v1/completions", json=BODY)))
    thread.start()
    eventually(lambda: engine.stats().running == 1)
    engine.abort(engine._samples[0].request_id)
    thread.join(30)
    assert replies[0].status_code == 503
    assert replies[0].json()["error"]["code"] == "request_aborted"


def test_health_and_models(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").status_code == 200
    card = client.get("/v1/models").json()["data"][0]
    assert card["id"] == "fake/model"
    assert card["max_model_len"] == engine.max_model_len
    assert client.get("/v1/models/fake/model").json() == card


def test_running_requests_are_seen_while_they_run(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(1)
    thread = threading.Thread(target=client.post, args=("/v1/completions",), kwargs={"json": BODY})
    thread.start()
    eventually(lambda: metric(client, "vllm:num_requests_running") == 1)
    engine.allow(10**9)
    thread.join(30)
    assert metric(client, "vllm:num_requests_running") == 0
