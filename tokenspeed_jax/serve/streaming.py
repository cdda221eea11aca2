"""Server-sent events, and work that ends when its client leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead

DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed its connection before its reply was complete."""


def event(payload: Any) -> bytes:
    """One server-sent event; JSON holds no raw line end, so one `data:` line is enough."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One server-sent event that has a name beside its data."""
    return b"event: " + name.encode() + b"\n" + event(payload)


class StreamedReply(Protocol):
    """What one protocol sends of a reply that is not complete."""

    def opening(self) -> bytes:
        """What a stream begins with, before there is a token."""
        ...

    def growth(self, index: int, delta: RequestDelta) -> bytes:
        """The events that one delta of choice `index` becomes."""
        ...

    def closing(self, choices: list[Choice]) -> bytes:
        """What a stream ends with when every choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """What a stream ends with otherwise."""
        ...


class ChunkedReply:
    """A reply that streams as chunks without names, and `[DONE]`: the older protocols of OpenAI, and SGLang's.

    Attributes:
        keeps_choices: whether a whole reply is made of what its choices keep, instead of the deltas that it takes.
    """

    keeps_choices: ClassVar[bool] = True
    _head: ReplyHead

    def take(self, index: int, delta: RequestDelta) -> None:
        """Nothing: the whole reply is made of its choices, which keep what they are given."""

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The chunks that one delta of choice `index` becomes."""
        raise NotImplementedError

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk, if the client asked for the usage."""
        raise NotImplementedError

    def opening(self) -> bytes:
        """Nothing: the first token says all that a client waits for."""
        return b""

    def growth(self, index: int, delta: RequestDelta) -> bytes:
        """The chunks of one delta."""
        return b"".join(event(chunk) for chunk in self.chunks(index, delta))

    def closing(self, choices: list[Choice]) -> bytes:
        """The usage, if asked for, and the mark of the end."""
        return (event(self.usage_chunk(choices)) if self._head.includes_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """The error, without the mark of the end."""
        return event(error.body)


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

    Args:
        events: encoded events, the last one included.
        on_failure: what becomes of an `ApiError` of the source: a last event, because the status is already sent.
        on_end: called once, however the stream ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_failure: Callable[[ApiError], bytes],
        on_end: Callable[[], None],
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self._events = events
        self._on_failure = on_failure
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
            await send({"type": "http.response.body", "body": self._on_failure(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
