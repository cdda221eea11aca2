"""What was measured: one record per request, and what they say together."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass
class Record:
    """One request. Times are seconds since it was sent; the connection stood before.

    Attributes:
        sent: when, since the start of the run.
        arrivals: of the pieces of text, in order.
        end: of the whole reply.
        cached_tokens: prompt tokens from the prefix cache; None where the server does not say.
        error: why it failed; None when it did not.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles of some latencies in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None of nothing."""
        if not seconds:
            return None
        values = np.asarray(seconds) * 1000
        return cls(float(values.mean()), *np.percentile(values, PERCENTILES).tolist())


@dataclass(frozen=True)
class Results:
    """What one run shows. Rates are over the whole run; latencies are those of completed requests.

    Attributes:
        skipped: requests of a trace that the server's context could not hold; they were not sent.
        ttft: until the first piece of text.
        itl: between two pieces of text, which are tokens unless the server sends several in one.
        tpot: of a request, its time after the first piece by the tokens after the first.
        e2e: until the reply was whole.
        hit_rate: share of the prompt tokens that came from the prefix cache; None where the server does not say.
    """

    completed: int
    failed: int
    skipped: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    errors: tuple[str, ...]

    @classmethod
    def of(cls, records: Sequence[Record], duration: float, skipped: int) -> "Results":
        """Sums up a run that took `duration` seconds."""
        done = [record for record in records if record.error is None]
        told = [record.cached_tokens for record in done if record.cached_tokens is not None]
        return cls(
            completed=len(done),
            failed=len(records) - len(done),
            skipped=skipped,
            duration=duration,
            prompt_tokens=sum(record.prompt_tokens for record in done),
            output_tokens=sum(record.output_tokens for record in done),
            cached_tokens=sum(told) if told else None,
            ttft=Spread.of([record.arrivals[0] for record in done if record.arrivals]),
            itl=Spread.of([gap for record in done for gap in np.diff(record.arrivals).tolist()]),
            tpot=Spread.of(
                [
                    (record.arrivals[-1] - record.arrivals[0]) / (record.output_tokens - 1)
                    for record in done
                    if record.arrivals and record.output_tokens > 1
                ]
            ),
            e2e=Spread.of([record.end for record in done]),
            errors=tuple(dict.fromkeys(record.error for record in records if record.error is not None)),
        )

    @property
    def hit_rate(self) -> float | None:
        return None if self.cached_tokens is None or not self.prompt_tokens else self.cached_tokens / self.prompt_tokens

    def lines(self) -> Iterator[str]:
        """The results as text."""
        skipped = f", {self.skipped} not sent: longer than the server's context" if self.skipped else ""
        yield f"requests       {self.completed} completed, {self.failed} failed{skipped}"
        yield f"duration       {self.duration:.2f} s"
        yield f"throughput     {self._rate(self.completed):.2f} requests/s"
        yield f"  in           {self._rate(self.prompt_tokens):.1f} tokens/s ({self.prompt_tokens} tokens)"
        yield f"  out          {self._rate(self.output_tokens):.1f} tokens/s ({self.output_tokens} tokens)"
        hits = "not reported" if self.hit_rate is None else f"{self.hit_rate:.1%} ({self.cached_tokens} tokens)"
        yield f"prefix hits    {hits}"
        yield f"{'latency, ms':<28}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES)
        for name, spread in (
            ("time to first token", self.ttft),
            ("inter-token latency", self.itl),
            ("time per output token", self.tpot),
            ("end to end", self.e2e),
        ):
            numbers = ["-"] * 4 if spread is None else [f"{value:.2f}" for value in asdict(spread).values()]
            yield f"  {name:<26}" + "".join(f"{number:>10}" for number in numbers)
        for error in self.errors:
            yield f"failed: {error}"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        rates = {
            "request_throughput": self._rate(self.completed),
            "input_throughput": self._rate(self.prompt_tokens),
            "output_throughput": self._rate(self.output_tokens),
            "prefix_hit_rate": self.hit_rate,
        }
        values = asdict(self)
        latencies = {f"{name}_ms": values.pop(name) for name in ("ttft", "itl", "tpot", "e2e")}
        return values | rates | latencies

    def _rate(self, count: int) -> float:
        return count / self.duration if self.duration else 0.0
