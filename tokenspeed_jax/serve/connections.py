"""Connections to clients that may be hostile: how many there are, and how long one may take to ask for something."""

import asyncio
import logging
import resource
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from tokenspeed_jax.serve.errors import ApiError, too_many_connections

HEADER_BYTES = 64 * 1024
"""Most bytes of a request line and its headers."""
HEADER_SECONDS = 20.0
"""Time from a connection's first moment, or the first byte of a later request, to the end of the headers."""
_SPARE_FILES = 512
"""File descriptors for all else: weights, logs, sockets of the engine."""

_LOG = logging.getLogger(__name__)


class BoundedConnection(H11Protocol):
    """uvicorn's connection, with an end to what a client may keep open without asking for anything.

    Attributes:
        max_connections: those beyond are answered 503 and closed.
    """

    max_connections: int

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes the connection in, or turns it away."""
        super().connection_made(transport)
        self._deadline: asyncio.TimerHandle | None = None
        if len(self.connections) > self.max_connections:
            self._turn_away(too_many_connections(self.max_connections))
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Takes bytes; headers that are not complete have to be in time."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        error = ApiError(f"no complete request within {HEADER_SECONDS:g} s", status=408, code="request_timeout")
        self._deadline = self.loop.call_later(HEADER_SECONDS, self._turn_away, error)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _turn_away(self, error: ApiError) -> None:
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body)
        headers = {"content-type": "application/json", "connection": "close", **(error.headers or {})}
        reply = h11.Response(
            status_code=error.status,
            headers=[*headers.items(), ("content-length", str(len(body)))],
        )
        for part in (reply, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(cast("bytes", self.conn.send(part)))
        self.transport.close()


def bounded(max_connections: int) -> type[BoundedConnection]:
    """The connections of one server, as uvicorn takes them."""
    return cast(
        "type[BoundedConnection]", type("Connection", (BoundedConnection,), {"max_connections": max_connections})
    )


def uvicorn_limits(max_connections: int) -> dict[str, Any]:
    """Arguments of uvicorn's `Config` that bound its clients."""
    return {"http": bounded(max_connections), "h11_max_incomplete_event_size": HEADER_BYTES}


def raise_file_limit(max_connections: int) -> None:
    """Asks the system for a file descriptor per connection; warns where it gives fewer."""
    wanted = max_connections + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        _LOG.warning(
            "--max-connections %d: the system allows %d open files; raise it with `ulimit -n`", max_connections, hard
        )
