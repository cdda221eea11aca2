"""Routes for whoever operates the server: aborts, the prefix cache, traces. `AccessCheck` asks for their key."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax.errors import EngineClosed, EngineStateError, ProfilerError
from tokenspeed_jax.serve.bodies import parse_body, read_body
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError, engine_unavailable
from tokenspeed_jax.serve.generation import DeltaBridge
from tokenspeed_jax.serve.served_engine import ServedEngine

_LOG = logging.getLogger(__name__)


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of `/abort_request`: the id of one request, or `abort_all`."""

    rid: str | None = None
    abort_all: bool | None = None


class NoFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a route that has nothing to be told; it may be missing."""


class AdminRoutes:
    """The handlers of `ADMIN_PATHS`."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, bridge: DeltaBridge) -> None:
        self._engine = engine
        self._config = config
        self._bridge = bridge

    def routes(self) -> list[Route]:
        """The routes."""
        return [
            Route("/abort_request", self.abort_request, methods=["POST"]),
            Route("/flush_cache", self.flush_cache, methods=["POST"]),
            Route("/start_profile", self.start_profile, methods=["POST"]),
            Route("/stop_profile", self.stop_profile, methods=["POST"]),
        ]

    async def abort_request(self, request: Request) -> Response:
        """`POST /abort_request`. An id that is unknown, or has ended, aborts nothing."""
        body = await self._body(request, AbortRequest)
        if bool(body.rid) == bool(body.abort_all):
            raise ApiError("send either rid or abort_all = true", param="rid", code="invalid_value")
        num_aborted = self._bridge.abort(body.rid) if body.rid else self._bridge.abort_all()
        return done("abort_request", num_aborted=num_aborted)

    async def flush_cache(self, request: Request) -> Response:
        """`POST /flush_cache`: empties the prefix cache; 409 while requests hold blocks of it."""
        await self._body(request, NoFields)
        if not await in_thread(self._engine.flush_cache):
            stats = self._engine.stats()
            raise ApiError(
                f"the prefix cache is in use and was left as it is: {stats.running} samples run and {stats.waiting} "
                "wait; try again when they have ended, or end them with /abort_request",
                status=409,
                code="cache_in_use",
            )
        return done("flush_cache")

    async def start_profile(self, request: Request) -> Response:
        """`POST /start_profile`: begins a trace; 409 while one runs."""
        await self._body(request, NoFields)
        folder = self._config.profiler_dir
        if folder is None:
            raise ApiError(
                "traces have nowhere to go; start the server with --profiler-dir FOLDER to have them",
                status=404,
                code="profiler_disabled",
            )
        await in_thread(self._engine.start_profile, folder)
        return done("start_profile", profiler_dir=folder)

    async def stop_profile(self, request: Request) -> Response:
        """`POST /stop_profile`: ends the trace and writes it; 409 when none runs."""
        await self._body(request, NoFields)
        await in_thread(self._engine.stop_profile)
        return done("stop_profile", profiler_dir=self._config.profiler_dir)

    async def _body[T](self, request: Request, kind: type[T]) -> T:
        return await admin_body(request, self._config, kind)


async def admin_body[T](request: Request, config: ServerConfig, kind: type[T]) -> T:
    """The body of an admin route's request; where it is missing, one without fields."""
    return parse_body(await read_body(request, config.max_body_bytes) or b"{}", kind)


async def in_thread[T](function: Callable[..., T], *arguments: Any) -> T:
    """Calls what may wait for the engine without holding up the event loop."""
    try:
        return await run_in_threadpool(function, *arguments)
    except EngineClosed:
        raise engine_unavailable() from None
    except EngineStateError as error:
        raise ApiError(str(error), status=409, code="engine_state") from None
    except ProfilerError as error:
        raise ApiError(str(error), status=409, code="profiler_error") from None


def done(route: str, **details: Any) -> Response:
    """The reply of an admin route that did what it was asked for, and a line in the log."""
    _LOG.info("/%s: done%s", route, "".join(f", {name} {value}" for name, value in details.items()))
    return Response(msgspec.json.encode({"success": True, **details}), media_type="application/json")
