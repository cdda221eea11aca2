"""What the HTTP server costs on the host: beside `Engine` itself, per streamed chunk, and to the step loop.

    python bench/server.py MODEL [--case first-token streams] [--json FILE]

MODEL is a small checkpoint, such as tests/golden/tiny/llama. Clients run in a process of their own.

- first-token: one streamed request at a time, through the server and through `Engine.submit` by turns; medians.
- streams: a scripted step loop (host work in Python beside a step on the device, then 256 deltas) with 256 streaming
  clients, and with deltas that are dropped: chunks per second of wall clock; per second of the CPU that the server took
  for them, which other work on the machine does not change; and how much longer a step takes.
"""

import argparse
import asyncio
import json
import multiprocessing
import socket
import statistics
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn

from tokenspeed_jax import Engine, EngineConfig, RequestDelta, SamplingParams
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.cli import bind
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.connections import uvicorn_limits

STREAMS = 256
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
HOST_SECONDS = 0.003
"""Python of planning and landing in a scripted step."""
DEVICE_SECONDS = (0.1, 0.05, 0.025)
"""Of a scripted step: 2,560, 5,120 and 10,240 chunks a second are offered."""
ROUNDS = 5


class ScriptedEngine:
    """A real engine's public face, with samples that a thread of the benchmark drives."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.receivers: dict[str, Callable[[RequestDelta], None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, _prompt: list[int], _params: SamplingParams, *, request_id: str, **options: Any) -> str:
        """Takes a request, whose tokens `step` will bring."""
        self.receivers[request_id] = options["on_delta"]
        return request_id

    def abort(self, request_id: str) -> None:
        """Ends it."""
        self.receivers.pop(request_id, None)

    def step(self, *, is_last: bool) -> None:
        """One token for every request, on the calling thread."""
        for request_id, receiver in list(self.receivers.items()):
            delta = RequestDelta(request_id, 0, PROMPT, 0, [7], " word", finish_reason="length" if is_last else None)
            receiver(delta)
        if is_last:
            self.receivers.clear()


@contextmanager
def serving(engine: Any) -> Iterator[tuple[str, int]]:
    """Host and port of a server in a thread of this process."""
    config = ServerConfig(port=0)
    listener = bind(config)
    app = create_app(engine, config)
    options = uvicorn_limits(config.max_connections)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="on", ws="none", **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listener.getsockname()[:2]
    server.should_exit = True
    thread.join()


def request_body(tokens: int) -> bytes:
    """A streamed completion."""
    model = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    return json.dumps({"model": "bench"} | model).encode()


def _http(body: bytes, connection: str) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: {connection}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def first_tokens(address: tuple[str, int], requests: int, model: str) -> list[float]:
    """Client: seconds to the first event of a stream, one at a time over one connection; a bare socket, since the
    client's own work counts too."""
    seconds, request = [], _http(request_body(4).replace(b"bench", model.encode()), "keep-alive")
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(requests):
            start, data = time.perf_counter(), b""
            connection.sendall(request)
            while b"data: " not in data:
                data += connection.recv(1 << 16)
            seconds.append(time.perf_counter() - start)
            while not data.endswith(b"0\r\n\r\n"):
                data += connection.recv(1 << 16)
    return seconds


async def _stream(address: tuple[str, int], body: bytes) -> tuple[int, float, float]:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(_http(body, "close"))
    count, first, last = 0, 0.0, 0.0
    while data := await reader.read(1 << 16):
        if found := data.count(b"data: {"):
            last = time.perf_counter()
            first = first or last
            count += found
    writer.close()
    return count, first, last


def streams(address: tuple[str, int], tokens: int, model: str) -> tuple[int, float]:
    """Client: chunks of all streams together, and the seconds from the first to the last of them."""
    body = request_body(tokens).replace(b"bench", model.encode())

    async def all_of_them() -> list[tuple[int, float, float]]:
        return await asyncio.gather(*(_stream(address, body) for _ in range(STREAMS)))

    results = asyncio.run(all_of_them())
    first, last = min(item[1] for item in results), max(item[2] for item in results)
    return sum(item[0] for item in results), last - first


def client_process(pipe: Connection) -> None:
    """Does what it is told until it is told nothing more."""
    while (task := pipe.recv()) is not None:
        function, arguments = task
        pipe.send(function(*arguments))


class Client:
    """The process of the clients."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=client_process, args=(other,), daemon=True)
        self._process.start()

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins a task."""
        self._pipe.send((function, arguments))

    def result(self) -> Any:
        """Waits for what it brought."""
        return self._pipe.recv()

    def end(self) -> None:
        """Lets the process go."""
        self._pipe.send(None)
        self._process.join()


