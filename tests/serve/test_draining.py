"""How the process ends: it drains on a signal, stops at once on a second one, and never outlives its engine."""

import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_jax.serve.http_server import ENGINE_FAILED

from ..e2e.server_process import ServerProcess
from .test_lifecycle import eventually

BODY = {"model": "fake/model", "prompt": "abc", "ignore_eos": True}
PROGRAM = (str(Path(__file__).with_name("fake_server.py")),)


class FakeServer(ServerProcess):
    """A server whose engine does as it is told."""

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        """Status, parsed body and headers of a request over a connection of its own."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=30)
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
        connection.close()
        return response.status, json.loads(text), dict(response.headers)

    def wait_for_samples(self, count: int) -> None:
        eventually(lambda: self.metric("vllm:num_requests_running") == count)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def complete(server: FakeServer, pool: ThreadPoolExecutor, **extra: object) -> Future:
    return pool.submit(server.ask, "POST", "/v1/completions", BODY | extra)


def test_a_signal_refuses_new_requests_and_lets_running_ones_finish_or_time_out(pool: ThreadPoolExecutor) -> None:
    with FakeServer(["--drain-timeout=3"], PROGRAM) as server:
        short, endless = complete(server, pool, max_tokens=5), complete(server, pool, max_tokens=200)
        server.wait_for_samples(2)
        assert server.ask("GET", "/health")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.ask("GET", "/health")[0] == 503)
        for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
            status, body, headers = server.ask(method, path, BODY if method == "POST" else None)
            assert (status, body["error"]["code"]) == (503, "server_draining")
            assert int(headers["retry-after"]) > 0
        server.tell("allow 10")
        assert short.result()[0] == 200
        status, body, _ = endless.result()
        assert (status, body["error"]["code"]) == (503, "request_aborted")
        assert server.wait() == 0, "".join(server.output)
    assert "Traceback" not in "".join(server.output)


def test_a_second_signal_stops_at_once(pool: ThreadPoolExecutor) -> None:
    with FakeServer(["--drain-timeout=600"], PROGRAM) as server:
        endless = complete(server, pool, max_tokens=200)
        server.wait_for_samples(1)
        server.process.send_signal(signal.SIGTERM)
        eventually(lambda: server.ask("GET", "/health")[0] == 503)
        start = time.monotonic()
        assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert time.monotonic() - start < 5
        assert isinstance(endless.exception(), OSError | http.client.HTTPException)


def test_a_failed_engine_answers_everyone_and_ends_the_process_even_if_it_cannot_close(
    pool: ThreadPoolExecutor,
) -> None:
    with FakeServer([], PROGRAM) as server:
        replies = [complete(server, pool, max_tokens=200) for _ in range(3)]
        server.wait_for_samples(3)
        server.tell("hang")
        server.tell("fail")
        for reply in replies:
            status, body, _ = reply.result()
            assert (status, body["error"]["code"], body["error"]["type"]) == (500, "engine_failed", "server_error")
        for method, path in (("GET", "/health"), ("POST", "/v1/completions")):
            status, body, _ = server.ask(method, path, BODY if method == "POST" else None)
            assert (status, body["error"]["code"]) == (503, "engine_unavailable")
        assert server.wait() == ENGINE_FAILED, "".join(server.output)
