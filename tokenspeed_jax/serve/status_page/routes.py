"""The routes of the page, and what runs for it in the background."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax.engine.activity import Activity
from tokenspeed_jax.errors import EngineClosed
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.served_engine import ServedEngine
from tokenspeed_jax.serve.status_page.assets import asset_routes
from tokenspeed_jax.serve.status_page.history import SAMPLE_SECONDS, History
from tokenspeed_jax.serve.status_page.latencies import RecentLatencies
from tokenspeed_jax.serve.status_page.pool_picture import pool_picture

MAX_LISTED = 50
"""Most running and most waiting requests that the page lists."""

_LOOK_SECONDS = 0.5
"""Time between two looks at the engine, however many pages are open."""
_PATIENCE_SECONDS = 0.25
"""How long a reply waits for a look; a step that takes longer leaves it with the one before."""


class StatusPage:
    """The page at `/`, its files, and `GET /status`."""

    def __init__(self, engine: ServedEngine, admission: Admission, latencies: RecentLatencies) -> None:
        self._engine = engine
        self._admission = admission
        self._started = time.time()
        self._history = History(engine, latencies)
        self._watch = _ActivityWatch(engine)

    def routes(self) -> list[Route]:
        """The routes."""
        return [*asset_routes(), Route("/status", self.status, methods=["GET"])]

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Keeps the history while the context lasts."""
        task = asyncio.create_task(self._take_samples())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _take_samples(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_SECONDS)
            self._history.take()

    async def status(self, request: Request) -> Response:
        """`GET /status`: the engine now, and the history behind sample `?since=N`."""
        since = _number(request.query_params.get("since", "0"))
        activity, picture = await self._watch.latest()
        stats = self._engine.stats()
        body = {
            "started": self._started,
            "age": self._history.age,
            "state": self._state(),
            "chat": self._engine.tokenizer.has_chat_template,
            "running": stats.running,
            "waiting": stats.waiting,
            "live_tokens": stats.live_tokens,
            "kv_usage": stats.kv_usage,
            "prompt_tokens": stats.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_query_tokens": stats.prefix_query_tokens,
            "cached_tokens": stats.cached_tokens,
            "finished": dict(stats.finished),
            "retractions": stats.retractions,
            "compilations_after_warmup": stats.compilations_after_warmup,
            "look_age": self._watch.age if activity else None,
            "requests": activity.requests if activity else [],
            "pool": picture,
            "history": self._history.since(since),
        }
        return Response(msgspec.json.encode(body), media_type="application/json", headers={"cache-control": "no-store"})

    def _state(self) -> str:
        if self._admission.engine_has_failed:
            return "failed"
        return "draining" if self._admission.is_draining else "ready"


class _ActivityWatch:
    """The engine's last `Activity`, asked for anew only when somebody wants it, and by one question at a time."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine
        self._group_ids = [group.group_id for group in engine.memory_report.groups]
        self._asked_at = -_LOOK_SECONDS
        self._seen_at = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._activity: Activity | None = None
        self._picture: Mapping[str, Any] | None = None

    @property
    def age(self) -> float:
        """Seconds since the last look."""
        return time.monotonic() - self._seen_at

    async def latest(self) -> tuple[Activity | None, Mapping[str, Any] | None]:
        """The activity with the picture of the pool; None while there has been none, or the engine is gone."""
        if self._asking is None and time.monotonic() >= self._asked_at + _LOOK_SECONDS:
            self._asked_at = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=_PATIENCE_SECONDS)
        return self._activity, self._picture

    async def _ask(self) -> None:
        try:
            # Not on a thread that waits: the step may never come back, and the server must be able to end.
            self._activity = await asyncio.wrap_future(self._engine.activity(MAX_LISTED))
            self._seen_at = time.monotonic()
            self._picture = pool_picture(self._activity.parent_uses, self._group_ids)
        except EngineClosed:
            self._activity = self._picture = None
        finally:
            self._asking = None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ApiError(f"since must be a whole number, got {text[:40]!r}", param="since", code="invalid_value")
    return int(text)
