"""What a router believes is what the next request finds: events through feed and wire, against the scheduler itself."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.kv_events.feed import EventBatch, KVEventFeed
from tokenspeed_jax.kv_events.wire import AnnouncedGroup, BatchEncoder

from ..scheduler.scenario import FULL, STATE, Group, Scenario, swa
from .router import CacheModel
from .samples import announcing, run

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "", "tenant"])
# A request, or None for an emptied cache; and whether the publisher is behind at that time.
LIVES = st.lists(st.tuples(st.one_of(st.tuples(PROMPTS, SALTS), st.none()), st.booleans()), max_size=40)
Life = tuple[tuple[list[int], str] | None, bool]
ENCODER = BatchEncoder(AnnouncedGroup(0, "full_attention"), "map")


class RouterSink:
    """A publisher whose only subscriber is a model of the cache."""

    def __init__(self, *, misses: bool = False) -> None:
        self.model = CacheModel(misses=misses)
        self.is_full = False

    def put(self, batch: EventBatch) -> None:
        assert not self.is_full
        self.model.apply(ENCODER.encode(batch))


def live(s: Scenario, feed: KVEventFeed, sink: RouterSink, lives: Sequence[Life]) -> list[tuple[int, int]]:
    """Runs it all. Returns for each request what the router expected, and what was found."""
    hits = []
    for number, (request, behind) in enumerate(lives):
        sink.is_full = behind
        if request is None:
            assert s.scheduler.clear_cache()
            feed.clear()
        else:
            expected = sink.model.hit(*request)
            hits.append((expected, run(s, f"r{number}", *request)))
            feed.forward()
        # Ahead of the next request the router has caught up.
        sink.is_full = False
        feed.forward()
    return hits


@settings(max_examples=60, deadline=None)
@given(lives=LIVES, granularity=st.sampled_from([1, 2]))
def test_with_full_attention_a_router_knows_every_hit(lives: list[Life], granularity: int) -> None:
    s = Scenario([Group(granularity=granularity, packing=2 // granularity)], 12, enable_kv_cache_events=True)
    sink = RouterSink()
    feed = KVEventFeed(s.scheduler, sink)
    for expected, found in live(s, feed, sink, lives):
        assert expected == found
    assert feed.dropped == 0


@settings(max_examples=40, deadline=None)
@given(lives=LIVES, other=st.sampled_from([swa(4), STATE]))
def test_with_other_layers_too_a_hit_is_never_longer_than_a_router_expects(lives: list[Life], other: Group) -> None:
    s = Scenario([FULL, other], 30, enable_kv_cache_events=True)
    sink = RouterSink()
    for expected, found in live(s, KVEventFeed(s.scheduler, sink), sink, lives):
        assert found <= expected


@settings(max_examples=40, deadline=None)
@given(lives=LIVES)
def test_a_router_never_believes_in_what_is_not_there_however_far_behind_the_publisher_was(lives: list[Life]) -> None:
    s = announcing(max_kv_events=2)
    sink = RouterSink(misses=True)
    feed = KVEventFeed(s.scheduler, sink)
    for number, (request, behind) in enumerate(lives):
        sink.is_full = behind
        feed.forward()
        if request is None:
            assert s.scheduler.clear_cache()
            feed.clear()
            continue
        expected = sink.model.hit(*request)
        found = run(s, f"r{number}", *request)
        if not behind:
            assert expected <= found


@pytest.mark.parametrize("behind", [False, True])
def test_a_router_that_was_told_nothing_for_long_is_told_what_is_there(behind: bool) -> None:
    s = announcing(usable=200, max_kv_events=50)
    sink = RouterSink()
    feed = KVEventFeed(s.scheduler, sink)
    sink.is_full = behind
    for number in range(30):
        run(s, f"r{number}", [number, 50, 51, 52, 53])
        feed.forward()
    sink.is_full = False
    feed.forward()
    assert len(sink.model.page_of) == (50 if behind else 60)
    assert feed.dropped == (10 if behind else 0)


def test_an_emptied_cache_is_one_event() -> None:
    s = announcing()
    sink = RouterSink()
    feed = KVEventFeed(s.scheduler, sink)
    batches: list[EventBatch] = []
    run(s, "a", [1, 2, 3, 4, 5])
    feed.forward()
    sink.put = batches.append  # type: ignore[method-assign]
    assert s.scheduler.clear_cache()
    feed.clear()
    assert [(batch.cleared, list(batch.events)) for batch in batches] == [(True, [])]


def test_a_publisher_that_is_full_is_told_of_the_emptied_cache_once_it_can_be() -> None:
    s = announcing()
    sink = RouterSink()
    feed = KVEventFeed(s.scheduler, sink)
    run(s, "a", [1, 2, 3])
    feed.forward()
    sink.is_full = True
    assert s.scheduler.clear_cache()
    feed.clear()
    assert sink.model.hit([1, 2, 3]) == 2
    run(s, "b", [4, 5, 6])
    feed.forward()
    sink.is_full = False
    feed.forward()
    assert (sink.model.hit([1, 2, 3]), sink.model.hit([4, 5, 6])) == (0, 2)
