"""`KVEventFeed`: hands the scheduler's events from the step loop to a publisher, and never waits for it."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenspeed_jax import scheduler as scheduling

_LOG = logging.getLogger(__name__)

CacheEvent = scheduling.KVEvent.BlockStored | scheduling.KVEvent.BlockRemoved


@dataclass(frozen=True)
class EventBatch:
    """What changed in the cache between two points of time.

    Attributes:
        time: seconds since the epoch.
        cleared: the cache was emptied first.
        events: then pages left and came, the removals first: deepest pages first; then shallowest first.
    """

    time: float
    cleared: bool
    events: Sequence[CacheEvent]


class BatchSink(Protocol):
    """Takes batches without waiting."""

    @property
    def is_full(self) -> bool: ...

    def put(self, batch: EventBatch) -> None: ...


class EventSource(Protocol):
    """The scheduler, as far as events go."""

    def drain_kv_events(self) -> list[CacheEvent]: ...

    def dropped_kv_events(self) -> int: ...


class KVEventFeed:
    """Belongs to the step loop's thread.

    While the sink is full, nothing is taken from the scheduler. It keeps the net change, so that what a subscriber
    believes later on is right; of pages that came meanwhile it drops those beyond its bound, and counts them. They stay
    unknown to subscribers: a router may miss a page that is cached, but never believes in one that is not.

    Attributes:
        dropped: pages that came and were never told of.
    """

    def __init__(self, scheduler: EventSource, sink: BatchSink) -> None:
        """Hands on at once that the cache is empty: subscribers may know another process at the same endpoint."""
        self._scheduler = scheduler
        self._sink = sink
        self._cleared = True
        self.dropped = 0
        self.forward()

    def forward(self) -> None:
        """Hands on what changed since the last time, unless the sink is full."""
        if self._sink.is_full:
            return
        events = self._scheduler.drain_kv_events()
        if events or self._cleared:
            self._sink.put(EventBatch(time.time(), self._cleared, events))
            self._cleared = False
        self._note_drops(self._scheduler.dropped_kv_events())

    def clear(self) -> None:
        """The cache was emptied: one event in place of the removal of every page."""
        self._scheduler.drain_kv_events()
        self._cleared = True
        self.forward()

    def _note_drops(self, dropped: int) -> None:
        if dropped and not self.dropped:
            _LOG.warning("the publisher of KV-cache events is behind: of %d cached pages it will not tell", dropped)
        self.dropped = dropped
