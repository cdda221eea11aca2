"""What a later prompt takes over from an earlier one (scenarios S-PX)."""

import pytest

from .scenario import FULL, STATE, Group, Scenario, Step, real, swa

PAIR = (FULL, swa(32))
SEED = list(range(1, 9))


def seeded(groups: tuple[Group, ...] = PAIR, **fields: object) -> tuple[Scenario, Step]:
    s = Scenario(groups, 63, **fields)
    return s, s.life("seed", SEED)


def reuse(s: Scenario, prompt: list[int], request_id: str = "reuse") -> tuple[Step, int]:
    """The first step of a prompt, and the parents it made unavailable."""
    before = s.available
    s.submit(request_id, prompt)
    step = s.plan()
    assert step.ids == [request_id]
    return step, before - s.available


def test_px1_a_longer_prompt_takes_over_the_whole_seed() -> None:
    s, seed = seeded()
    step, used = reuse(s, SEED + s.fresh(4))
    assert (step.prefixes, step.inputs, used) == ([8], [4], 14)
    for group in (0, 1):
        assert len(step.row("reuse", group)) == 7
        assert step.row("reuse", group)[:4] == seed.row("seed", group)[:4]
        assert not set(step.row("reuse", group)[:4]) & set(step.zeroed[f"g{group}"])
        assert step.row("reuse", group)[4:] == step.zeroed[f"g{group}"]


def test_px2_the_last_prompt_token_is_always_computed() -> None:
    s, _ = seeded()
    step, used = reuse(s, SEED)
    assert (step.prefixes, step.inputs, len(step.row("reuse")), used) == ([6], [2], 5, 10)


def test_px3_only_the_common_prefix_is_taken_over() -> None:
    s, _ = seeded()
    step, _ = reuse(s, SEED[:4] + s.fresh(8))
    assert (step.prefixes, step.inputs) == ([4], [8])


def test_px4_finishing_publishes_what_no_decode_has_published() -> None:
    s = Scenario(PAIR, 63)
    s.prefill("seed", SEED)
    s.finish("seed")
    s.plan()
    assert reuse(s, SEED)[0].prefixes == [6]


def test_px5_a_window_takes_over_its_tail_and_leaves_holes() -> None:
    s, seed = seeded((FULL, swa(4)))
    step, used = reuse(s, SEED + s.fresh(2))
    assert (step.prefixes, used) == ([8], 10)
    row = step.row("reuse", 1)
    assert (row[:2], real(row), len(row)) == ([0, 0], 4, 6)
    assert (row[2:4], row[4:]) == (seed.row("seed", 1)[2:4], step.zeroed["g1"])


def test_px6_a_hit_that_does_not_fit_waits_untouched() -> None:
    s = Scenario(PAIR, 10)
    shared = s.fresh(4)
    s.life("r1", shared)
    s.prefill("r3", 2)
    s.plan()
    assert s.available == 6
    s.submit("r2", shared + s.fresh(4))
    s.land("r3", 1)
    assert s.plan().ids == ["r3"]
    assert (s.scheduler.waiting_size(), s.available) == (1, 6)
    s.land("r3", 2)
    s.finish("r3")
    step = s.plan()
    assert (step.ids, step.prefixes, s.available) == (["r2"], [4], 0)


def test_px7_without_prefix_cache_nothing_is_taken_over() -> None:
    s, _ = seeded(disable_prefix_cache=True)
    step, used = reuse(s, SEED + s.fresh(4))
    assert (step.prefixes, step.inputs, used) == ([0], [12], 14)


def test_a_retracted_request_probes_even_without_prefix_cache() -> None:
    from tokenspeed_jax.scheduler import ForwardEvent

    from .scenario import named

    s = Scenario(PAIR, 63, disable_prefix_cache=True)
    s.prefill("r", SEED)
    s.plan()
    s.land("r", 9)
    s.advance(named(ForwardEvent.Retract, "r"))
    step = s.plan()
    assert (step.ids, step.batch.prefill_lengths, step.prefixes) == (["r"], [10], [8])


def test_px8_px9_replay_tokens_are_computed_again() -> None:
    s, seed = seeded(prefix_replay_tokens=4)
    step, _ = reuse(s, SEED)
    assert (step.prefixes, step.inputs) == ([4], [4])
    assert step.row("reuse")[:2] == seed.row("seed")[:2]
    assert step.row("reuse")[2] in step.zeroed["g0"]
    s.land("reuse", 1)
    s.finish("reuse")
    assert reuse(s, SEED + s.fresh(4), "third")[0].prefixes == [8]

    s, _ = seeded(prefix_replay_tokens=32)
    assert reuse(s, SEED)[0].prefixes == [0]


def test_px10_replay_with_groups_of_different_granularity() -> None:
    s = Scenario([FULL, swa(32, granularity=2, packing=4)], 63, P=8, prefix_replay_tokens=8)
    prompt = s.fresh(32)
    seed = s.life("seed", prompt)
    step, _ = reuse(s, prompt)
    assert (step.prefixes, step.inputs) == ([24], [8])
    for group, length, shared in ((0, 5, 3), (1, 17, 12)):
        row, old = step.row("reuse", group), seed.row("seed", group)
        assert (len(row), row[:shared]) == (length, old[:shared])
        assert not set(row[shared:]) & set(old[:shared])


