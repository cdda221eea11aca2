"""What a client can do to a server with connections, headers, bodies and nesting, and what other pages may do."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.serve import bodies, connections
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.text.chat_template import ChatTemplate

from .conftest import listening
from .fake_engine import FakeEngine, byte_tokenizer

PATH = "/v1/completions"
BODY = {"model": "fake/model", "prompt": "abc"}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "x"}]}


def nested(depth: int, inner: str = "1") -> str:
    return '{"a":' * depth + inner + "}" * depth


@pytest.mark.parametrize("depth", [70, 900, 5000, 100_000])
@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", CHAT, "chat_template_kwargs"),
        ("/v1/chat/completions", CHAT, "tools"),
        ("/v1/chat/completions", CHAT, "response_format"),
        ("/v1/chat/completions", CHAT, "tool_choice"),
        ("/v1/chat/completions", CHAT, "structured_outputs"),
        (PATH, BODY, "logit_bias"),
        (PATH, BODY, "metadata"),
        ("/generate", {"input_ids": [5]}, "sampling_params"),
        ("/generate", {"input_ids": [5]}, "custom_params"),
        ("/v1/responses", {"model": "fake/model", "input": "x"}, "tools"),
        ("/v1/responses", {"model": "fake/model"}, "input"),
        ("/v1/messages", CHAT | {"max_tokens": 3}, "tools"),
        ("/tokenize", {"messages": CHAT["messages"]}, "chat_template_kwargs"),
    ],
)
def test_deep_nesting_is_a_400(client: TestClient, path: str, body: dict, name: str, depth: int) -> None:
    tool = '{"type": "function", "name": "f", "input_schema": %s}' if path == "/v1/messages" else None
    tool = tool or '{"type": "function", "function": {"name": "f", "parameters": %s}}'
    value = f"[{tool % nested(depth)}]" if name == "tools" else nested(depth)
    text = json.dumps(body)[:-1] + f', "{name}": {value}}}'
    reply = client.post(path, content=text.encode())
    assert reply.status_code in (400, 413), reply.text[:300]
    assert len(reply.text) < 2000


def test_template_variables_have_a_size(client: TestClient, engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig())) as client:
        for size, status in ((1000, 200), (300_000, 400)):
            extra = {"chat_template_kwargs": {"x": "y" * size}, "max_tokens": 3}
            reply = client.post("/v1/chat/completions", json=CHAT | extra)
            assert reply.status_code == status
    assert reply.json()["error"]["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", "a" * 1025), ("stop_token_ids", list(range(3, 1028)))],
)
def test_what_each_token_is_compared_with_has_a_size(client: TestClient, name: str, value: object) -> None:
    assert client.post(PATH, json=BODY | {name: value}).json()["error"]["param"] == name


@pytest.fixture
def quick(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A server with little patience and room for four connections."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.3)
    with listening(engine, ServerConfig(port=0, max_connections=4)) as address:
        yield address


def status_of(connection: socket.socket) -> int:
    """The status of the reply that ends the connection; 0 for none."""
    connection.settimeout(10)
    text = b""
    while chunk := connection.recv(4096):
        text += chunk
    return int(text.split()[1]) if text else 0


@pytest.mark.parametrize("first", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b\r\n"])
def test_connection_that_never_asks_is_closed(quick: tuple[str, int], first: bytes) -> None:
    with socket.create_connection(quick) as connection:
        connection.sendall(first)
        assert status_of(connection) == 408


def test_headers_that_trickle_in_after_a_request_are_given_up(quick: tuple[str, int]) -> None:
    connection = http.client.HTTPConnection(*quick)
    for _ in range(2):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        time.sleep(0.6)  # idle between requests is no offence
    connection.sock.sendall(b"GET /hea")
    assert status_of(connection.sock) == 408
    connection.close()


def test_body_that_trickles_in_is_given_up(quick: tuple[str, int], engine: FakeEngine) -> None:
    with socket.create_connection(quick) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert status_of(connection) == 408
    assert engine.submitted == []


def test_slow_replies_are_no_offence(quick: tuple[str, int], engine: FakeEngine) -> None:
    engine.allow(0)
    connection = http.client.HTTPConnection(*quick)
    connection.request("POST", PATH, json.dumps(BODY))
    time.sleep(0.8)
    engine.allow(10**9)
    assert connection.getresponse().status == 200


def test_connections_beyond_the_limit_are_told_so(quick: tuple[str, int]) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(quick))
        with socket.create_connection(quick) as fifth:
            assert status_of(fifth) == 503
    deadline = time.monotonic() + 10
    while True:
        connection = http.client.HTTPConnection(*quick)
        connection.request("GET", "/health")
        if connection.getresponse().status == 200:
            break
        assert time.monotonic() < deadline


def test_headers_have_a_size(quick: tuple[str, int]) -> None:
    with socket.create_connection(quick) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"b" * connections.HEADER_BYTES)
        assert status_of(connection) == 400


def test_pages_of_other_origins_are_let_in_only_when_named(client: TestClient, engine: FakeEngine) -> None:
    asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert client.options(PATH, headers=asks).status_code == 405
    assert "access-control-allow-origin" not in client.get("/health", headers=asks).headers
    config = ServerConfig(allowed_origins=("https://a.example",), api_key="k")
    with TestClient(create_app(engine, config)) as named:
        allowed = named.options(PATH, headers=asks | {"access-control-request-headers": "authorization"})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        reply = named.post(PATH, json=BODY, headers=asks | {"authorization": "Bearer k"})
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert named.post(PATH, json=BODY, headers=asks).status_code == 401
        other = named.options(PATH, headers=asks | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


SECRET, PROMPT = "the-key-nobody-sees", "a prompt\nof two lines"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_in_the_log_only_when_asked_for_and_keys_never(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, asked: bool, stream: bool
) -> None:
    caplog.set_level(logging.DEBUG)
    config = ServerConfig(api_key=SECRET, enable_log_requests=asked, max_log_len=8 if asked else None)
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        body = BODY | {"prompt": PROMPT, "stream": stream, "temperature": 0.25}
        for key in (SECRET, SECRET + "x"):
            client.post(PATH, json=body, headers={"authorization": f"Bearer {key}"})
        engine.submit = None  # a defect, whose traceback goes to the log
        assert client.post(PATH, json=body, headers={"authorization": f"Bearer {SECRET}"}).status_code == 500
    logged = "\n".join(map(logging.Formatter().format, caplog.records))
    assert SECRET not in logged
    assert PROMPT not in logged
    assert ("a prompt" in logged) is asked
    if asked:
        assert "temperature=0.25" in logged
        assert "of two" not in logged


def test_a_template_that_makes_much_of_a_short_body_leaves_the_event_loop(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{% for a in range(turns) %}{% if loop.last %}{{ a }}{% endif %}{% endfor %}"
    engine.tokenizer = byte_tokenizer(template=source)
    finished: list[tuple[str, float]] = []
    render = ChatTemplate.render

    def watched(*args: Any, **kwargs: Any) -> str:
        before = time.thread_time()
        try:
            return render(*args, **kwargs)
        finally:
            finished.append((threading.current_thread().name, time.thread_time() - before))

    monkeypatch.setattr(ChatTemplate, "render", watched)
    with TestClient(create_app(engine, ServerConfig(port=0))) as client:
        for turns in (3, 60_000):
            body = {"messages": CHAT["messages"], "chat_template_kwargs": {"turns": turns}}
            reply = client.post("/tokenize", json=body).json()
            assert engine.tokenizer.decode(reply["tokens"]) == str(turns - 1)
    (loop, _), (same_loop, held), (worker, _) = finished
    assert loop == same_loop != worker
    assert held < 0.05, "it is stopped after three milliseconds"
