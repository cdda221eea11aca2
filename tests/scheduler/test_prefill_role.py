"""Role P: prompts are computed here and handed to a decode peer (scenarios S-PD, S-RP8, S-ST3, S-SC28, S-RT15/16)."""

import numpy as np
import pytest

from tokenspeed_jax.scheduler import PD, ForwardEvent

from .peers import SCATTERING_GROUPS, TWO_FULL, PrefillWorker, handed_off, run_scattered_prompt
from .scenario import FULL, STATE, extend_result, named, real, replayable

PAIR = (FULL, STATE)


def test_pd1_a_prompt_is_handed_off_once_its_token_has_landed() -> None:
    s = PrefillWorker(PAIR, 63, P=4)
    s.submit("r", 10)
    assert (s.scheduler.bootstrapping_size(), s.scheduler.waiting_size()) == (1, 0)
    assert s.plan().ids == []
    s.advance(PD.BootstrappedEvent("r"))
    assert (s.scheduler.bootstrapping_size(), s.scheduler.waiting_size()) == (0, 1)
    step = s.plan()
    assert (step.ids, step.inputs, step.hand_off) == (["r"], [10], None)
    assert (step := s.plan()).ids == []
    assert step.hand_off is None
    s.land_with("r", 42, [42, 7, 9])
    step = s.plan()
    assert step.ids == []
    hand_off = step.hand_off
    assert hand_off is not None
    assert (hand_off.ids, hand_off.batch.decode_input_ids) == (["r"], [42])
    assert hand_off.batch.spec_candidate_ids == [[42, 7, 9]]
    assert (hand_off.batch.num_extends(), hand_off.batch.prefill_lengths) == (0, [10])
    # The boundary at 8 has expired; what the peer takes over is the snapshot at the end.
    assert (real(hand_off.row("r")), real(hand_off.row("r", 1))) == (3, 1)
    assert hand_off.row("r", 1)[2] > 0
    assert s.plan().hand_off is None


def test_pd2_a_transfer_pins_from_the_first_chunk_to_the_peers_confirmation() -> None:
    s = PrefillWorker(PAIR, 63, P=4, budget=8)

    def pinned() -> tuple[bool, int, bool]:
        return s.scheduler.pd_transfer_pinned("r"), s.scheduler.pd_transfer_size(), s.scheduler.can_clear_cache()

    s.start("r", 10)
    assert pinned() == (False, 0, True)
    for state, land in (("Prefilling", ()), ("PrefillAwaitingResult", (42,))):
        s.plan()
        assert pinned() == (True, 1, False)
        with pytest.raises(RuntimeError, match=f"FinishEvent; state=tokenspeed::fsm::{state}"):
            s.finish("r")
        s.land("r", *land)
    assert s.scheduler.prefilling_size() == 1
    s.plan()
    assert (s.scheduler.prefilling_size(), s.scheduler.decoding_size()) == (0, 1)
    assert pinned() == (True, 1, False)
    with pytest.raises(RuntimeError, match="FinishEvent; state=tokenspeed::fsm::Decoding"):
        s.finish("r")
    assert not s.scheduler.clear_l1_cache()
    assert not s.scheduler.clear_cache()
    s.succeed("r")
    assert pinned() == (False, 0, True)
    assert s.scheduler.clear_cache()
    assert s.scheduler.empty_lcm_blocks() == 63
    s.succeed("r")
    s.plan()
    s.succeed("r")


def test_pd3_prefill_goes_on_while_a_token_is_awaited() -> None:
    s = PrefillWorker(PAIR, 63, P=4)
    s.start("r1", 10)
    s.plan()
    s.start("r2", 70)
    step = s.plan()
    assert (step.ids, step.inputs, step.hand_off) == (["r2"], [64], None)
    s.land_with("r1", 42)
    step = s.plan()
    assert (step.ids, step.inputs, handed_off(step)) == (["r2"], [6], ["r1"])


def test_pd11_a_prefill_worker_needs_no_room_to_generate() -> None:
    s = PrefillWorker([FULL], 3)
    s.start("r", 6, max_new=100)
    # It even does without the slot to draft into, for it is alone and there is no other.
    step = s.plan()
    assert (step.inputs, len(step.row("r"))) == ([6], 3)
    s.land_with("r", 1)
    assert handed_off(s.plan()) == ["r"]
    with pytest.raises(ValueError, match="need room for 7"):
        s.submit("long", 7)


def test_a_prompt_that_is_not_alone_waits_for_a_slot_to_draft_into() -> None:
    s = PrefillWorker([FULL], 6)
    s.start("a", 3)
    s.start("b", 8)
    assert s.plan().ids == ["a"]
    assert s.plan().ids == []
    s.land_with("a", 1)
    step = s.plan()
    assert (step.ids, handed_off(step)) == ([], ["a"])
    s.succeed("a")
    step = s.plan()
    assert (step.ids, len(step.row("b"))) == (["b"], 5)


