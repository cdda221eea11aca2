"""Forks: a prompt that several requests have in common is computed once, and its last partial block is copied."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent, KVEvent

from .scenario import FULL, STATE, Group, Scenario, named, real, replayable, spec, swa


def retract(request_id: str) -> object:
    return named(ForwardEvent.Retract, request_id)


def family(s: Scenario, prompt: int, forks: int, max_new: int = 0) -> list[int]:
    """Root "r" and forks "f0", "f1", ... in one submission; returns the prompt."""
    tokens = s.fresh(prompt)
    names = [f"f{index}" for index in range(forks)]
    s.scheduler.submit_requests([spec("r", tokens, max_new), *(spec(n, tokens, max_new, fork_of="r") for n in names)])
    return tokens


# Admission ----------------------------------------------------------------------------------------------------------


def test_a_fork_computes_the_last_token_only_and_copies_the_partial_block() -> None:
    s = Scenario([Group(granularity=4)], 20, P=4)
    family(s, 10, 2)
    first = s.plan()
    assert (first.ids, first.inputs, first.copied) == (["r"], [10], {})
    second = s.plan()
    assert second.ids == ["f0", "f1"]
    assert (second.prefixes, second.inputs, second.replays) == ([9, 9], [1, 1], [0, 0])
    assert second.batch.prefill_lengths == [10, 10]
    root = first.row("r")
    rows = [second.row(name) for name in ("f0", "f1")]
    assert [row[:2] for row in rows] == [root[:2]] * 2
    assert len({root[2], rows[0][2], rows[1][2]}) == 3
    assert second.copied == {"g0": [(root[2], row[2]) for row in rows]}
    assert second.zeroed == {"g0": []}, "a block that is overwritten whole need not be cleared"


def test_nothing_is_copied_at_the_start_of_a_block() -> None:
    s = Scenario([Group(granularity=4)], 20, P=4)
    family(s, 9, 1)
    root = s.plan().row("r")
    step = s.plan()
    fork = step.row("f0")
    assert fork[:2] == root[:2]
    assert fork[2] != root[2]
    assert (step.copied, step.zeroed) == ({"g0": []}, {"g0": [fork[2]]})


def test_each_group_copies_by_its_own_block_length() -> None:
    s = Scenario([Group(granularity=4), Group(granularity=1, packing=4), swa(3, granularity=2, packing=2)], 30, P=4)
    family(s, 8, 1)
    root = s.plan()
    step = s.plan()
    assert step.prefixes == [7]
    # The prompt completes both prefix pages, so what lies below 7 is shared whole.
    assert step.copied == {
        "g0": [(root.row("r", 0)[1], step.row("f0", 0)[1])],
        "g1": [],
        "g2": [(root.row("r", 2)[3], step.row("f0", 2)[3])],
    }
    assert step.row("f0", 1)[:7] == root.row("r", 1)[:7]
    # The query at 7 reads from 5 on.
    assert step.row("f0", 2)[:3] == [0, 0, root.row("r", 2)[2]]


def test_blocks_of_an_unfinished_prefix_page_are_copied_as_well() -> None:
    """Each continuation ends that page with other tokens, and a block can be cached as one page's only."""
    s = Scenario([Group(granularity=2), swa(4, granularity=1), replayable(4, granularity=1)], 60, P=8)
    family(s, 15, 1)
    root = s.plan()
    step = s.plan()
    assert step.prefixes == [14]
    assert step.row("f0", 0)[:4] == root.row("r", 0)[:4]
    assert step.copied["g0"] == [(root.row("r", 0)[slot], step.row("f0", 0)[slot]) for slot in (4, 5, 6)]
    # A window that begins inside that page leaves holes before it.
    assert step.row("f0", 1)[:11] == [0] * 11
    assert step.copied["g1"] == [(root.row("r", 1)[slot], step.row("f0", 1)[slot]) for slot in (11, 12, 13)]
    # What is never cached is shared.
    assert step.copied["g2"] == []
    assert step.row("f0", 2)[11:14] == root.row("r", 2)[11:14]


