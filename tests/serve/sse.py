"""Reading of server-sent events in tests."""

import json
from collections.abc import Iterable
from itertools import chain
from typing import Any

from starlette.testclient import TestClient


def joined(parts: Iterable[list[Any]]) -> list[Any]:
    """The lists one after the other."""
    return list(chain.from_iterable(parts))


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The payloads of a stream, `[DONE]` as a string."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("\n\n")
    payloads = [block.removeprefix("data: ") for block in text.removesuffix("\n\n").split("\n\n")]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def named_events(client: TestClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The payloads of a stream whose events have names, which each payload repeats as its `type`."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        text = response.read().decode()
    payloads = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        payloads.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {payloads[-1]['type']}"
    return payloads
