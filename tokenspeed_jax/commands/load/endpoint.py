"""A server as its client sees it: JSON requests, and streams of events, over HTTP/1.1.

Written on h11 alone, which the server has already: a load generator must cost less per event than the server does.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

_READ_BYTES = 1 << 16
_ERROR_BYTES = 400


class EndpointError(Exception):
    """The server cannot be reached, or answers something else than it should; the message says which."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens.

    Attributes:
        prefix: path in front of every route.
        headers: sent with every request.
    """

    host: str
    port: int
    tls: bool
    prefix: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def at(cls, url: str, api_key: str | None) -> "Endpoint":
        """The endpoint of "http://host:port", a final "/v1" allowed. Raises ValueError for anything else."""
        parts = urlsplit(url if url.isascii() and url.isprintable() and " " not in url else "")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        key = () if api_key is None else (("Authorization", f"Bearer {api_key}"),)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        headers = (("Host", parts.netloc.rpartition("@")[2]), ("Connection", "close"), *key)
        return cls(parts.hostname, port, tls, prefix, headers)

    async def get(self, path: str) -> Any:
        """The JSON of a GET. Raises `EndpointError`."""
        return await self._json("GET", path, b"")

    async def post(self, path: str, body: Any) -> Any:
        """The JSON of a POST. Raises `EndpointError`."""
        return await self._json("POST", path, msgspec.json.encode(body))

    async def _json(self, method: str, path: str, body: bytes) -> Any:
        async with self.connection() as connection:
            status = await connection.send(method, path, body)
            text = b"".join([part async for part in connection.parts()])
        if status != 200:
            raise EndpointError(f"{method} {path}: {_refusal(status, text)}")
        try:
            return json.loads(text)
        except ValueError:
            raise EndpointError(f"{method} {path}: the answer is no JSON") from None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator["Connection"]:
        """A connection for one request. Raises `EndpointError` when the server is not there or goes away."""
        try:
            context = ssl.create_default_context() if self.tls else None
            reader, writer = await asyncio.open_connection(self.host, self.port, ssl=context)
        except OSError as error:
            raise EndpointError(f"cannot connect to {self.host}:{self.port}: {error.strerror or error}") from None
        try:
            yield Connection(self, reader, writer)
        except (OSError, h11.RemoteProtocolError) as error:
            raise EndpointError(f"the connection was lost: {error}") from None
        finally:
            writer.close()


class Connection:
    """One request and its reply."""

    def __init__(self, endpoint: Endpoint, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._endpoint = endpoint
        self._reader = reader
        self._writer = writer
        self._protocol = h11.Connection(h11.CLIENT)

    async def send(self, method: str, path: str, body: bytes) -> int:
        """Sends the request and returns the status of the reply."""
        headers = [*self._endpoint.headers, ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        request = h11.Request(method=method, target=self._endpoint.prefix + path, headers=headers)
        for event in (request, h11.Data(body), h11.EndOfMessage()):
            self._writer.write(self._protocol.send(event) or b"")
        await self._writer.drain()
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event.status_code

    async def parts(self) -> AsyncIterator[bytes]:
        """The body of the reply, as it arrives."""
        while True:
            event = await self._event()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def payloads(self) -> AsyncIterator[bytes]:
        """The `data:` fields of a stream of events, without the final `[DONE]`."""
        rest = b""
        async for part in self.parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                payload = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and payload != b"[DONE]":
                    yield payload

    async def refusal(self, status: int) -> EndpointError:
        """What the body of a reply with this status says went wrong."""
        return EndpointError(_refusal(status, b"".join([part async for part in self.parts()])))

    async def _event(self) -> Any:
        while (event := self._protocol.next_event()) is h11.NEED_DATA:
            self._protocol.receive_data(await self._reader.read(_READ_BYTES))
        return event


def _refusal(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:_ERROR_BYTES].decode(errors="replace")
    return f"status {status}: {message}"
