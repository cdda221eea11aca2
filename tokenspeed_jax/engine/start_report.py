"""What came of a start: where its time went, and which options it settled."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StartReport:
    """One engine's start; times in seconds on the wall.

    Attributes:
        loading: until the weights were read and on their way to the device.
        planning: sizing and allocating the arena; where the device tells how much memory it has, this compiles the
            costliest step once over a small arena.
        compiling: tracing every step and compiling it, or taking it from the compilation cache; 0 without warm-up.
        programs: how many programs were made ready by that.
        from_cache: how many of them JAX took from its compilation cache.
        options: the values in force of options whose default depends on something, by field of `EngineConfig`.
    """

    loading: float
    planning: float
    compiling: float
    programs: int
    from_cache: int
    options: Mapping[str, Any]

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield (
            f"start         weights {self.loading:.1f} s, arena {self.planning:.1f} s, {self.programs} programs "
            f"{self.compiling:.1f} s ({self.from_cache} from the compilation cache)"
        )


class Laps:
    """Seconds since the previous lap."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        before, self._last = self._last, time.perf_counter()
        return self._last - before