@pytest.mark.parametrize(("group", "lookback"), [(swa(128), 2), (swa(1), 0), (swa(65), 1), (STATE, 1)])
def test_t20_a_hit_takes_over_the_lookback_and_no_block_before_it(group: Group, lookback: int) -> None:
    s = Scenario([FULL, group], 63, P=64, budget=1024)
    prompt = s.fresh(64 * (lookback + 1))
    seed = s.life("seed", prompt)
    step, _ = reuse(s, prompt + s.fresh(4))
    assert step.prefixes == [len(prompt)]
    assert step.row("reuse", 1)[: lookback + 1] == [0, *seed.row("seed", 1)[1 : lookback + 1]]
    s.abort("reuse")
    s.plan()
    # One page less would need the first block, and nobody has kept it.
    if lookback:
        assert reuse(s, prompt[: 64 * lookback] + s.fresh(4), "shorter")[0].prefixes == [0]


def turn(s: Scenario, request_id: str, prompt: list[int], outputs: list[int]) -> Step:
    """One turn of a conversation, finished and reaped."""
    s.submit(request_id, prompt)
    first = s.plan()
    s.land(request_id, outputs[0])
    for token in outputs[1:]:
        s.plan()
        s.land(request_id, token)
    s.finish(request_id)
    s.plan()
    return first


def test_px11_px12_a_conversation_reuses_prompt_and_output_of_earlier_turns() -> None:
    s = Scenario(PAIR, 63)
    turn(s, "t1", [1, 2, 3, 4], [101, 102, 103, 104, 105])
    second = [1, 2, 3, 4, 101, 102, 103, 104, 51, 52]
    step, used = reuse(s, second, "probe")
    assert (step.prefixes, step.inputs, used) == ([8], [2], 12)
    s.abort("probe")
    turn(s, "t2", second, [201, 202, 203])
    step, used = reuse(s, [*second, 201, 202, 203, 61, 62, 63], "t3")
    assert (step.prefixes, step.inputs, len(step.row("t3")), used) == ([12], [4], 9, 18)


def test_px13_a_block_that_slid_out_of_the_window_is_found_again() -> None:
    s = Scenario([FULL, swa(4)], 63)
    s.submit("t1", [1, 2, 3, 4])
    s.plan()
    s.land("t1", 101)
    rows = []
    for token in range(102, 107):
        rows.append(s.plan().row("t1", 1))
        s.land("t1", token)
    s.finish("t1")
    s.plan()
    (old,) = {row[2] for row in rows if len(row) > 2 and row[2] > 0}
    step, _ = reuse(s, [1, 2, 3, 4, 101, 102, 103, 104, 51, 52])
    assert step.prefixes == [8]
    assert step.row("reuse", 1)[2] == old


def test_px14_clearing_forgets_prefixes_unless_one_is_in_use() -> None:
    s, _ = seeded()
    assert s.scheduler.can_clear_cache()
    assert s.scheduler.clear_l1_cache()
    assert s.scheduler.empty_lcm_blocks() == 63
    assert reuse(s, SEED)[0].prefixes == [0]

    s, _ = seeded()
    reuse(s, SEED)
    assert not s.scheduler.can_clear_cache()
    assert not s.scheduler.clear_l1_cache()
    assert not s.scheduler.clear_cache()
    assert reuse(s, SEED, "again")[0].prefixes == [6]


def test_px15_a_request_blocked_for_a_while_still_publishes_its_pages() -> None:
    s = Scenario([FULL, FULL], 12)
    prompt = s.fresh(4)
    s.submit("r1", prompt)
    s.submit("r2", 4)
    s.plan()
    for token in (1, 2):
        s.land("r1", token)
        s.land("r2", token)
        s.plan()
    s.land("r1", 3)
    assert s.scheduler.request_token_size("r1") == 7
    assert s.plan().ids == []
    s.land("r2", 3)
    s.finish("r2")
    assert s.plan().ids == ["r1"]
    s.land("r1", 4)
    s.finish("r1")
    assert reuse(s, [*prompt, 1, 2, 99, 98])[0].prefixes == [6]


def test_prefix_hashes_are_the_documented_ones() -> None:
    s = Scenario([FULL, swa(8, granularity=2)], 8, P=4)
    hashes = s.scheduler.prefix_hashes_for_tokens(range(1, 10))  # type: ignore[arg-type]
    assert hashes == [
        "65a73aeec7de373d87d0bb665fb1b7e9c490f83287b644f3ea58f3eea1ee271f",
        "9f99734c64c898db6698530d61968eeba422fe1f4f044203644087f9ec65e01c",
    ]
    assert s.scheduler.prefix_hashes_for_tokens([1, 2, 3, 4]) == []
    assert s.scheduler.prefix_hashes_for_tokens([]) == []
    assert s.scheduler.expand_prefix_keys(["h"]) == (["g0", "g1", "g1"], ["h"] * 3, [0, 0, 1])


@pytest.mark.parametrize("length", [12, 13])
def test_two_identical_prompts_in_one_round_end_with_one_copy(length: int) -> None:
    s = Scenario(PAIR, 63)
    prompt = s.fresh(length)
    s.submit("a", prompt)
    s.submit("b", prompt)
    assert s.plan().ids == ["a", "b"]
    s.land("a", 1)
    s.land("b", 1)
    step = s.plan()
    pages = length // 2
    for group in (0, 1):
        assert step.row("a", group)[:pages] == step.row("b", group)[:pages]
        assert not set(step.row("a", group)[pages:]) & set(step.row("b", group)[pages:])