def test_pd14_hand_offs_share_a_plan_with_the_next_prompt() -> None:
    s = PrefillWorker([FULL], 63, budget=8)
    s.start("r0", 4)
    s.start("r1", 4)
    assert s.plan().ids == ["r0", "r1"]
    s.start("r2", 6)
    s.land_with("r0", 10)
    s.land_with("r1", 11, [11])
    step = s.plan()
    assert (step.ids, step.inputs) == (["r2"], [6])
    hand_off = step.hand_off
    assert hand_off is not None
    assert (hand_off.ids, hand_off.batch.decode_input_ids) == (["r0", "r1"], [10, 11])
    assert hand_off.batch.spec_candidate_ids == [[], [11]]


def test_rp8_a_hit_is_fed_again_and_its_window_is_there_to_be_transferred() -> None:
    s = PrefillWorker((FULL, replayable(16, granularity=4), replayable(2, granularity=2)), 255, P=8)
    prompt = s.fresh(32)
    s.hand_over("seed", prompt)
    s.start("r", prompt + s.fresh(8))
    step = s.plan()
    assert (step.prefixes, step.replays, step.inputs) == ([16], [16], [24])
    s.land_with("r", 1)
    hand_off = s.plan().hand_off
    assert hand_off is not None
    for group, first in ((1, 6), (2, 19)):
        row = hand_off.row("r", group)
        assert row[:first] == [0] * first
        assert real(row) == len(row) - first
    assert len(hand_off.row("r", 1)) >= 10


def test_st3_a_completing_chunk_reserves_no_state_to_move_on_to() -> None:
    s = PrefillWorker(PAIR, 63, P=4)
    s.start("r", 10)
    assert [block > 0 for block in s.plan().row("r", 1)] == [False, True, True]


@pytest.mark.parametrize("usable", [4, 63])
def test_a_hand_off_takes_no_block_even_when_none_is_left(usable: int) -> None:
    s = PrefillWorker((FULL, STATE), usable, P=4, disable_prefix_cache=True)
    s.start("r", 8)
    step = s.plan()
    assert [block > 0 for block in step.row("r", 1)] == [False, True]
    s.land_with("r", 1)
    empty = s.scheduler.empty_lcm_blocks()
    step = s.plan()
    assert handed_off(step) == ["r"]
    assert (step.zeroed["g0"], step.zeroed["g1"], s.scheduler.empty_lcm_blocks()) == ([], [], empty)


def test_sc28_no_generation_is_reserved() -> None:
    s = PrefillWorker(TWO_FULL, 14)
    s.start("a", 6, max_new=6000)
    assert s.plan().ids == ["a"]
    assert s.available == 6


def test_rt15_a_runtime_retraction_starts_again_with_what_has_landed() -> None:
    for landed, size in ((True, 5), (False, 4)):
        s = PrefillWorker([FULL], 8)
        s.start("r", 4)
        s.plan()
        if landed:
            s.land_with("r", 9, [9, 8])
        s.advance(named(ForwardEvent.Retract, "r"))
        assert (s.scheduler.waiting_size(), s.available, s.scheduler.pd_transfer_size()) == (1, 8, 0)
        step = s.plan()
        assert (step.ids, step.batch.prefill_lengths) == (["r"], [size])
        s.land_with("r", 3)
        hand_off = s.plan().hand_off
        assert hand_off is not None
        assert (hand_off.batch.decode_input_ids, hand_off.batch.spec_candidate_ids) == ([3], [[]])


def test_rt16_the_final_token_may_land_before_an_older_empty_result() -> None:
    s = PrefillWorker([FULL], 8, budget=2)
    s.start("r", 4)
    s.plan()
    s.plan()
    s.land_with("r", 9)
    assert handed_off(s.plan()) == ["r"]
    s.land("r")
    with pytest.raises(RuntimeError, match="no forward in flight"):
        s.land("r")
    assert s.scheduler.request_token_size("r") == 5


def test_a_token_that_lands_as_an_array_is_handed_off_too() -> None:
    s = PrefillWorker([FULL], 8)
    s.start("r", 4)
    (slot,) = s.plan().batch.request_pool_indices
    slots, one = np.array([slot], np.int32), np.array([1], np.int32)
    s.scheduler.advance_rows(slots, one, np.array([42], np.int32))
    with pytest.raises(RuntimeError, match="'r' is the peer's to end"):
        s.scheduler.finish_rows(slots)
    hand_off = s.plan().hand_off
    assert hand_off is not None
    assert hand_off.batch.decode_input_ids == [42]


def test_an_empty_result_does_not_end_the_wait_for_the_token() -> None:
    s = PrefillWorker([FULL], 8, budget=2)
    s.start("r", 4)
    s.plan()
    s.plan()
    s.land("r")
    assert handed_off(s.plan()) == []
    s.land("r", 9)
    assert handed_off(s.plan()) == ["r"]


