"""Sliding groups whose rows come back by feeding a window again (scenarios S-RP)."""

import pytest

from .scenario import FULL, Group, Scenario, extend_result, real, replayable

THREE = (FULL, replayable(16, granularity=4), replayable(2, granularity=2))


def scenario(groups: tuple[Group, ...] = THREE, usable: int = 255, **fields: object) -> Scenario:
    return Scenario(groups, usable, **({"P": 8} | fields))


def test_rp1_a_hit_feeds_the_longest_window_again() -> None:
    s = scenario()
    prompt = s.fresh(32)
    seed = s.life("seed", prompt)
    s.submit("r", new := prompt + s.fresh(8))
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([16], [16], [24])
    assert step.batch.input_ids == new[16:]
    assert step.batch.shifted_input_ids == [*new[17:], -1]
    assert step.row("r")[:4] == seed.row("seed")[:4]
    for group, holes, g in ((1, 4, 4), (2, 8, 2)):
        row = step.row("r", group)
        assert row[:holes] == [0] * holes
        assert real(row) == len(row) - holes
        assert len(row) * g >= 41
        assert sorted(row[holes:]) == sorted(step.zeroed[f"g{group}"])


def test_rp2_a_hit_shorter_than_the_window_is_fed_again_whole() -> None:
    s = scenario()
    prompt = s.fresh(8)
    s.life("seed", prompt)
    s.submit("r", prompt + s.fresh(8))
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([0], [8], [16])
    assert all(block > 0 for group in range(3) for block in step.row("r", group))


def test_rp3_a_cold_prompt_feeds_nothing_again() -> None:
    s = scenario()
    s.submit("r", 12)
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([0], [0], [12])


@pytest.mark.parametrize(("length", "chunks"), [(70, [54, 16]), (84, [64, 20])])
def test_rp4_the_last_chunk_holds_a_whole_window(length: int, chunks: list[int]) -> None:
    s = scenario()
    s.submit("r", length)
    seen = []
    for _ in chunks:
        step = s.plan()
        seen += step.inputs
        assert step.replays == [0]
        s.land("r", *([1] if sum(seen) == length else []))
    assert seen == chunks


def test_rp5_tokens_fed_again_count_against_the_budget() -> None:
    s = scenario()
    prompt = s.fresh(32)
    s.life("seed", prompt)
    s.submit("hit", prompt + s.fresh(8))
    s.submit("cold", 60)
    assert s.plan().inputs == [24, 40]


def test_rp6_recomputed_prompt_tokens_and_replay_compose() -> None:
    s = scenario(prefix_replay_tokens=8)
    prompt = s.fresh(32)
    s.life("seed", prompt)
    s.submit("r", prompt + s.fresh(4))
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([8], [16], [28])


def test_rp7_mixed_rounds_keep_budget_for_a_window_and_its_chunk() -> None:
    s = scenario(budget=38, max_batch_size=16, enable_mixed_prefill_decode=True)
    prompt = s.fresh(24)
    s.life("seed", prompt)
    names = [f"d{index}" for index in range(8)]
    for name in names:
        s.submit(name, 4)
    running: set[str] = set()
    while len(running) < len(names):
        step = s.plan()
        s.advance(*(extend_result(request_id, [1]) for request_id in step.ids))
        running |= set(step.ids)
    s.submit("r", prompt + s.fresh(15))
    step = s.plan()
    assert (step.ids[0], step.inputs[0], step.replays) == ("r", 31, [16])
    assert step.inputs[1:] == [1] * 6


def test_replayable_groups_cache_nothing() -> None:
    s = scenario()
    s.life("seed", 32)
    assert s.scheduler.clear_cache() is True
    s.life("seed", s.fresh(32))
    # Four prefix pages of the full group, and nothing of the others.
    assert s.usable - s.scheduler.empty_lcm_blocks() == 4


def test_residency_leaves_replayable_groups_aside() -> None:
    s = scenario(enable_kv_cache_events=True)
    s.life("seed", 32)
    assert [event.kind for event in s.scheduler.drain_kv_events()] == ["BlockStored"] * 4


def test_without_a_group_that_shares_nothing_is_ever_hit() -> None:
    s = Scenario([replayable(4)], 63, P=4)
    prompt = s.fresh(12)
    s.life("seed", prompt)
    s.submit("r", prompt + s.fresh(4))
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([0], [0], [16])
