"""Residency events: what an outside router hears of the device cache (scenarios S-KV)."""

import random

import pytest

from tokenspeed_jax.scheduler import KVEvent

from .scenario import FULL, STATE, Group, Scenario, swa


def drain(s: Scenario) -> tuple[list[KVEvent.BlockStored], list[KVEvent.BlockRemoved]]:
    """Stored and removed events; removals must come first."""
    events = s.scheduler.drain_kv_events()
    kinds = [event.kind for event in events]
    assert kinds == sorted(kinds, key=["BlockRemoved", "BlockStored"].index)
    stored = [event for event in events if isinstance(event, KVEvent.BlockStored)]
    removed = [event for event in events if isinstance(event, KVEvent.BlockRemoved)]
    return stored, removed


def run(s: Scenario, request_id: str, prompt: list[int]) -> None:
    s.prefill(request_id, prompt)
    s.plan()
    s.finish(request_id)
    s.plan()


def test_kv1_kv2_one_stored_event_per_page_and_none_twice() -> None:
    s = Scenario([FULL], 2, enable_kv_cache_events=True)
    run(s, "a", [1, 2])
    (stored,), removed = drain(s)
    assert removed == []
    assert (stored.token_ids, stored.block_size, stored.parent_block_hash) == ([1, 2], 2, None)
    assert s.scheduler.drain_kv_events() == []
    s.submit("b", [3, 4])
    assert s.plan().ids == ["b"]
    stored_again, (gone,) = drain(s)
    assert (stored_again, gone.block_hashes) == ([], stored.block_hashes)


def test_kv3_all_groups_fold_into_one_event() -> None:
    s = Scenario([FULL, FULL], 4, enable_kv_cache_events=True)
    run(s, "a", [1, 2])
    stored, _ = drain(s)
    assert len(stored) == 1


@pytest.mark.parametrize("other", [swa(4), STATE])
def test_a_full_history_is_announced_without_gaps_whatever_else_the_model_keeps(other: Group) -> None:
    s = Scenario([FULL, other], 40, enable_kv_cache_events=True)
    run(s, "a", list(range(1, 13)))
    stored, removed = drain(s)
    assert removed == []
    assert [event.token_ids for event in stored] == [[2 * page + 1, 2 * page + 2] for page in range(6)]
    assert [event.parent_block_hash for event in stored] == [None, *(event.block_hashes[0] for event in stored[:-1])]


def test_a_chains_first_page_says_whose_it_is() -> None:
    s = Scenario([FULL], 40, enable_kv_cache_events=True)
    for salt in ("", "tenant"):
        s.submit(f"r{salt}", [1, 2, 3, 4, 5], cache_salt=salt)
        s.plan()
    s.plan()
    stored, _ = drain(s)
    assert [(event.token_ids, event.cache_salt) for event in stored] == [
        ([1, 2], ""), ([1, 2], "tenant"), ([3, 4], ""), ([3, 4], ""),
    ]  # fmt: skip
    assert len({event.block_hashes[0] for event in stored}) == 4


def test_kv4_chained_pages_are_stored_in_order_and_removed_in_reverse() -> None:
    s = Scenario([Group(granularity=1, packing=2)], 3, enable_kv_cache_events=True)
    run(s, "a", [1, 2, 3, 4])
    (first, second), _ = drain(s)
    assert (first.token_ids, second.token_ids) == ([1, 2], [3, 4])
    assert second.parent_block_hash == first.block_hashes[0]
    s.submit("b", [5, 6, 7, 8])
    assert s.plan().ids == ["b"]
    _, removed = drain(s)
    assert [event.block_hashes for event in removed] == [second.block_hashes, first.block_hashes]


def test_event_hashes_are_the_documented_ones() -> None:
    s = Scenario([FULL], 16, P=4, enable_kv_cache_events=True)
    run(s, "a", list(range(1, 9)))
    stored, _ = drain(s)
    assert [event.block_hashes for event in stored] == [[15932823548972441343], [12482753192408519678]]


def test_events_are_a_net_change_and_follow_every_clear() -> None:
    s = Scenario([FULL, swa(4)], 63, enable_kv_cache_events=True)
    run(s, "a", list(range(1, 9)))
    published = {event.block_hashes[0] for event in drain(s)[0]}
    assert published
    assert s.scheduler.clear_cache()
    assert {event.block_hashes[0] for event in drain(s)[1]} == published
    run(s, "b", list(range(1, 9)))
    assert s.scheduler.clear_cache()
    assert s.scheduler.drain_kv_events() == []


def test_without_the_option_there_are_no_events() -> None:
    s = Scenario([FULL], 16)
    run(s, "a", list(range(8)))
    assert s.scheduler.drain_kv_events() == []


@pytest.mark.parametrize("group", [FULL, Group(granularity=1, packing=2)])
def test_what_has_been_published_is_what_the_next_prompt_hits(group: Group) -> None:
    s = Scenario([group], 12, enable_kv_cache_events=True)
    choose = random.Random(1)
    chains: dict[int, tuple[int, ...]] = {}  # what each published hash stands for
    lengths = set()
    for index in range(200):
        prompt = [choose.randint(0, 1) for _ in range(choose.randint(1, 14))]
        stored, removed = drain(s)
        for gone in removed:
            del chains[gone.block_hashes[0]]
        for event in stored:
            before = () if event.parent_block_hash is None else chains[event.parent_block_hash]
            chains[event.block_hashes[0]] = (*before, *event.token_ids)
        published = {*chains.values()}
        assert len(published) == len(chains)
        hit = 0
        while hit + 2 < len(prompt) and tuple(prompt[: hit + 2]) in published:
            hit += 2
        step = s.prefill(f"r{index}", prompt)
        assert step.prefixes == [hit]
        lengths.add(hit)
        s.finish(f"r{index}")
        s.plan()
    assert len(lengths) > 3
