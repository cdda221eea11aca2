"""Many short requests of every protocol, a good part of them ill-behaved, and a look at what they left behind."""

import dataclasses
import http.client
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .conftest import ADMIN_KEY
from .server_process import ServerProcess

CLIENTS = 12
TIMEOUT = 120
"""Seconds after which a request that has no reply counts as a hang."""
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
SCHEMA = {
    "type": "object",
    "properties": {"dish": {"enum": ["soup", "fish"]}, "hot": {"type": "boolean"}},
    "required": ["dish", "hot"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "order", "parameters": SCHEMA}}]
BAD_BODIES = (
    b"", b"{", b"[]", b"\xff", b'{"a":' * 3000, b'{"model": "tiny", "prompt": "x", "colour": 1}',
    b'{"model": "tiny", "prompt": [99999999]}', b'{"model": "other", "prompt": "x"}',
    b'{"model": "tiny", "prompt": "x", "guided_regex": "("}', b'{"model": "tiny", "prompt": "x", "max_tokens": 100000}',
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a process holds of the system."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, process_id: int) -> "Resources":
        """As the kernel sees it now."""
        process = Path("/proc") / str(process_id)
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        kibibytes = int(status["VmRSS"].split()[0])
        return cls(kibibytes * 1024, len(list((process / "fd").iterdir())), int(status["Threads"]))


@dataclasses.dataclass
class Soak:
    """Puts load on a server, with the same requests for the same seed.

    Attributes:
        tools: whether the server was started with a parser of tool calls.
        outcomes: how many requests ended how, by status or manner.
    """

    server: ServerProcess
    tools: bool
    seed: int = 0
    outcomes: Counter[str] = dataclasses.field(default_factory=Counter)

    def run(self, requests: int) -> None:
        """Sends this many requests; raises AssertionError for a reply that there must not be, or none at all."""
        self.seed += 1
        lock = threading.Lock()
        with ThreadPoolExecutor(CLIENTS) as pool:
            for outcome in pool.map(self._one, [self.seed * 1_000_000 + index for index in range(requests)]):
                with lock:
                    self.outcomes[outcome] += 1

    def check_idle(self) -> None:
        """Every slot and block is free, and the slots are all usable."""
        deadline = time.monotonic() + 60
        busy = ("server_load", "num_reqs", "num_tokens", "num_used_blocks", "token_usage")
        while any((load := json.loads(self.server.get("/load")))[name] for name in busy):
            assert time.monotonic() < deadline, load
            time.sleep(0.05)
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert self.server.metric(f"vllm:{gauge}") == 0
        assert self.server.post("/flush_cache", {}, ADMIN_KEY) == (200, {"success": True})
        slots = json.loads(self.server.get("/server_info"))["engine_config"]["max_num_seqs"]
        body = {"input_ids": [5, 6], "sampling_params": {"n": slots, "max_new_tokens": 1500, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(self.server.post, "/generate", body | {"rid": "all-slots"})
            while json.loads(self.server.get("/load"))["num_running_reqs"] < slots:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert self.server.post("/abort_request", {"rid": "all-slots"}, ADMIN_KEY)[0] == 200
            assert reply.result()[0] == 200
        assert json.loads(self.server.get("/load"))["num_used_blocks"] == 0

    def resources(self) -> Resources:
        """What the idle server holds."""
        time.sleep(0.3)  # for sockets whose other end has just been closed
        return Resources.of(self.server.process.pid)

    def _one(self, seed: int) -> str:
        chance = random.Random(seed)
        path, body = self._request(chance)
        connection = http.client.HTTPConnection(self.server.url.removeprefix("http://"), timeout=TIMEOUT)
        try:
            manner = chance.choices(("reads", "leaves", "tears", "halves", "lies", "aborts"), (60, 10, 12, 4, 8, 6))[0]
            return getattr(self, f"_{manner}")(connection, path, body, chance)
        finally:
            connection.close()

    def _request(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        text = " ".join(chance.choices(WORDS, k=chance.randint(1, 30)))
        messages = [{"role": "user", "content": text}]
        common: dict[str, Any] = {
            "model": "tiny",
            "stream": chance.random() < 0.5,
            "temperature": chance.choice((0, 1)),
        }
        limit = {"max_tokens": chance.randint(1, 12)}
        kind = chance.choice(("completions", "chat", "responses", "messages", "generate", "grammar", "tools"))
        if kind == "completions":
            return "/v1/completions", common | limit | {"prompt": [text, text[::-1]], "n": chance.randint(1, 2)}
        if kind == "responses":
            return "/v1/responses", common | {"input": text, "max_output_tokens": limit["max_tokens"]}
        if kind == "messages":
            return "/v1/messages", common | limit | {"messages": messages}
        if kind == "generate":
            sampling = {"max_new_tokens": limit["max_tokens"], "temperature": common["temperature"]}
            return "/generate", {"text": text, "sampling_params": sampling, "stream": common["stream"]}
        chat = common | limit | {"messages": messages}
        if kind == "grammar":
            schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
            # Words of its own, so that grammars are compiled and not only found again.
            words = chance.sample(WORDS, 3)
            chat |= chance.choice(
                ({"response_format": schema}, {"guided_choice": words}, {"guided_regex": "[a-c]{2,5}"})
            )
        if kind == "tools" and self.tools:
            chat |= {"tools": TOOLS, "tool_choice": chance.choice(("auto", "required")), "max_tokens": 40}
        return "/v1/chat/completions", chat

    def _reads(self, connection: http.client.HTTPConnection, path: str, body: dict, _chance: random.Random) -> str:
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status == 200, (path, body, reply.status, text)
        assert b'"error":{' not in text, (path, body, text)
        return "streamed whole" if body["stream"] else "answered"

    def _leaves(self, connection: http.client.HTTPConnection, path: str, body: dict, chance: random.Random) -> str:
        connection.request("POST", path, json.dumps(body))
        time.sleep(chance.random() * 0.02)
        return "left before the reply"

    def _tears(self, connection: http.client.HTTPConnection, path: str, body: dict, _chance: random.Random) -> str:
        connection.request("POST", path, json.dumps(body | {"stream": True}))
        reply = connection.getresponse()
        assert reply.status == 200, (path, body, reply.status)
        reply.read(20)
        reply.close()
        return "left within the stream"

    def _halves(self, connection: http.client.HTTPConnection, path: str, body: dict, _chance: random.Random) -> str:
        text = json.dumps(body).encode()
        connection.putrequest("POST", path)
        connection.putheader("Content-Length", str(len(text)))
        connection.endheaders(text[: len(text) // 2])
        return "left within the body"

    def _lies(self, connection: http.client.HTTPConnection, path: str, _body: dict, chance: random.Random) -> str:
        connection.request("POST", path, chance.choice(BAD_BODIES))
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status in (400, 404), (path, reply.status, text)
        return f"refused with {reply.status}"

    def _aborts(self, connection: http.client.HTTPConnection, _path: str, _body: dict, chance: random.Random) -> str:
        rid = f"soak-{chance.random()}"
        body = {"input_ids": [5, 6, 7], "rid": rid, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        connection.request("POST", "/generate", json.dumps(body))
        for _ in range(200):  # until it is there to be aborted; it may also end by itself first
            if self.server.post("/abort_request", {"rid": rid}, ADMIN_KEY)[1]["num_aborted"]:
                break
            time.sleep(0.002)
        reply = connection.getresponse()
        text = reply.read()
        assert reply.status == 200, text
        return "aborted: " + json.loads(text)["meta_info"]["finish_reason"]["type"]
