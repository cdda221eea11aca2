"""Server-sent events, and work that ends when its client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed_jax.serve.errors import ApiError

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before its reply was complete."""


def event(payload: Any) -> bytes:
    """One server-sent event; JSON holds no raw line end, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


async def while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Runs `work`, and cancels it when the client leaves first.

    The request body must have been read: whatever `receive` yields from here on can only be the disconnect.

    Raises:
        ClientGone: the client left; `work` has ended by then.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A reply of server-sent events.

    An `ApiError` of the source becomes a last event without `[DONE]`, because the status is already sent.

    Args:
        events: encoded events; a closing `[DONE]` is the source's to send.
        on_end: called once, however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for body in self._events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except ApiError as error:
            await send({"type": "http.response.body", "body": event(error.body), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