def measure_first_token(engine: Engine, client: Client) -> dict[str, float]:
    """Milliseconds, medians over rounds by turns."""
    served, direct = [], []
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with serving(engine) as address:
        for round_number in range(ROUNDS + 1):
            client.start(first_tokens, address, 100, engine.model_name)
            through_server = client.result()
            through_engine = [_first_token(engine, params) for _ in range(100)]
            if round_number:  # the first one warms up
                served += through_server
                direct += through_engine
    server_ms, engine_ms = statistics.median(served) * 1e3, statistics.median(direct) * 1e3
    return {"server_ms": server_ms, "engine_ms": engine_ms, "added_ms": server_ms - engine_ms}


def _first_token(engine: Engine, params: SamplingParams) -> float:
    arrived, done = [], threading.Event()

    def note(delta: RequestDelta) -> None:
        arrived.append(time.perf_counter())
        if delta.finish_reason:
            done.set()

    start = time.perf_counter()
    engine.submit(PROMPT, params, on_delta=note)
    done.wait()
    return arrived[0] - start


class StepLoop:
    """A step loop as the engine's is: the device works on one step while the host lands the one before.

    Args:
        device_seconds: of a step.
    """

    def __init__(self, scripted: ScriptedEngine, device_seconds: float) -> None:
        self._scripted = scripted
        self._device_seconds = device_seconds

    def run(self, steps: int) -> float:
        """Delivers a token to every request in each step; the mean seconds of a step."""
        start = time.perf_counter()
        running_until = start
        for number in range(steps):
            _work(HOST_SECONDS)
            landed_at = running_until
            running_until = max(running_until, time.perf_counter()) + self._device_seconds
            if (wait := landed_at - time.perf_counter()) > 0:
                time.sleep(wait)
            self._scripted.step(is_last=number == steps - 1)
        return (time.perf_counter() - start) / steps


def _work(seconds: float) -> None:
    """Python that holds the interpreter, of a fixed amount: what `seconds` hold when nothing disturbs."""
    for _ in range(int(seconds * _TURNS_PER_SECOND)):
        pass


def _turns_per_second() -> float:
    best = min(timeit.repeat("for _ in range(200_000): pass", number=1, repeat=20))
    return 200_000 / best


_TURNS_PER_SECOND = _turns_per_second()


def measure_streams(engine: Engine, client: Client, device_seconds: float) -> dict[str, float]:
    """Chunks per second, the server's CPU for them, and how much longer a step takes than with dropped deltas."""
    scripted, steps = ScriptedEngine(engine), max(40, int(3 / device_seconds))
    loop = StepLoop(scripted, device_seconds)
    dropped, streaming, rates, cpu = [], [], [], []
    with serving(scripted) as address:
        for _ in range(ROUNDS):
            scripted.receivers = {str(index): lambda _delta: None for index in range(STREAMS)}
            before = time.process_time()
            dropped.append(loop.run(steps))
            cpu_dropped = time.process_time() - before
            client.start(streams, address, steps, engine.model_name)
            while len(scripted.receivers) < STREAMS:
                time.sleep(0.01)
            time.sleep(0.5)
            before = time.process_time()
            streaming.append(loop.run(steps))
            chunks, seconds = client.result()
            rates.append(chunks / seconds)
            cpu.append(chunks / (time.process_time() - before - cpu_dropped))
    # The shortest rounds: whatever else the machine does only adds to a step.
    return {
        "offered_per_s": STREAMS / device_seconds,
        "chunks_per_s": statistics.median(rates),
        "chunks_per_cpu_s": statistics.median(cpu),
        "step_ms_dropped": min(dropped) * 1e3,
        "step_ms_streaming": min(streaming) * 1e3,
        "slower_by": min(streaming) / min(dropped) - 1,
    }


def main() -> None:
    """Measures and prints one JSON object per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--case", nargs="+", choices=("first-token", "streams"), default=("first-token", "streams"))
    parser.add_argument("--json", help="also write the results to this file")
    options = parser.parse_args()
    config = EngineConfig(
        model=options.model, dtype="float32", max_num_seqs=4, max_num_batched_tokens=64, disable_progress_bars=True,
        kv_cache_memory_bytes=16 << 20,
    )  # fmt: skip
    client, results = Client(), {}
    with Engine(config) as engine:
        if "first-token" in options.case:
            results["first-token"] = measure_first_token(engine, client)
        if "streams" in options.case:
            for seconds in DEVICE_SECONDS:
                results[f"streams, steps of {seconds * 1e3:g} ms"] = measure_streams(engine, client, seconds)
    client.end()
    for name, figures in results.items():
        print(name, json.dumps({key: round(value, 4) for key, value in figures.items()}))
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
