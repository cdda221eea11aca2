"""What a trainer does to an engine between rollouts: new weights, pauses, sleep.

Each of these happens on the step loop's thread between two steps; here it is checked, prepared and measured on the
caller's. Calls that the engine cannot serve as it is raise `EngineStateError` and change nothing. docs/rollouts.md has
the table of all orders.
"""

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.engine.device_memory import explained
from tokenspeed_jax.engine.inbox import LiveRequestMode
from tokenspeed_jax.engine.loop import StepLoop
from tokenspeed_jax.engine.memory import bytes_in_use
from tokenspeed_jax.engine.weight_store import WeightStore, WeightUpdate
from tokenspeed_jax.errors import EngineClosed, EngineStateError, InvalidRequest, WeightUpdateError

_MAX_VERSION = 2**63 - 1
_ASLEEP = "the engine is asleep: call wake first"


@dataclass(frozen=True)
class SleepReport:
    """What `sleep` freed.

    Attributes:
        bytes_before, bytes_after: on the device, of this engine and everybody else: by its allocator, or, on a CPU, of
            all arrays of the process.
    """

    level: int
    bytes_before: int
    bytes_after: int

    @property
    def freed_bytes(self) -> int:
        return self.bytes_before - self.bytes_after


@dataclass(frozen=True)
class WakeReport:
    """What `wake` took; bytes as in `SleepReport`, seconds on the wall."""

    bytes_before: int
    bytes_after: int
    seconds: float


class Lifecycle:
    """Thread-safe; callers take turns, also with one that waits for requests to end."""

    def __init__(self, loop: StepLoop, store: WeightStore, arena: CacheArena, device: jax.Device) -> None:
        self._loop = loop
        self._store = store
        self._arena = arena
        self._device = device
        self._level = 0
        self._turns = threading.Lock()

    @property
    def is_sleeping(self) -> bool:
        """Whether the arena is freed."""
        return self._level > 0

    def check_awake(self) -> None:
        """Raises `EngineStateError` while the engine sleeps."""
        if self._level:
            raise EngineStateError(_ASLEEP)

    def explain_cut(self, reasons: Collection[str]) -> None:
        """Raises why requests ended for these reasons, unless they were complete or aborted by somebody."""
        if not {"abort", "error"} & set(reasons):
            return
        if not self._loop.is_healthy:
            raise EngineClosed("the engine ended while generating") from self._loop.failure
        if "error" in reasons:
            self._store.check_present()
            raise EngineStateError("the weights were deleted while generating; there are others by now")

    def update(self, params: Any, version: int, mode: LiveRequestMode, *, check_finite: bool) -> WeightUpdate:
        """See `Engine.update_weights`."""
        start = time.perf_counter()
        _check_mode(mode)
        with self._turn():
            self.check_awake()
            self._check_version(version)
            with explained("the weights were updated"):
                prepared = self._store.prepare(self._store.layout.assign(params), check_finite=check_finite)
                self._loop.change(lambda: self._loop.adopt_weights(prepared, version), mode)
                self._store.wait_until_ready()
            return WeightUpdate(
                version=version,
                bytes_moved=prepared.bytes_moved,
                seconds=time.perf_counter() - start,
                arrays_kept=len(prepared.kept),
                arrays_converted=len(prepared.moved) + len(prepared.converted),
            )

    def export(self, naming: str) -> Any:
        """See `Engine.export_weights`."""
        if naming not in ("nnx", "hf"):
            raise InvalidRequest(f"naming must be nnx or hf, got {naming!r}", parameter="naming")
        with self._turn():
            self.check_awake()
            return self._store.export(naming)

    def pause(self, mode: LiveRequestMode) -> None:
        """See `Engine.pause`."""
        _check_mode(mode)
        with self._turn():
            self.check_awake()
            self._loop.change(lambda: self._loop.pause(is_paused=True), mode)

    def resume(self) -> None:
        """See `Engine.resume`."""
        with self._turn():
            self.check_awake()
            self._store.check_present()
            self._loop.ask(lambda: self._loop.pause(is_paused=False))

    def sleep(self, level: int) -> SleepReport:
        """See `Engine.sleep`."""
        if isinstance(level, bool) or level not in (1, 2):
            raise InvalidRequest(f"level must be 1 or 2, got {level!r}", parameter="level")
        with self._turn():
            if self._level >= level:
                raise EngineStateError(f"the engine is asleep at level {self._level} already")
            before = bytes_in_use(self._device)
            self._loop.change(lambda: self._fall_asleep(level), "keep")
            return SleepReport(level, before, bytes_in_use(self._device))

    def _fall_asleep(self, level: int) -> None:
        if not self._level:
            self._loop.free_cache(_ASLEEP)
        if level == 2:
            self._store.free()
        self._level = level

    def wake(self) -> WakeReport:
        """See `Engine.wake`."""
        start = time.perf_counter()
        with self._turn():
            if not self._level:
                raise EngineStateError("the engine is not asleep")
            before = bytes_in_use(self._device)
            with explained("the engine woke up"):
                self._loop.ask(self._wake_up)
            return WakeReport(before, bytes_in_use(self._device), time.perf_counter() - start)

    def _wake_up(self) -> None:
        self._loop.restore_cache()
        jax.block_until_ready(self._arena.planes)
        self._level = 0

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        self._loop.check_thread()
        with self._turns:
            if not self._loop.is_healthy:
                raise EngineClosed("the engine is closed") from self._loop.failure
            yield

    def _check_version(self, version: object) -> None:
        if isinstance(version, bool) or not isinstance(version, int):
            raise WeightUpdateError(f"version must be an integer, got {version!r}", parameter="version")
        if not self._store.version < version <= _MAX_VERSION:
            raise WeightUpdateError(
                f"version must be greater than {self._store.version}, which the engine has, and at most "
                f"{_MAX_VERSION}, got {version}",
                parameter="version",
            )


def _check_mode(mode: object) -> None:
    if mode not in ("keep", "drain", "abort"):
        raise InvalidRequest(f"mode must be keep, drain or abort, got {mode!r}", parameter="mode")