def test_draft_candidates_come_only_with_the_bootstrap_token() -> None:
    s = PrefillWorker([FULL], 8, budget=2)
    s.start("r", 4)
    s.plan()
    with pytest.raises(ValueError, match="must come with the token"):
        s.advance(extend_result("r", (), [1]))
    with pytest.raises(RuntimeError, match="ExtendResultEvent; state=tokenspeed::fsm::Prefilling"):
        s.advance(extend_result("r", (9,), [1]))
    s.plan()
    with pytest.raises(ValueError, match="must come with the token"):
        s.advance(extend_result("r", (), [1]))
    s.land_with("r", 9, [9, 1])
    with pytest.raises(ValueError, match="must come with the token"):
        s.advance(extend_result("r", (), [1]))
    assert handed_off(s.plan()) == ["r"]


def test_a_failed_transfer_gives_everything_back_and_keeps_what_was_published() -> None:
    s = PrefillWorker(PAIR, 63, P=4)
    prompt = s.fresh(12)
    s.start("r", prompt)
    s.plan()
    s.land_with("r", 1)
    s.plan()
    s.advance(PD.FailedEvent("r"))
    assert (s.available, s.scheduler.pd_transfer_size()) == (63, 0)
    s.start("again", prompt + s.fresh(4))
    assert s.plan().prefixes == [12]


def test_an_abort_is_heard_in_every_state() -> None:
    s = PrefillWorker([FULL], 16, budget=4)
    for rounds in range(4):
        request_id = f"r{rounds}"  # the results of an aborted one are still to come
        s.submit(request_id, 6)
        if rounds > 0:
            s.advance(PD.BootstrappedEvent(request_id))
        for _ in range(rounds):
            s.plan()
        if rounds == 3:
            s.land(request_id)
            s.land(request_id, 1)
            assert handed_off(s.plan()) == [request_id]
        s.abort(request_id)
        s.plan()
        assert (s.available, s.scheduler.bootstrapping_size(), s.scheduler.pd_transfer_size()) == (16, 0, 0)


def test_events_before_the_handshake_are_refused_and_a_second_handshake_is_ignored() -> None:
    s = PrefillWorker([FULL], 8)
    s.submit("r", 4)
    for event, name in (
        (extend_result("r", [1]), "ExtendResultEvent"),
        (PD.SucceededEvent("r"), "SucceededEvent"),
        (named(ForwardEvent.Retract, "r"), "RetractEvent"),
        (named(ForwardEvent.Finish, "r"), "FinishEvent"),
    ):
        with pytest.raises(RuntimeError, match=f"tokenspeed::fsm::{name}; state=tokenspeed::fsm::Bootstrapping"):
            s.advance(event)
    # Judged in order: what the first event makes legal is legal for the second.
    s.advance(PD.BootstrappedEvent("r"), PD.BootstrappedEvent("r"))
    assert s.plan().ids == ["r"]
    s.advance(PD.BootstrappedEvent("r"))
    s.advance(extend_result("r", [1]), PD.SucceededEvent("r"))
    assert s.available == 8


def test_a_batch_of_events_around_a_hand_off_is_applied_whole_or_not_at_all() -> None:
    s = PrefillWorker([FULL], 8)
    s.start("r", 4)
    s.plan()
    with pytest.raises(RuntimeError, match="FinishEvent; state=tokenspeed::fsm::PrefillDone"):
        s.advance(extend_result("r", [1]), named(ForwardEvent.Finish, "r"))
    assert s.scheduler.request_token_size("r") == 4
    assert handed_off(s.plan()) == []
    s.land_with("r", 1)
    assert handed_off(s.plan()) == ["r"]


def test_nobody_gives_way_on_a_prefill_worker() -> None:
    s = PrefillWorker(TWO_FULL, 12, budget=4)
    s.start("a", 4)
    s.plan()
    s.start("half", 10)
    s.plan()
    s.land("half")
    for _ in range(3):
        assert s.plan().ids == []
    assert s.scheduler.num_retractions() == 0
    s.land_with("a", 1)
    assert handed_off(s.plan()) == ["a"]
    s.succeed("a")
    assert s.plan().inputs == [4]


def test_priority_and_fairness_hold_for_prompts_alone() -> None:
    s = PrefillWorker([FULL], 8, P=4, max_overtaken_rounds=1)
    s.start("running", 15)
    s.plan()
    s.start("head", 20)
    s.start("a", 1)
    assert s.plan().ids == ["a"]
    s.start("b", 1)
    s.start("urgent", 1, priority=-1)
    assert s.plan().ids == ["urgent"]


def test_salts_separate_prefixes_on_a_prefill_worker() -> None:
    s = PrefillWorker([FULL], 63)
    prompt = s.fresh(8)
    s.hand_over("seed", prompt)
    s.start("other", [*prompt, 1], cache_salt="x")
    s.start("same", [*prompt, 1])
    assert s.plan().prefixes == [0, 8]


def test_a_lone_prompt_whose_blocks_are_scattered_starts_again_in_an_empty_pool() -> None:
    s = PrefillWorker(SCATTERING_GROUPS, 10, budget=6)
    assert run_scattered_prompt(s) == [6, 6, 6, 6, 4]
    assert s.scheduler.num_retractions() == 1
