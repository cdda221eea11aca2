"""`python -m tokenspeed_jax.serve` as a child process, watched through its output."""

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

START_SECONDS = 300
_READY = re.compile(r"Ready: (http://\S+)")


SERVE = ("-m", "tokenspeed_jax.serve")


def command(*options: str, program: Sequence[str] = SERVE) -> list[str]:
    """The command line of a server with these options; -P: the installed package, not what the folder has."""
    return [sys.executable, "-P", *program, *options]


class ServerProcess:
    """A running server; a context manager that stops it.

    Attributes:
        url: where it listens.
        output: lines it has printed so far, both streams together.

    Args:
        program: what Python runs: the server, or a script that starts it in a changed world.
    """

    def __init__(self, options: Sequence[str], program: Sequence[str] = SERVE) -> None:
        self.output: list[str] = []
        self._urls: queue.Queue[str | None] = queue.Queue()
        self.process = subprocess.Popen(
            command(*options, program=program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            url = self._urls.get(timeout=START_SECONDS)
        except queue.Empty:
            url = None
        if url is None:
            self.process.kill()
            self._reader.join()
            raise AssertionError("the server did not start:\n" + "".join(self.output))
        self.url = url

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if found := _READY.search(line):
                self._urls.put(found[1])
        self._urls.put(None)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal and returns the exit code; a server that does not end is killed and fails the test."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """The exit code, once the server has ended by itself; one that does not end is killed and fails the test."""
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("the server did not stop:\n" + "".join(self.output)) from None
        finally:
            self._reader.join()

    def get(self, path: str) -> str:
        """The body of a GET."""
        with urllib.request.urlopen(self.url + path, timeout=60) as reply:
            return reply.read().decode()

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and parsed body of a POST; `body` is JSON-encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def metric(self, name: str, label: str = "") -> float:
        """One value of /metrics, of the line whose labels contain `label`."""
        lines = [line for line in self.get("/metrics").splitlines() if line.startswith(name + "{") and label in line]
        assert len(lines) == 1, (name, lines)
        return float(lines[0].rsplit(" ", 1)[1])
