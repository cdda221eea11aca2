"""A server whose every answer is given as bytes and pauses."""

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any, Self

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MODELS = {"data": [{"id": "m", "max_model_len": 4096}]}


def chunk(payload: Any) -> bytes:
    """One event of a stream as one HTTP chunk."""
    data = b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: str, body: bytes) -> bytes:
    """A reply with a length."""
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


class ScriptedServer:
    """Listens on `url`; answers `GET /v1/models` with `MODELS` and anything else with `script`.

    Attributes:
        script: bytes to send, and seconds to wait in between; the connection is closed afterwards.
        bodies: of the requests, parsed.
        most_open: most requests that were open at a time.
    """

    def __init__(self, script: Sequence[bytes | float]) -> None:
        self.script = script
        self.bodies: list[Any] = []
        self.heads: list[str] = []
        self.most_open = 0
        self._open = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if "/v1/models " in head:
            writer.write(whole("200 OK", json.dumps(MODELS).encode()))
        else:
            length = int(head.lower().partition("content-length:")[2].split()[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            self._open += 1
            self.most_open = max(self.most_open, self._open)
            for part in self.script:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            self._open -= 1
        writer.close()