def test_a_window_of_one_token_copies_nothing() -> None:
    s = Scenario([swa(1, granularity=4)], 20, P=4)
    family(s, 7, 1)
    s.plan()
    step = s.plan()
    assert step.copied == {"g0": []}
    assert step.row("f0")[0] == 0
    assert step.prefixes == [6]


def test_a_fork_starts_in_the_round_after_the_one_that_ends_the_prompt() -> None:
    s = Scenario([FULL], 20, budget=4)
    family(s, 10, 1)
    assert [s.plan().inputs for _ in range(3)] == [[4], [4], [2]]
    step = s.plan()
    assert (step.ids, step.prefixes) == (["f0"], [9])


def test_a_fork_needs_no_landing_of_its_parent() -> None:
    s = Scenario([FULL], 20, overlap_schedule_depth=1, enable_mixed_prefill_decode=True)
    family(s, 5, 1)
    s.plan()
    assert s.plan().ids == ["f0", "r"]


def test_forks_share_without_a_prefix_cache() -> None:
    s = Scenario([FULL], 20, disable_prefix_cache=True)
    family(s, 9, 1)
    root = s.plan().row("r")
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([8], [1])
    assert step.row("f0")[:4] == root[:4]


def test_a_running_request_can_be_forked_while_its_blocks_are_there() -> None:
    s = Scenario([FULL, swa(4, granularity=2)], 40)
    tokens = s.fresh(8)
    s.prefill("r", tokens)
    s.plan()
    s.submit("early", tokens, fork_of="r")
    assert s.plan().prefixes == [7]
    s.land("early", 3)
    for token in range(3):
        s.land("r", token)
        s.plan()
        s.land("early", token)
    # The window has moved on: what the query at 7 reads is gone, and so are the windows of all boundaries below.
    s.submit("late", tokens, fork_of="r")
    step = s.plan()
    assert (step.ids, step.prefixes, step.copied) == (["late"], [0], {})


def test_the_replayed_tail_is_computed_by_a_fork_too() -> None:
    s = Scenario([Group(granularity=4)], 20, P=4, prefix_replay_tokens=3)
    family(s, 9, 1)
    root = s.plan().row("r")
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([6], [3])
    assert step.copied == {"g0": [(root[1], step.row("f0")[1])]}
    assert step.zeroed == {"g0": [step.row("f0")[2]]}


def test_replayable_groups_are_shared_and_nothing_is_fed_again() -> None:
    s = Scenario([FULL, replayable(4, granularity=2)], 40)
    family(s, 9, 1)
    root = s.plan()
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([8], [0], [1])
    assert step.row("f0", 1)[:4] == [0, 0, *root.row("r", 1)[2:4]]


def test_a_snapshot_group_makes_a_fork_an_ordinary_request() -> None:
    s = Scenario([FULL, STATE], 40)
    family(s, 9, 1)
    s.plan()
    s.land("r", 1)
    step = s.plan()
    assert (step.ids, step.copied) == (["f0"], {})
    assert step.prefixes == [0], "the parent has not published anything yet"


def test_a_prompt_of_one_token_has_nothing_to_share() -> None:
    s = Scenario([FULL], 20)
    family(s, 1, 1)
    s.plan()
    step = s.plan()
    assert (step.ids, step.prefixes, step.copied) == (["f0"], [0], {})


def test_a_fork_reserves_what_a_completed_prompt_reserves() -> None:
    plain, forked = Scenario([Group(granularity=4)], 40, P=4), Scenario([Group(granularity=4)], 40, P=4)
    plain.submit("a", 10, 20)
    family(forked, 10, 1, max_new=20)
    forked.plan()
    assert len(forked.plan().row("f0")) == len(plain.plan().row("a"))


# Waiting ------------------------------------------------------------------------------------------------------------


