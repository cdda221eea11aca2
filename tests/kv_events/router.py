"""What a router on vLLM's events does: receives them, asks for what it missed, and knows what is cached."""

import time
from collections.abc import Sequence
from typing import Any

import zmq

from .msgpack_reader import read

SECONDS = 20.0
END = b"\xff" * 8


class CacheModel:
    """The cache, from its events alone. Pages are known by their tokens; the engine's hashes only name them.

    Args:
        misses: whether it may not have been told of some pages: then it ignores what follows them.
    """

    def __init__(self, *, misses: bool = False) -> None:
        self.misses = misses
        self.block_size = 0
        self.page_of: dict[int, tuple[str, tuple[int, ...]]] = {}

    def apply(self, payload: bytes) -> None:
        """A batch, in vLLM's present encoding. An event that does not fit what is known fails the test."""
        _, events, rank = read(payload)
        assert rank == 0
        for event in events:
            getattr(self, event["type"])(event)

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        assert set(event) == {"type"}
        self.page_of.clear()

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        for name in event["block_hashes"]:
            if name not in self.page_of and self.misses:
                continue
            of, gone = self.page_of.pop(name)
            assert not any(salt == of and tokens[: len(gone)] == gone for salt, tokens in self.page_of.values())

    def BlockStored(self, event: dict[str, Any]) -> None:
        size, tokens = event["block_size"], event["token_ids"]
        assert size == self.block_size or not self.block_size
        self.block_size = size
        assert len(tokens) == size * len(event["block_hashes"])
        extra_keys = event.get("extra_keys") or [None]
        assert not any(extra_keys[1:])
        salt = extra_keys[0][0] if extra_keys[0] else ""
        before: tuple[int, ...] = ()
        if event["parent_block_hash"] is not None:
            if event["parent_block_hash"] not in self.page_of and self.misses:
                return
            salt, before = self.page_of[event["parent_block_hash"]]
        for index, name in enumerate(event["block_hashes"]):
            before += tuple(tokens[index * size : (index + 1) * size])
            assert name not in self.page_of
            assert (salt, before) not in self.page_of.values()
            self.page_of[name] = (salt, before)

    def hit(self, prompt: Sequence[int], salt: str = "") -> int:
        """Tokens of the prompt that are cached; its last token never counts."""
        known = set(self.page_of.values())
        hit = 0
        while self.block_size and hit + self.block_size < len(prompt):
            if (salt, tuple(prompt[: hit + self.block_size])) not in known:
                break
            hit += self.block_size
        return hit


class Subscriber:
    """A SUB socket, and a DEALER for what was missed. Closed by leaving the context."""

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", hwm: int = 1000) -> None:
        context = zmq.Context.instance()
        self.events = context.socket(zmq.SUB)
        self.events.setsockopt(zmq.RCVHWM, hwm)
        self.events.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.events.connect(endpoint)
        self.missed = context.socket(zmq.DEALER)
        if replay_endpoint is not None:
            self.missed.connect(replay_endpoint)

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.events.close(linger=0)
        self.missed.close(linger=0)

    def receive(self, seconds: float = SECONDS) -> tuple[bytes, int, bytes] | None:
        """Topic, sequence number and payload of the next message; None if none comes in time."""
        if not self.events.poll(int(seconds * 1000)):
            return None
        topic, number, payload = self.events.recv_multipart()
        assert len(number) == 8
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """What the publisher still has from `first` on."""
        return self.ask(b"", first.to_bytes(8, "big"))

    def ask(self, *request: bytes) -> list[tuple[int, bytes]]:
        """The answer to any request, up to the end marker."""
        self.missed.send_multipart(request)
        answer = []
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            assert self.missed.poll(int(SECONDS * 1000)), "no answer to a replay request"
            *envelope, number, payload = self.missed.recv_multipart()
            assert envelope == list(request[:-1])
            if number == END:
                assert payload == b""
                return answer
            answer.append((int.from_bytes(number, "big"), payload))
        raise AssertionError("an answer without an end")
