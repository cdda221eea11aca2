"""Routes for a trainer in another process: new weights, pauses, and the device's memory while it trains."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax.errors import CheckpointError, InvalidRequest, OutOfDeviceMemory
from tokenspeed_jax.rollout.bodies import (
    MemoryOccupation,
    Pause,
    PauseGeneration,
    Sleep,
    UpdateMode,
    UpdateWeights,
    UpdateWeightsFromDisk,
)
from tokenspeed_jax.rollout.rollout_engine import RolloutEngine
from tokenspeed_jax.serve.admin import NoFields, admin_body, done, in_thread
from tokenspeed_jax.serve.bodies import convert_object, read_body
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError, refusal
from tokenspeed_jax.serve.extension import Extension


class WeightReader(Protocol):
    """Reads a folder of weights; see `WeightFolderReader`."""

    def read(self, folder: str) -> Any: ...


class RolloutRoutes:
    """The handlers. All of them are admin routes.

    Args:
        reader: makes of a folder what the engine's `update_weights` takes.
    """

    def __init__(self, engine: RolloutEngine, config: ServerConfig, reader: WeightReader) -> None:
        self._engine = engine
        self._config = config
        self._reader = reader
        self._updating = asyncio.Lock()

    def extension(self) -> Extension:
        """The routes, as the server takes them."""
        posts: dict[str, tuple[Callable[..., Any], type[msgspec.Struct]]] = {
            "/update_weights": (self.update_weights, UpdateWeights),
            "/update_weights_from_disk": (self.update_weights_from_disk, UpdateWeightsFromDisk),
            "/pause": (self.pause, Pause),
            "/resume": (self.resume, NoFields),
            "/pause_generation": (self.pause_generation, PauseGeneration),
            "/continue_generation": (self.continue_generation, NoFields),
            "/sleep": (self.sleep, Sleep),
            "/wake": (self.wake, NoFields),
            "/wake_up": (self.wake_up, NoFields),
            "/release_memory_occupation": (self.release_memory_occupation, MemoryOccupation),
            "/resume_memory_occupation": (self.resume_memory_occupation, MemoryOccupation),
        }
        gets = {
            "/weight_version": self.weight_version,
            "/is_sleeping": self.is_sleeping,
            "/is_paused": self.is_paused,
        }
        return Extension(
            [
                *(Route(path, endpoint, methods=["POST"]) for path, (endpoint, _) in posts.items()),
                *(Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()),
            ],
            {path: body for path, (_, body) in posts.items()},
        )

    async def update_weights(self, request: Request) -> Response:
        """`POST /update_weights`: serves the weights of a folder from now on; answers when they are in place."""
        update = await self._fields(request, UpdateWeights)
        names = {"params": "path"}
        report = await self._update(update.path, update.version, update.mode, update.check_finite, names)
        return done("update_weights", **_update_figures(report))

    async def update_weights_from_disk(self, request: Request) -> Response:
        """`POST /update_weights_from_disk`: `/update_weights` under SGLang's names."""
        update = await self._fields(request, UpdateWeightsFromDisk)
        version = _number(update.weight_version)
        if version is None:
            version = self._engine.weight_version + 1
        # What is paused would never drain.
        mode = "abort" if update.abort_all_requests else "keep" if self._engine.is_paused else "drain"
        names = {"params": "model_path", "path": "model_path", "version": "weight_version"}
        report = await self._update(update.model_path, version, mode, False, names)
        message = f"weight version {report.version} is served"
        return done("update_weights_from_disk", message=message, **_update_figures(report))

    async def pause(self, request: Request) -> Response:
        """`POST /pause`: generates nothing until `/resume`."""
        pause = await self._fields(request, Pause)
        await in_thread(self._engine.pause, "drain" if pause.mode == "wait" else pause.mode)
        return done("pause", mode=pause.mode)

    async def resume(self, request: Request) -> Response:
        """`POST /resume`: goes on with what was paused."""
        await self._fields(request, NoFields)
        await in_thread(self._engine.resume)
        return done("resume")

    async def pause_generation(self, request: Request) -> Response:
        """`POST /pause_generation`: `/pause` under SGLang's names."""
        pause = await self._fields(request, PauseGeneration)
        await in_thread(self._engine.pause, "keep" if pause.mode == "in_place" else "abort")
        return done("pause_generation", mode=pause.mode)

    async def continue_generation(self, request: Request) -> Response:
        """`POST /continue_generation`: `/resume` under SGLang's name."""
        return await self.resume(request)

    async def sleep(self, request: Request) -> Response:
        """`POST /sleep`: frees device memory for the trainer."""
        return await self._sleep("sleep", (await self._fields(request, Sleep)).level)

    async def wake(self, request: Request) -> Response:
        """`POST /wake`: takes the memory back."""
        await self._fields(request, NoFields)
        return await self._wake("wake")

    async def wake_up(self, request: Request) -> Response:
        """`POST /wake_up`: `/wake` under vLLM's name."""
        return await self.wake(request)

    async def release_memory_occupation(self, request: Request) -> Response:
        """`POST /release_memory_occupation`: `/sleep` under SGLang's names."""
        tags = set((await self._fields(request, MemoryOccupation)).tags or ("kv_cache", "weights"))
        if "kv_cache" not in tags:
            raise ApiError(
                "tags must name kv_cache: the weights cannot be freed without it", param="tags", code="invalid_value"
            )
        return await self._sleep("release_memory_occupation", 2 if "weights" in tags else 1)

    async def resume_memory_occupation(self, request: Request) -> Response:
        """`POST /resume_memory_occupation`: `/wake` under SGLang's names."""
        tags = (await self._fields(request, MemoryOccupation)).tags
        if tags is not None and "kv_cache" not in tags:
            raise ApiError(
                "tags must name kv_cache: all that was freed comes back at once", param="tags", code="invalid_value"
            )
        return await self._wake("resume_memory_occupation")

    async def weight_version(self, _request: Request) -> Response:
        """`GET /weight_version`: the version of the weights that are served."""
        return _json({"weight_version": self._engine.weight_version})

    async def is_sleeping(self, _request: Request) -> Response:
        """`GET /is_sleeping`: whether device memory was freed; vLLM's name."""
        return _json({"is_sleeping": self._engine.is_sleeping})

    async def is_paused(self, _request: Request) -> Response:
        """`GET /is_paused`: whether generation is paused; vLLM's name."""
        return _json({"is_paused": self._engine.is_paused})

    async def _fields[T](self, request: Request, kind: type[T]) -> T:
        """The fields of a request: of its body, or of its query, where vLLM's clients put them."""
        if not request.query_params:
            return await admin_body(request, self._config, kind)
        if await read_body(request, self._config.max_body_bytes):
            raise ApiError("fields come in the body or in the query, not in both", code="invalid_value")
        return convert_object(dict(request.query_params), kind, strict=False)

    async def _update(
        self, folder: str, version: int, mode: UpdateMode, check_finite: bool, names: dict[str, str]
    ) -> Any:
        """Reads the weights and hands them to the engine.

        Args:
            names: what the request calls `params`, `path` and `version`.
        """
        if self._updating.locked():
            raise ApiError("another update of the weights is under way", status=409, code="update_in_progress")
        async with self._updating:
            # The engine has the last word on both; this spares reading weights that it would not take.
            if self._engine.is_sleeping:
                raise ApiError("the engine sleeps; send /wake first", status=409, code="engine_state")
            if version <= self._engine.weight_version:
                raise ApiError(
                    f"{names.get('version', 'version')} must be higher than {self._engine.weight_version}, the version "
                    f"that is served, got {version}",
                    param=names.get("version", "version"),
                    code="invalid_value",
                )
            return await in_thread(self._read_and_update, folder, version, mode, check_finite, names)

    def _read_and_update(
        self, folder: str, version: int, mode: UpdateMode, check_finite: bool, names: dict[str, str]
    ) -> Any:
        try:
            params = self._reader.read(folder)
            return self._engine.update_weights(params, version=version, mode=mode, check_finite=check_finite)
        except CheckpointError as error:
            raise ApiError(str(error), param=names.get("path", "path"), code="invalid_weights") from None
        except InvalidRequest as error:
            raise refusal(error, names) from None
        except OutOfDeviceMemory as error:
            raise ApiError(
                str(error), status=503, kind="service_unavailable_error", code="out_of_device_memory"
            ) from None

    async def _sleep(self, route: str, level: Literal[1, 2]) -> Response:
        report = await in_thread(self._engine.sleep, level)
        return done(
            route,
            level=report.level,
            bytes_before=report.bytes_before,
            bytes_after=report.bytes_after,
            freed_bytes=report.freed_bytes,
        )

    async def _wake(self, route: str) -> Response:
        report = await in_thread(self._engine.wake)
        return done(route, bytes_before=report.bytes_before, bytes_after=report.bytes_after, seconds=report.seconds)


def _number(version: int | str | None) -> int | None:
    """A weight version that may be text, as SGLang's is."""
    if isinstance(version, str):
        if not (version.isascii() and version.isdigit() and len(version) <= 18):
            raise ApiError(
                f"weight_version must be a number, got {version!r}", param="weight_version", code="invalid_value"
            )
        return int(version)
    return version


def _update_figures(report: Any) -> dict[str, Any]:
    return {
        "version": report.version,
        "bytes_moved": report.bytes_moved,
        "seconds": report.seconds,
        "arrays_kept": report.arrays_kept,
        "arrays_converted": report.arrays_converted,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