def test_a_fork_that_waits_is_in_nobodys_way() -> None:
    """Forks of a large prompt that does not fit hold no line."""
    s = Scenario([FULL], 10, max_overtaken_rounds=0, max_batch_size=3)
    s.prefill("running", 12)
    tokens = s.fresh(12)
    s.submit("r", tokens, priority=1)
    s.submit("f0", tokens, priority=-1, fork_of="r")
    s.submit("small", 2)
    assert s.plan().ids == ["small"]
    assert s.scheduler.waiting_size() == 2


def test_a_fork_that_waits_does_not_count_as_overtaken() -> None:
    s = Scenario([FULL], 30, budget=4, max_overtaken_rounds=1)
    tokens = s.fresh(20)
    s.submit("r", tokens, priority=5)
    s.submit("f0", tokens, fork_of="r", priority=0)
    for index in range(4):
        s.submit(f"s{index}", 4, priority=1)
        assert s.plan().ids == [f"s{index}"]
        s.land(f"s{index}", 1)
        s.finish(f"s{index}")
    assert [s.plan().ids for _ in range(6)] == [["r"]] * 5 + [["f0"]]


def test_a_fork_waits_out_a_retraction_of_an_unfinished_parent() -> None:
    s = Scenario([FULL], 30, budget=4)
    family(s, 10, 1)
    s.plan()
    s.land("r")
    s.advance(retract("r"))
    starts = [(step.ids, step.prefixes) for step in (s.plan() for _ in range(4))]
    assert [ids for ids, _ in starts] == [["r"], ["r"], ["r"], ["f0"]]
    assert starts[-1][1] == [9]


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_without_its_parent_a_fork_is_an_ordinary_request(end: str) -> None:
    s = Scenario([Group(granularity=4)], 30, P=4)
    tokens = s.fresh(10)
    s.prefill("r", tokens)
    s.submit("f0", tokens, fork_of="r")
    if end == "abort":
        s.abort("r")
    else:
        s.finish("r")
    step = s.plan()
    # Only a normal end has published the prompt's pages.
    assert (step.ids, step.prefixes, step.copied) == (["f0"], [8 if end == "finish" else 0], {})


def test_a_fork_does_not_wait_for_a_parent_that_has_to_start_again() -> None:
    s = Scenario([FULL], 30, budget=4, max_batch_size=2)
    tokens = s.fresh(6)
    s.submit("r", tokens)
    s.plan()
    s.plan()
    s.land("r")
    s.land("r", 1)
    s.submit("f0", tokens, fork_of="r", priority=-1)
    s.advance(retract("r"))
    step = s.plan()
    assert (step.ids[0], step.prefixes[0], step.copied) == ("f0", 4, {})


@pytest.mark.parametrize("landed", [False, True])
def test_a_parent_that_is_back_is_shared_if_it_computes_the_prompt_alone(landed: bool) -> None:
    """With output it may have resumed behind the prompt; then not every row of the blocks that it holds is written."""
    s = Scenario([Group(granularity=4)], 30, P=4)
    tokens = s.fresh(10)
    s.submit("r", tokens)
    s.plan()
    if landed:
        s.land("r", 1)
    s.submit("f0", tokens, fork_of="r")
    s.advance(retract("r"))
    assert s.plan().ids == ["r"]
    step = s.plan()
    assert (step.ids, step.prefixes) == (["f0"], [0 if landed else 9])


def test_an_aborted_parent_lets_its_forks_go_before_its_prompt_is_done() -> None:
    s = Scenario([FULL], 30, budget=4)
    family(s, 10, 2)
    s.plan()
    s.abort("r")
    assert s.plan().ids == ["f0"]


def test_a_later_request_of_the_parents_id_is_not_the_parent() -> None:
    s = Scenario([FULL], 30, max_batch_size=1)
    tokens = s.fresh(6)
    s.prefill("r", tokens)
    s.submit("f0", tokens, fork_of="r")
    s.submit("between", 6, priority=-1)
    s.abort("r")
    assert s.plan().ids == ["between"]
    s.submit("r", 6, priority=1)
    s.land("between", 1)
    s.finish("between")
    assert s.plan().ids == ["f0"]


