"""`KVEventsConfig`: whether and where KV-cache events are published."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tokenspeed_jax.errors import ConfigError

Publisher = Literal["zmq", "null"]
EventEncoding = Literal["map", "array"]

_ENDPOINT = re.compile(r"tcp://(?P<host>[^/\s]+):(?P<port>\d{1,5}|\*)|ipc://.+|inproc://.+")
_MAX_QUEUE = 1 << 24


@dataclass(frozen=True)
class KVEventsConfig:
    """vLLM's `--kv-events-config`. Raises `ConfigError` for a value that cannot work, or that would have no effect.

    Attributes:
        enable_kv_cache_events: whether there are events.
        publisher: "zmq", or "null" for none; default: "zmq" if there are events.
        endpoint: of the socket that publishes, as `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`. It is bound, or
            with the host of a tcp endpoint named, connected to: a subscriber is bound there.
        replay_endpoint: where subscribers ask for batches that they missed; always bound. Default: nowhere.
        buffer_steps: latest batches that are kept for the replay.
        hwm: batches that may wait for one subscriber; what comes while so many wait is lost to it.
        max_queue_size: batches that may wait for the publisher. While so many do, further events stay with the
            scheduler, which merges them.
        topic: first part of every message.
        event_encoding: "map", events as vLLM has them now, or "array", as before June 2026.
    """

    enable_kv_cache_events: bool = False
    publisher: Publisher | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    event_encoding: EventEncoding = "map"

    def __post_init__(self) -> None:
        if not isinstance(self.enable_kv_cache_events, bool):
            raise _error("enable_kv_cache_events", "must be true or false", self.enable_kv_cache_events)
        if self.publisher is not None and self.publisher not in get_args(Publisher):
            raise _error("publisher", f"must be one of {', '.join(get_args(Publisher))}", self.publisher)
        if self.publisher is not None and (self.publisher == "zmq") != self.enable_kv_cache_events:
            state = "on" if self.enable_kv_cache_events else "off"
            raise _error("publisher", f"contradicts enable_kv_cache_events, which is {state}", self.publisher)
        if self.event_encoding not in get_args(EventEncoding):
            raise _error("event_encoding", f"must be one of {', '.join(get_args(EventEncoding))}", self.event_encoding)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_QUEUE:
                raise _error(name, f"must be an integer in [1, {_MAX_QUEUE}]", value)
        _check_text("topic", self.topic)
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint("replay_endpoint", self.replay_endpoint)
            if self.replay_endpoint == self.endpoint:
                raise _error("replay_endpoint", "must differ from endpoint", self.replay_endpoint)

    @property
    def binds(self) -> bool:
        """Whether the publishing socket is bound, and not connected to a subscriber that is."""
        match = _ENDPOINT.fullmatch(self.endpoint)
        host = match["host"] if match else None
        return host is None or host in ("*", "0.0.0.0") or "::" in host


def _check_endpoint(name: str, value: object) -> None:
    _check_text(name, value)
    match = _ENDPOINT.fullmatch(str(value))
    port = "*" if match is None else match["port"] or "*"
    if match is None or (port != "*" and int(port) > 65535):
        raise _error(name, "must be tcp://HOST:PORT, ipc://PATH or inproc://NAME", value)


def _check_text(name: str, value: object) -> None:
    try:
        if isinstance(value, str) and "\0" not in value and len(value.encode()) <= 1024:
            return
    except UnicodeEncodeError:
        pass
    raise _error(name, "must be text of at most 1024 bytes", value)


def _error(name: str, problem: str, value: object) -> ConfigError:
    return ConfigError(f"kv_events_config: {name} {problem}, got {value!r}", field="kv_events_config")
