"""What waits for a drain of the residency events is bounded, and stays meaningful."""

import gc

from tokenspeed_jax.scheduler import (
    ForwardEvent,
    Scheduler,
)

from .scenario import FULL, make_config, named, spec
from .twins import advance, result


def run_prompts(scheduler: Scheduler, first: int, count: int, size: int = 8) -> None:
    """Runs prompts of their own, one after the other."""
    for number in range(first, first + count):
        scheduler.submit_requests([spec(f"r{number}", range(number * size, (number + 1) * size))])
        scheduler.next_execution_plan()
        advance(result(f"r{number}", [7]), named(ForwardEvent.Finish, f"r{number}"))(scheduler)
    scheduler.next_execution_plan()


def test_events_of_what_came_and_went_are_not_kept() -> None:
    """Far more prompts than the pool or the queue hold: what is reported in the end is what is there."""
    scheduler = Scheduler(make_config([FULL], 20, enable_kv_cache_events=True, max_kv_events=20))
    run_prompts(scheduler, 0, 300)
    stored = [event.token_ids for event in scheduler.drain_kv_events()]
    run_prompts(scheduler, 300, 0)
    assert 0 < len(stored) <= 20
    assert all(tokens[0] >= 290 * 8 for tokens in stored), "only the last prompts can still be there"
    assert scheduler.dropped_kv_events() == 0


def test_an_undrained_queue_is_bounded_and_counts_what_it_drops() -> None:
    scheduler = Scheduler(make_config([FULL], 400, enable_kv_cache_events=True, max_kv_events=10))
    run_prompts(scheduler, 0, 60)
    stored = scheduler.drain_kv_events()
    assert len(stored) == 10
    assert scheduler.dropped_kv_events() == 60 * 4 - 10
    # The earliest, which are the starts of prefixes, are kept.
    assert {event.token_ids[0] // 8 for event in stored} == {0, 1, 2}
    # What was not reported as stored is not reported as removed, and what was is.
    assert scheduler.clear_cache()
    removed = scheduler.drain_kv_events()
    assert sorted(event.block_hashes[0] for event in removed) == sorted(event.block_hashes[0] for event in stored)
    assert scheduler.drain_kv_events() == []


def test_undrained_events_take_bounded_memory() -> None:
    scheduler = Scheduler(make_config([FULL], 64, P=64, budget=1024, enable_kv_cache_events=True, max_kv_events=64))
    run_prompts(scheduler, 0, 50, size=1024)
    gc.collect()
    before = resident_bytes()
    run_prompts(scheduler, 50, 4000, size=1024)
    gc.collect()
    # Kept, the descriptions of 64,000 pages would take 25 MB.
    assert resident_bytes() - before < 6_000_000


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
