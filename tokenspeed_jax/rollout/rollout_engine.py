"""What the adapters need of an engine beyond generating: the part of `Engine`'s public API that trainers use."""

from typing import Any, Literal, Protocol


class WeightUpdateReport(Protocol):
    """`WeightUpdate`: what an update did."""

    @property
    def version(self) -> int: ...
    @property
    def bytes_moved(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def arrays_kept(self) -> int: ...
    @property
    def arrays_converted(self) -> int: ...


class SleepFigures(Protocol):
    """`SleepReport`: bytes of device memory."""

    @property
    def level(self) -> int: ...
    @property
    def bytes_before(self) -> int: ...
    @property
    def bytes_after(self) -> int: ...
    @property
    def freed_bytes(self) -> int: ...


class WakeFigures(Protocol):
    """`WakeReport`: bytes of device memory, and how long it took."""

    @property
    def bytes_before(self) -> int: ...
    @property
    def bytes_after(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class RolloutEngine(Protocol):
    """An engine whose weights a trainer replaces; every method may be called on any thread, and waits."""

    @property
    def weight_version(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def is_sleeping(self) -> bool: ...

    def update_weights(
        self,
        params: Any,
        *,
        version: int,
        mode: Literal["drain", "abort", "keep"] = "drain",
        check_finite: bool = False,
    ) -> WeightUpdateReport: ...

    def pause(self, mode: Literal["keep", "drain", "abort"] = "keep") -> None: ...

    def resume(self) -> None: ...

    def sleep(self, level: Literal[1, 2] = 1) -> SleepFigures: ...

    def wake(self) -> WakeFigures: ...
