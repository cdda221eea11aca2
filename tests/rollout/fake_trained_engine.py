"""The scripted engine with the methods for trainers: what they may refuse, and nothing that moves weights."""

from dataclasses import dataclass
from typing import Any

from tokenspeed_jax.errors import EngineStateError, WeightUpdateError

from ..serve.fake_engine import FakeEngine


@dataclass(frozen=True)
class FakeUpdate:
    version: int
    bytes_moved: int = 640
    seconds: float = 0.25
    arrays_kept: int = 3
    arrays_converted: int = 2


@dataclass(frozen=True)
class FakeSleep:
    level: int
    bytes_before: int = 1000
    bytes_after: int = 400
    freed_bytes: int = 600


@dataclass(frozen=True)
class FakeWake:
    bytes_before: int = 400
    bytes_after: int = 1000
    seconds: float = 0.5


class FakeTrainedEngine(FakeEngine):
    """Attributes:
    calls: what was asked of it that it did, in order.
    delivered: deltas that their receiver has.
    refusal: an error that the next update raises, once it got its weights.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.delivered = 0
        super().__init__(*args, **options)
        self.calls: list[tuple] = []
        self.refusal: Exception | None = None
        self.weight_version = 0
        self.is_paused = False
        self.is_sleeping = False

    def _deliver(self, *args: Any) -> None:
        super()._deliver(*args)
        self.delivered += 1

    def submit(self, prompt_token_ids, params, **options):
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps; call wake() first")
        return super().submit(prompt_token_ids, params, **options)

    def update_weights(self, params, *, version, mode="drain", check_finite=False) -> FakeUpdate:
        if self.refusal is not None:
            raise self.refusal
        if version <= self.weight_version:
            raise WeightUpdateError(f"version {version} repeats", parameter="version")
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps; call wake() first")
        self.calls.append(("update", params, version, mode, check_finite))
        self.weight_version = version
        return FakeUpdate(version)

    def pause(self, mode="keep") -> None:
        self.calls.append(("pause", mode))
        self.is_paused = True

    def resume(self) -> None:
        self.calls.append(("resume",))
        self.is_paused = False

    def sleep(self, level=1) -> FakeSleep:
        if self.is_sleeping:
            raise EngineStateError("the engine sleeps already")
        self.calls.append(("sleep", level))
        self.is_sleeping = True
        return FakeSleep(level)

    def wake(self) -> FakeWake:
        if not self.is_sleeping:
            raise EngineStateError("the engine is awake")
        self.calls.append(("wake",))
        self.is_sleeping = False
        return FakeWake()
