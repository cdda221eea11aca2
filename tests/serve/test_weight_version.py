"""Every reply says which weights drew its newest token, whole and streaming, in every protocol."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from .fake_engine import FakeEngine
from .sse import events, named_events

MESSAGES = [{"role": "user", "content": "Hi"}]
MODEL = {"model": "fake/model"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**MODEL, "prompt": ["abc", "de"], "max_tokens": 5, "n": 2},
    "/v1/chat/completions": {**MODEL, "messages": MESSAGES, "max_tokens": 5, "n": 2},
    "/v1/responses": {**MODEL, "input": "Hi"},
    "/v1/messages": {**MODEL, "messages": MESSAGES, "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_whole_reply_has_it(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.weight_version = 12
    assert client.post(path, json=BODIES[path]).json()["weight_version"] == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_chunk_has_that_of_its_tokens(client: TestClient, engine: FakeEngine, path: str) -> None:
    engine.weight_version = 12
    *chunks, done = events(client, path, BODIES[path] | {"stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    assert len(chunks) > 5
    assert {chunk["weight_version"] for chunk in chunks} == {12}


def test_events_have_it_once_the_reply_has_ended(client: TestClient, engine: FakeEngine) -> None:
    engine.weight_version = 12
    last = named_events(client, "/v1/responses", BODIES["/v1/responses"])[-1]
    assert last["response"]["weight_version"] == 12
    *_, delta, stop = named_events(client, "/v1/messages", BODIES["/v1/messages"])
    assert (delta["type"], delta["weight_version"], stop) == ("message_delta", 12, {"type": "message_stop"})
