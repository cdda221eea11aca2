"""Counters of a running engine, for metrics pages and tests."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.outputs import RequestDelta


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
        checkpoint_lost_tokens: prompt tokens whose keys and values were cached at admission, but which were computed
            again because no snapshot of the recurrent layers' state stood at their end.
        finished: samples ended, by finish reason.
        compilations_after_warmup: programs compiled since the engine was ready; 0 when every shape was warm.
        arena_bytes: bytes of the cache arena.
        step_seconds_total: time from dispatch to landing, summed over `steps`.
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
    checkpoint_lost_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    retractions: int = 0
    compilations_after_warmup: int = 0
    arena_bytes: int = 0
    step_seconds_total: float = 0.0
    steps: int = 0


class StatsCollector:
    """Written by the step loop, read by any thread."""

    def __init__(self, num_parents: int, *, prefix_caching: bool) -> None:
        self._lock = threading.Lock()
        self._num_parents = num_parents
        self._prefix_caching = prefix_caching
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._step_seconds = 0.0
        self._live_tokens = 0
        self._gauges = (0, 0, 0, 0, 0)

    def observe_arrival(self, prompt_tokens: int) -> None:
        """A sample was handed to the scheduler."""
        with self._lock:
            self._live_tokens += prompt_tokens

    def observe_end(self, num_tokens: int) -> None:
        """A sample that had arrived ended, with this many tokens of prompt and output."""
        with self._lock:
            self._live_tokens -= num_tokens

    def observe_prompt(self, prompt_tokens: int, cached_tokens: int, *, looked_up: bool) -> None:
        """A request was admitted for the first time; `looked_up` tells whether it might have used the prefix cache."""
        with self._lock:
            self._counts["prompt"] += prompt_tokens
            self._counts["cached"] += cached_tokens
            self._counts["queried"] += prompt_tokens if self._prefix_caching and looked_up else 0

    def observe_delta(self, delta: RequestDelta) -> None:
        """A sample gained tokens or ended."""
        with self._lock:
            self._counts["generated"] += len(delta.token_ids)
            self._live_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._finished[delta.finish_reason] += 1

    def observe_step(self, seconds: float) -> None:
        """A step landed `seconds` after its dispatch."""
        with self._lock:
            self._counts["steps"] += 1
            self._step_seconds += seconds

    def observe_scheduler(self, scheduler: scheduling.Scheduler) -> None:
        """Reads the scheduler's gauges; called on the loop's thread only."""
        running = scheduler.prefilling_size() + scheduler.decoding_size()
        totals = (scheduler.num_retractions(), scheduler.num_checkpoint_lost_tokens())
        gauges = (running, scheduler.waiting_size(), scheduler.active_lcm_blocks(), *totals)
        with self._lock:
            self._gauges = gauges

    def snapshot(self, *, arena_bytes: int, compilations_after_warmup: int) -> EngineStats:
        """The current figures."""
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
                generation_tokens=self._counts["generated"],
                cached_tokens=self._counts["cached"],
                prefix_query_tokens=self._counts["queried"],
                checkpoint_lost_tokens=checkpoint_lost,
                finished=dict(self._finished),
                retractions=retractions,
                compilations_after_warmup=compilations_after_warmup,
                arena_bytes=arena_bytes,
                step_seconds_total=self._step_seconds,
                steps=self._counts["steps"],
            )
