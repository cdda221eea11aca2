"""Counters of a running engine, for metrics pages and tests."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.histogram import Histogram, HistogramCounts
from tokenspeed_jax.engine.outputs import RequestDelta

STEP_TIME_BOUNDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5, 30)
"""Seconds; a step takes about a millisecond for a small model and seconds while it compiles."""
STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_NOTHING = HistogramCounts((), (0,), 0.0)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts are totals since start unless said otherwise.

    Attributes:
        running, waiting: samples that hold cache blocks, and samples that wait, now.
        live_tokens: tokens of prompt and output of these samples, now; a prompt counts once for each of its samples.
        parents_in_use: parents of the arena that running samples hold, now, out of `num_parents`.
        kv_usage: the same as a share, in [0, 1].
        prompt_tokens: prompt tokens of admitted requests; `cached_tokens` of them came from the prefix cache.
        prefix_query_tokens: prompt tokens that were looked up in the prefix cache.
        group_hit_tokens: tokens that prompts took over from the cached blocks of each cache group: all of a hit where
            blocks hold whole history, the end of it in a sliding window, one block of recurrent states. Samples that
            start again after a retraction count again.
        checkpoint_lost_tokens: prompt tokens whose keys and values were cached at admission, but which were computed
            again because no snapshot of the recurrent layers' state stood at their end.
        finished: samples ended, by finish reason.
        compilations_after_warmup: programs compiled since the engine was ready; 0 when every shape was warm.
        compile_seconds: time spent compiling, at start (on the wall) and since.
        arena_bytes: bytes of the cache arena, now; 0 while the engine sleeps.
        step_seconds_total: time that steps took, summed over `steps`: from a step's dispatch, or from the landing of
            the step before it if that came later, to its own landing.
        step_seconds, step_tokens: how that time, and the tokens that a step computed, were spread over steps.
        overlapped_steps: steps that were dispatched while the step before was still running, so that the device went
            from one to the other.
        late_steps: steps that were dispatched when the device had run dry, although there was work. What is neither
            of the two was the first step after a time without requests.
        kv_events_dropped: cached pages of which routers were never told, because the publisher was too far behind.
        weight_version: of the weights that the next step runs with, now.
    """

    running: int = 0
    waiting: int = 0
    live_tokens: int = 0
    parents_in_use: int = 0
    num_parents: int = 0
    kv_usage: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    prefix_query_tokens: int = 0
    group_hit_tokens: dict[str, int] = field(default_factory=dict)
    checkpoint_lost_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    retractions: int = 0
    compilations_after_warmup: int = 0
    compile_seconds: float = 0.0
    arena_bytes: int = 0
    step_seconds_total: float = 0.0
    steps: int = 0
    kv_events_dropped: int = 0
    step_seconds: HistogramCounts = _NOTHING
    step_tokens: HistogramCounts = _NOTHING
    overlapped_steps: int = 0
    late_steps: int = 0
    weight_version: int = 0

    @property
    def overlap_efficiency(self) -> float:
        """Share of the steps with work before them that the device did not have to wait for; 1 before there are any."""
        steps = self.overlapped_steps + self.late_steps
        return self.overlapped_steps / steps if steps else 1.0


class StatsCollector:
    """Written by the step loop alone, read by any thread."""

    def __init__(self, num_parents: int, *, prefix_caching: bool, groups: Sequence[str] = ()) -> None:
        self._lock = threading.Lock()
        self._num_parents = num_parents
        self._prefix_caching = prefix_caching
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._step_seconds = Histogram(STEP_TIME_BOUNDS)
        self._step_tokens = Histogram(STEP_TOKENS_BOUNDS)
        self._generated = 0
        self._live_tokens = 0
        self._kv_events_dropped = 0
        self._gauges = (0, 0, 0, 0, 0)
        self._group_hits = dict.fromkeys(groups, 0)

    def observe_arrival(self, prompt_tokens: int) -> None:
        """A sample was handed to the scheduler."""
        self._live_tokens += prompt_tokens

    def observe_end(self, num_tokens: int) -> None:
        """A sample that had arrived ended, with this many tokens of prompt and output."""
        self._live_tokens -= num_tokens

    def observe_prompt(self, prompt_tokens: int, cached_tokens: int, *, looked_up: bool) -> None:
        """A request was admitted for the first time; `looked_up` tells whether it might have used the prefix cache."""
        with self._lock:
            self._counts["prompt"] += prompt_tokens
            self._counts["cached"] += cached_tokens
            self._counts["queried"] += prompt_tokens if self._prefix_caching and looked_up else 0

    def observe_delta(self, delta: RequestDelta) -> None:
        """A sample gained tokens or ended."""
        # Every row of every step comes here. Only the loop writes these two, so they need no lock.
        count = len(delta.token_ids)
        self._generated += count
        self._live_tokens += count
        if delta.finish_reason is not None:
            with self._lock:
                self._finished[delta.finish_reason] += 1

    def observe_dispatch(self, *, overlapped: bool) -> None:
        """A step was dispatched behind another one; `overlapped` if that one was still running."""
        with self._lock:
            self._counts["overlapped" if overlapped else "late"] += 1

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        """A step landed that took so long and computed so many tokens."""
        self._step_seconds.observe(seconds)
        self._step_tokens.observe(num_tokens)

    def observe_hits(self, scheduler: scheduling.Scheduler) -> None:
        """Reads what prompts took over from the cache, after an admission; called on the loop's thread only."""
        hits = {group: scheduler.cache_group_hit_tokens(group) for group in self._group_hits}
        with self._lock:
            self._group_hits = hits

    def observe_scheduler(self, scheduler: scheduling.Scheduler) -> None:
        """Reads the scheduler's gauges; called on the loop's thread only."""
        running = scheduler.prefilling_size() + scheduler.decoding_size()
        totals = (scheduler.num_retractions(), scheduler.num_checkpoint_lost_tokens())
        gauges = (running, scheduler.waiting_size(), scheduler.active_lcm_blocks(), *totals)
        with self._lock:
            self._gauges = gauges

    def observe_kv_events(self, dropped: int) -> None:
        """Routers were told what changed in the cache, except of so many pages since the start."""
        with self._lock:
            self._kv_events_dropped = dropped

    def snapshot(
        self, *, arena_bytes: int, compilations_after_warmup: int, compile_seconds: float, weight_version: int = 0
    ) -> EngineStats:
        """The current figures."""
        step_seconds, step_tokens = self._step_seconds.snapshot(), self._step_tokens.snapshot()
        with self._lock:
            running, waiting, parents, retractions, checkpoint_lost = self._gauges
            return EngineStats(
                running=running,
                waiting=waiting,
                live_tokens=self._live_tokens,
                parents_in_use=parents,
                num_parents=self._num_parents,
                kv_usage=parents / self._num_parents,
                prompt_tokens=self._counts["prompt"],
                generation_tokens=self._generated,
                cached_tokens=self._counts["cached"],
                prefix_query_tokens=self._counts["queried"],
                group_hit_tokens=dict(self._group_hits),
                checkpoint_lost_tokens=checkpoint_lost,
                finished=dict(self._finished),
                retractions=retractions,
                compilations_after_warmup=compilations_after_warmup,
                compile_seconds=compile_seconds,
                arena_bytes=arena_bytes,
                step_seconds_total=step_seconds.total,
                steps=step_seconds.count,
                step_seconds=step_seconds,
                step_tokens=step_tokens,
                overlapped_steps=self._counts["overlapped"],
                late_steps=self._counts["late"],
                kv_events_dropped=self._kv_events_dropped,
                weight_version=weight_version,
            )