def test_a_retracted_fork_comes_back_by_itself() -> None:
    s = Scenario([Group(granularity=4)], 30, P=4)
    tokens = family(s, 10, 1)
    s.plan()
    s.land("r", 1)
    s.plan()
    s.land("f0", 2)
    s.advance(retract("f0"))
    step = s.plan()
    assert (step.ids, step.copied) == (["f0"], {})
    assert step.batch.input_ids == [*tokens, 2][step.prefixes[0] :]


# What is shared -------------------------------------------------------------------------------------------------------


def test_shared_blocks_outlive_the_parent_and_return_with_the_last_holder() -> None:
    s = Scenario([Group(granularity=2)], 20, P=4)
    family(s, 9, 2)
    s.plan()
    s.plan()
    # 5 blocks of the root; of each fork the last one, which is its own.
    assert s.scheduler.active_lcm_blocks() == 5 + 2
    s.abort("r")
    assert s.scheduler.active_lcm_blocks() == 4 + 2
    s.abort("f0")
    assert s.scheduler.active_lcm_blocks() == 4 + 1
    s.abort("f1")
    assert (s.scheduler.active_lcm_blocks(), s.available) == (0, 20)


def test_a_forks_output_is_cached_behind_the_shared_prompt() -> None:
    s = Scenario([Group(granularity=2)], 40, P=4)
    tokens = family(s, 10, 1)
    s.plan()
    s.land("r", 1)
    s.plan()
    s.land("f0", 2)
    for token in range(4):
        assert s.plan().ids == ["r", "f0"]
        s.land("r", 10 + token)
        s.land("f0", 20 + token)
    s.finish("f0")
    s.finish("r")
    s.plan()
    for first, later in ((1, [10, 11, 12, 13]), (2, [20, 21, 22, 23])):
        s.submit(f"probe{first}", [*tokens, first, *later])
        assert s.plan().prefixes == [12]
        s.abort(f"probe{first}")
    s.plan()
    assert s.available == 40


def test_forks_are_reported_like_ordinary_requests() -> None:
    def stored(forked: bool) -> list[tuple[object, ...]]:
        s = Scenario([Group(granularity=2)], 40, P=4, enable_kv_cache_events=True)
        tokens = list(range(10))
        s.submit("r", tokens)
        s.plan()
        s.submit("f0", tokens, fork_of="r" if forked else "")
        s.land("r", 1)
        s.plan()
        s.land("f0", 2)
        for token in range(4):
            assert s.plan().ids == ["r", "f0"]
            s.land("r", 10 + token)
            s.land("f0", 20 + token)
        s.finish("f0")
        s.finish("r")
        events = s.scheduler.drain_kv_events()
        blocks = [event for event in events if isinstance(event, KVEvent.BlockStored)]
        assert len(blocks) == len(events)
        return sorted((block.block_hashes, block.parent_block_hash or 0, block.token_ids) for block in blocks)

    assert len(stored(True)) == 4
    assert stored(True) == stored(False)


def test_a_refused_fork_changes_nothing() -> None:
    s = Scenario([Group(granularity=4)], 4, P=4)
    tokens = s.fresh(10)
    s.prefill("r", tokens, 4)
    s.submit("f0", tokens, 4, fork_of="r")
    before = (s.scheduler.empty_lcm_blocks(), s.scheduler.active_lcm_blocks())
    assert before == (0, 4)
    step = s.plan()
    assert (step.ids, step.copied) == (["r"], {})
    assert (s.scheduler.empty_lcm_blocks(), s.scheduler.active_lcm_blocks()) == before


def test_an_eviction_makes_room_for_a_fork_but_never_of_what_it_shares() -> None:
    s = Scenario([Group(granularity=4)], 5, P=4)
    s.life("cached", 8)
    tokens = s.fresh(10)
    s.prefill("r", tokens)
    s.submit("f0", tokens, fork_of="r")
    assert s.scheduler.empty_lcm_blocks() == 0
    step = s.plan()
    assert (step.ids, step.prefixes) == (["f0"], [9])
    assert real(step.row("f0")) == 3
