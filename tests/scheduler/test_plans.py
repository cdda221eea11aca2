"""What a plan contains: chunks, batches, table growth, reserves and windows (scenarios S-SC)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent

from .scenario import FULL, Group, Scenario, named, real, reserve, swa

PAIR = (FULL, swa(4))


def test_sc1_a_prompt_is_prefilled_whole_and_then_decoded() -> None:
    s = Scenario([FULL], 8, P=16)
    s.submit("r", range(1, 9))
    step = s.plan()
    assert (step.ids, step.inputs, step.prefixes, step.batch.prefill_lengths) == (["r"], [8], [0], [8])
    assert step.batch.input_ids == list(range(1, 9))
    assert step.batch.shifted_input_ids == [*range(2, 9), -1]
    assert step.batch.extend_replay_lens == [0]
    assert step.batch.num_extends() == 1
    assert s.scheduler.prefilling_size() == 1
    step = s.plan()
    assert (step.inputs, step.batch.decode_input_ids, step.batch.num_extends()) == ([1], [-1], 0)
    assert s.scheduler.decoding_size() == 1


def test_an_idle_plan_holds_one_batch_without_rows() -> None:
    step = Scenario([FULL], 8).plan()
    assert (step.ids, step.tables, step.zeroed) == ([], {}, {})
    assert (step.plan.cache, step.plan.remote_decode, step.plan.remote_prefill) == ([], None, None)


def test_sc2_a_long_prompt_runs_in_chunks_of_the_budget() -> None:
    s = Scenario([FULL], 32, P=16, budget=10)
    s.submit("r", 30)
    assert [s.plan().inputs for _ in range(4)] == [[10], [10], [10], [1]]


def test_sc3_shifted_tokens_reach_into_the_next_chunk() -> None:
    s = Scenario([FULL], 32, P=16, budget=5)
    s.submit("r", range(15))
    steps = [s.plan() for _ in range(3)]
    assert [step.prefixes for step in steps] == [[0], [5], [10]]
    assert steps[0].batch.shifted_input_ids == [1, 2, 3, 4, 5]
    assert steps[2].batch.shifted_input_ids == [11, 12, 13, 14, -1]


def test_sc4_an_unfinished_prompt_keeps_the_head_of_the_line() -> None:
    s = Scenario([FULL], 32, P=16, budget=5)
    s.submit("r0", 10)
    s.plan()
    s.submit("r1", 4)
    assert s.plan().ids == ["r0"]


def test_sc5_prefill_goes_before_decode_when_batches_are_not_mixed() -> None:
    s = Scenario([FULL], 32, P=16)
    s.prefill("r0", 8)
    s.plan()
    s.submit("r1", 8)
    assert s.plan().ids == ["r1"]


def test_sc6_a_mixed_batch_gives_decodes_their_budget_first_and_lists_prefill_first() -> None:
    s = Scenario([FULL], 32, P=16, budget=16, enable_mixed_prefill_decode=True)
    s.prefill("r0", 8)
    s.plan()
    s.submit("r1", 32)
    step = s.plan()
    assert (step.ids, step.inputs, step.batch.num_extends()) == (["r1", "r0"], [15, 1], 1)


def test_sc7_rows_never_exceed_the_batch_size() -> None:
    s = Scenario([FULL], 32, P=16, max_batch_size=2)
    for index in range(5):
        s.submit(f"r{index}", 4)
    assert len(s.plan().ids) <= 2
    assert s.scheduler.waiting_size() >= 3


def test_sc8_inputs_are_concatenated_in_row_order() -> None:
    s = Scenario([FULL], 32, P=16)
    s.submit("r0", [1, 2, 3, 4])
    s.submit("r1", [5, 6, 7, 8])
    step = s.plan()
    assert (step.ids, step.batch.input_ids) == (["r0", "r1"], [1, 2, 3, 4, 5, 6, 7, 8])


def test_sc9_request_slots_are_reused_in_order_of_release() -> None:
    s = Scenario([FULL], 32, P=16, max_batch_size=2)
    assert s.prefill("r0", 4).batch.request_pool_indices == [1]
    s.plan()
    s.finish("r0")
    s.submit("r1", 4)
    assert s.plan().batch.request_pool_indices == [2]
    s.submit("r2", 4)
    assert s.plan().batch.request_pool_indices == [1]


def test_sc10_sc11_the_reserve_decides_how_far_a_decode_grows() -> None:
    s = Scenario([FULL], 32, P=16)
    s.prefill("r", 8)
    assert len(s.plan().row("r")) == 1
    s.reserve("r", 16)
    assert len(s.plan().row("r")) == 2
    s.land("r", 1)
    s.reserve("r", 0)
    assert len(s.plan().row("r")) == 2

    s = Scenario([FULL], 32, P=16)
    s.prefill("r", 8)
    s.plan()
    s.advance(reserve("r", 16), reserve("r", 1))
    assert len(s.plan().row("r")) == 1

    s = Scenario([FULL], 32, P=8)
    s.prefill("r", 4)
    s.plan()
    s.reserve("r", 20)
    assert len(s.plan().row("r")) == 4


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_sc12_a_decode_after_prefill_uses_what_was_reserved(width: int) -> None:
    s = Scenario([FULL], 2 + 2 * width, P=1, decode_input_tokens=width, overlap_schedule_depth=1)
    s.prefill("r", 2)
    step = s.plan()
    assert (step.ids, step.inputs) == (["r"], [width])
    assert s.available == width


def test_sc13_a_sliding_group_decodes_for_ever_in_a_small_pool() -> None:
    s = Scenario([swa(4)], 7)
    s.prefill("r", 8)
    for token in range(40):
        assert s.plan().ids == ["r"]
        s.advance(*_landed("r", token))


def _landed(request_id: str, token: int) -> tuple[object, object]:
    result = ForwardEvent.ExtendResult()
    result.request_id, result.tokens = request_id, [token]
    return result, reserve(request_id, 1)


def test_sc14_both_groups_must_fit() -> None:
    s = Scenario([swa(4), swa(4)], 11)
    s.submit("r0", 8)
    s.submit("r1", 8)
    assert s.plan().ids == ["r0"]


def test_sc15_each_group_counts_in_its_own_blocks() -> None:
    s = Scenario([FULL, swa(4, granularity=2, packing=4)], 20, P=8)
    s.submit("r", 8)
    step = s.plan()
    assert (len(step.row("r", 0)), len(step.row("r", 1))) == (2, 5)


def test_sc16_a_window_slides_while_a_prompt_is_prefilled_and_decoded() -> None:
    s = Scenario(PAIR, 63, budget=4)
    s.submit("r", 12)
    s.plan()
    second = s.plan().row("r", 1)
    assert (len(second), real(second)) == (4, 4)
    before = s.available
    third = s.plan().row("r", 1)
    assert (len(third), third[:2], real(third)) == (7, [0, 0], 5)
    assert s.available == before + 2 - 4 - 2
    for _ in range(2):
        s.land("r")
    s.land("r", 1)
    seen = []
    for token in range(4):
        row = s.plan().row("r", 1)
        seen.append((row.count(0), len(row)))
        s.land("r", token)
    assert seen == [(4, 7), (5, 7), (5, 8), (6, 8)]


def test_sc17_headroom_is_taken_by_full_groups_only_when_nobody_else_is_there() -> None:
    s = Scenario(PAIR, 63, budget=4)
    s.submit("r", 16, max_new=6)
    step = s.plan()
    assert (len(step.row("r", 0)), len(step.row("r", 1))) == (11, 2)


def test_sc18_a_prompt_that_does_not_fit_waits_beside_a_running_decode() -> None:
    s = Scenario(PAIR, 10)
    s.submit("r1", 8)
    s.plan()
    assert s.available == 0
    s.submit("r2", 2)
    s.land("r1", 1)
    assert s.plan().ids == ["r1"]
    assert (s.scheduler.waiting_size(), s.available, s.scheduler.num_retractions()) == (1, 2, 0)
    s.land("r1", 2)
    s.finish("r1")
    assert s.plan().ids == ["r2"]


def test_sc19_a_chunk_may_be_funded_by_its_own_slide() -> None:
    s = Scenario(PAIR, 12, budget=4)
    s.submit("r", 12)
    s.plan()
    s.plan()
    assert s.available == 4
    assert s.plan().ids == ["r"]
    assert s.available == 0
    s.plan()
    assert s.available == 2


def test_sc20_a_window_stays_small_through_a_long_prompt() -> None:
    s = Scenario(PAIR, 16, budget=4)
    s.submit("r", 20)
    rows = [s.plan() for _ in range(5)]
    assert all(real(step.row("r", 1)) <= 5 for step in rows)
    assert len(rows[-1].row("r", 0)) == 11


def test_sc21_a_decode_uses_its_reserve_and_leaves_the_rest_to_others() -> None:
    s = Scenario([FULL, FULL], 10)
    s.submit("a", 6)
    s.submit("b", 2)
    assert s.plan().ids == ["a"]
    assert (s.available, s.scheduler.active_lcm_blocks()) == (2, 8)
    s.land("a", 1)
    assert s.plan().ids == ["a"]
    assert s.available == 2
    s.land("a", 2)
    s.finish("a")
    assert s.plan().ids == ["b"]


def test_sc22_an_abort_gives_everything_back_and_an_exact_fit_fits() -> None:
    # The catalogue says "S-SC21, abort a": with its b still waiting, b would start and 8 tokens not fit. So without b.
    s = Scenario([FULL, FULL], 10)
    s.submit("a", 6)
    s.plan()
    s.abort("a")
    s.plan()
    assert s.available == 10
    s.submit("c", 8)
    assert s.plan().ids == ["c"]
    assert s.available == 0


def test_sc23_windows_of_different_length_keep_different_blocks() -> None:
    s = Scenario([FULL, swa(3), swa(5)], 60, P=4)
    s.prefill("r", 12)
    held = []
    for token in range(24):
        step = s.plan()
        held.append((real(step.row("r", 1)), real(step.row("r", 2))))
        s.land("r", token)
    assert all(1 <= short <= long <= 2 for short, long in held)
    assert any(short != long for short, long in held)


def test_sc24_everything_comes_back_after_the_last_request_and_not_before() -> None:
    s = Scenario(PAIR, 63)
    for request_id, length in (("r1", 4), ("r2", 8), ("r3", 6)):
        s.submit(request_id, length)
    s.plan()
    for request_id in ("r2", "r1", "r3"):
        assert s.available < 63
        s.land(request_id, 1)
        s.finish(request_id)
        s.plan()
    assert s.available == 63


@pytest.mark.parametrize("rounds", [2, 4])
def test_sc25_an_abort_mid_prompt_or_mid_decode_gives_everything_back(rounds: int) -> None:
    s = Scenario(PAIR, 63, budget=4)
    s.submit("r", 12)
    for _ in range(rounds):
        s.plan()
    s.abort("r")
    assert s.plan().ids == []
    assert s.available == 63
    s.land("r", 1)  # the late result of a request that is gone


def test_sc26_a_hit_prepays_for_window_blocks_that_others_may_pin() -> None:
    for busy, expected in ((True, 7), (False, 6)):
        s = Scenario([FULL, swa(16)], 200, P=4)
        shared = list(range(8))
        s.life("seed", shared)
        if busy:
            s.prefill("a", 8)
            s.plan()
        s.submit("b", shared + s.fresh(12), max_new=100)
        step = s.plan()
        assert step.prefixes == [8]
        assert (len(step.row("b", 0)), len(step.row("b", 1))) == (30, expected)


def test_sc27_a_chunked_prompt_prepays_for_its_window_only_beside_others() -> None:
    for busy, expected in ((True, 4), (False, 2)):
        s = Scenario([FULL, swa(8)], 200, P=4, budget=8)
        if busy:
            s.prefill("a", 8)
            s.plan()
        s.submit("b", 20, max_new=10)
        step = s.plan()
        assert (len(step.row("b", 0)), len(step.row("b", 1))) == (8, expected)


def test_sc28_declared_generation_is_reserved_at_admission() -> None:
    s = Scenario([FULL, FULL], 14)
    s.submit("a", 6, max_new=5)
    s.submit("b", 4)
    assert s.plan().ids == ["a"]
    assert s.available == 2


def test_sc29_an_event_that_the_state_forbids_names_event_and_state_and_changes_nothing() -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    text = "FSM transition invalid: event=tokenspeed::fsm::FinishEvent; state=tokenspeed::fsm::Submitted"
    with pytest.raises(RuntimeError, match=text):
        s.finish("r")
    assert s.plan().ids == ["r"]


def test_sc30_an_unfinished_prompt_cannot_land_a_token() -> None:
    s = Scenario([FULL], 8, budget=2)
    s.submit("r", 4)
    s.plan()
    with pytest.raises(RuntimeError, match="state=tokenspeed::fsm::Prefilling"):
        s.land("r", 5)
    s.land("r")
    with pytest.raises(RuntimeError, match="no forward in flight"):
        s.land("r")


def test_a_batch_of_events_is_applied_whole_or_not_at_all() -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    s.plan()
    result = ForwardEvent.ExtendResult()
    result.request_id, result.tokens = "r", [1]
    finish = named(ForwardEvent.Finish, "r")
    with pytest.raises(RuntimeError):
        s.advance(result, result)
    assert s.scheduler.request_token_size("r") == 4
    with pytest.raises(RuntimeError):
        s.advance(result, named(ForwardEvent.Retract, "r"), reserve("r", 1))
    assert (s.scheduler.request_token_size("r"), s.scheduler.prefilling_size()) == (4, 1)
    s.advance(result, finish, finish, result)
    s.plan()
    assert s.scheduler.request_token_size("r") == -1


def test_more_tokens_than_were_scheduled_are_refused() -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    s.plan()
    with pytest.raises(ValueError, match="2 tokens are more than its scheduled forwards"):
        s.land("r", 1, 2)
    s.land("r", 1)
    s.plan()
    with pytest.raises(ValueError, match="reserve_num_tokens_in_next_schedule_event"):
        s.reserve("r", -1)
    assert s.scheduler.request_token_size("r") == 5


def test_blocks_of_one_table_are_spread_over_shards() -> None:
    s = Scenario([Group(packing=4, shards=2)], 8)
    s.submit("r", 9)
    assert s.plan().row("r") == [1, 2, 3, 4, 5]


def test_t8_blocks_are_dealt_to_four_owners_in_turn() -> None:
    # Each of these requests has one block, so each takes the lowest free one of the first owner that has any: owner 0
    # fills up before owner 1. The place of an id in that order tells its owner, and which of the owner's blocks it is.
    s = Scenario([Group(packing=12, shards=4)], 1, max_batch_size=12)
    names = [f"r{i}" for i in range(12)]
    for name in names:
        s.submit(name, 1)
    step = s.plan()
    assert step.ids == names
    order = [block for name in names for block in step.row(name)]
    place = {block: divmod(index, 3) for index, block in enumerate(order)}
    assert {block: (place[block][0], place[block][1] + 1) for block in (1, 2, 4, 5, 8, 9)} == {
        1: (0, 1), 2: (1, 1), 4: (3, 1), 5: (0, 2), 8: (3, 2), 9: (0, 3),
    }  # fmt: skip


@pytest.mark.parametrize("max_new", [1, 2, 3])
def test_no_step_is_planned_past_the_declared_output_where_the_caller_ends_there(max_new: int) -> None:
    s = Scenario([FULL], 63, plan_past_max_new_tokens=False, overlap_schedule_depth=1)
    s.submit("ends", 5, max_new)
    s.submit("goes on", 5)
    planned = [s.plan().ids for _ in range(1)]
    for _ in range(max_new):
        planned.append(s.plan().ids)
        for request_id in planned[-2]:
            s.land(request_id, 7)
    assert sum("ends" in ids for ids in planned) == max_new
    assert all("goes on" in ids for ids in planned)


def test_a_request_that_outlives_its_declared_output_is_planned_again() -> None:
    s = Scenario([FULL], 63, plan_past_max_new_tokens=False, overlap_schedule_depth=1)
    s.submit("a", 5, 1)
    assert s.plan().ids == ["a"]
    assert s.scheduler.next_execution_plan().forward[0].request_ids == []
    s.land("a", 7)
    assert s.plan().ids == ["a"]


def test_the_default_plans_ahead_whatever_was_declared() -> None:
    s = Scenario([FULL], 63, overlap_schedule_depth=1)
    s.submit("a", 5, 1)
    assert [s.plan().ids for _ in range(2)] == [["a"], ["a"]]
