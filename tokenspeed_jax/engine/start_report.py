"""Where the time of a start went."""

import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class StartReport:
    """Seconds of one engine's start, on the wall.

    Attributes:
        loading: until the weights were read and on their way to the device.
        planning: sizing and allocating the arena; where the device tells how much memory it has, this compiles the
            costliest step once over a small arena.
        compiling: tracing every step and compiling it, or taking it from the compilation cache; 0 without warm-up.
        programs: how many programs were made ready by that.
        from_cache: how many of them JAX took from its compilation cache.
    """

    loading: float
    planning: float
    compiling: float
    programs: int
    from_cache: int

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
