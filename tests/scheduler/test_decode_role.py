"""Role D: prompts are landed by a prefill peer and decoded here (scenarios S-PD, S-RP9)."""

import numpy as np
import pytest

from tokenspeed_jax.scheduler import PD, ForwardEvent

from .peers import DecodeWorker, blocked_pair, landing_ids
from .scenario import FULL, STATE, Group, extend_result, named, replayable, reserve, swa


def shape(row: list[int]) -> list[bool]:
    return [block > 0 for block in row]


def test_pd4_a_landed_prompt_is_decoded_from_the_peers_token() -> None:
    s = DecodeWorker([FULL], 3)
    s.submit("r", 4)
    assert (s.scheduler.bootstrapping_size(), landing_ids(s.plan())) == (1, [])
    s.advance(PD.BootstrappedEvent("r"))
    step = s.plan()
    assert (step.ids, step.hand_off) == ([], None)
    landing = step.landing
    assert landing is not None
    assert (landing.ids, landing.inputs, landing.prefixes, landing.replays) == (["r"], [4], [0], [0])
    assert len(landing.row("r")) == 3
    assert (s.scheduler.remote_prefilling_size(), s.scheduler.prefilling_size()) == (1, 1)
    assert landing_ids(s.plan()) == []
    s.done("r", 42)
    assert (s.scheduler.remote_prefilling_size(), s.scheduler.prefilling_size()) == (0, 1)
    step = s.plan()
    assert (step.ids, step.batch.decode_input_ids, len(step.row("r"))) == (["r"], [42], 3)
    assert step.batch.spec_candidate_ids == [[]]
    assert step.row("r") == landing.row("r")
    s.land("r", 43)
    assert s.plan().batch.decode_input_ids == [-1]


def test_pd5_a_landing_takes_the_suffix_of_history_and_the_snapshot_at_the_end() -> None:
    s = DecodeWorker((Group(packing=2), STATE), 6, budget=2)
    s.start("r", 8)
    step = s.landing()
    assert step.inputs == [8]
    assert shape(step.row("r")) == [True] * 5
    assert shape(step.row("r", 1)) == [False, False, False, True, True]
    assert len(step.zeroed["g1"]) == 2
    assert s.scheduler.empty_lcm_blocks() == 1
    assert s.scheduler.pd_transfer_pinned("r")
    assert not s.scheduler.can_clear_cache()
    assert not s.scheduler.clear_l1_cache()
    s.done("r")
    assert (s.scheduler.pd_transfer_pinned("r"), s.scheduler.pd_transfer_size()) == (False, 0)


def test_pd6_snapshots_finer_than_the_identity_grain() -> None:
    s = DecodeWorker((Group(packing=2), Group(granularity=1, packing=2, state=True)), 6, budget=2)
    s.start("r", 8)
    assert shape(s.landing().row("r", 1)) == [False] * 7 + [True] * 2


def test_pd7_a_window_lands_its_tail_beside_the_island_of_a_hit() -> None:
    s = DecodeWorker([swa(4, granularity=2)], 7, P=4, budget=16)
    prompt = s.fresh(8)
    seed = s.receive("seed", prompt)
    assert shape(seed.row("seed")) == [False, False, True, True, True]
    assert s.plan().ids == ["seed"]
    s.land("seed", 1)
    s.finish("seed")
    s.start("r", prompt + s.fresh(8))
    step = s.landing()
    assert (step.prefixes, step.inputs) == ([8], [8])
    row = step.row("r")
    assert row[:4] == [0, 0, *seed.row("seed")[2:4]]
    assert shape(row[4:]) == [False, False, True, True, True]
    assert len(step.zeroed["g0"]) == 3


def test_pd8_decodes_and_a_landing_share_a_plan() -> None:
    s = DecodeWorker([FULL], 16)
    s.receive("a", 4)
    s.start("b", 4)
    step = s.plan()
    assert (step.ids, landing_ids(step)) == (["a"], ["b"])


def test_at_most_one_prompt_is_landed_a_round() -> None:
    s = DecodeWorker([FULL], 16, max_batch_size=2)
    for name in ("a", "b", "c"):
        s.start(name, 2)
    assert [landing_ids(s.plan()) for _ in range(3)] == [["a"], ["b"], []]
    assert (s.scheduler.waiting_size(), s.scheduler.remote_prefilling_size()) == (1, 2)


def test_pd10_a_retracted_request_recovers_here_and_alone() -> None:
    s = blocked_pair()
    step = s.plan()
    assert (step.ids, s.scheduler.num_retractions(), s.scheduler.waiting_size()) == ([], 1, 1)
    assert s.plan().ids == ["r2"]
    # New prompts wait for it, decodes do not.
    s.start("new", 2)
    s.land("r2", 3)
    step = s.plan()
    assert (step.ids, landing_ids(step)) == (["r2"], [])
    s.land("r2", 4)
    s.finish("r2")
    step = s.plan()
    assert (step.ids, landing_ids(step), step.plan.cache) == (["r1"], [], [])
    assert step.batch.prefill_lengths == [7]
    assert step.prefixes[0] + step.inputs[0] == 7
    assert (s.scheduler.pd_transfer_pinned("r1"), s.scheduler.remote_prefilling_size()) == (False, 0)
    s.land("r1", 5)
    step = s.plan()
    assert (step.ids, landing_ids(step)) == (["r1"], ["new"])


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_first_decode_after_a_recovery_takes_its_token_from_where_it_is(overlap: int) -> None:
    s = DecodeWorker([FULL], 16, overlap_schedule_depth=overlap)
    s.receive("r", 4)
    s.plan()
    s.land("r", 7)
    s.retract("r")
    assert s.plan().batch.prefill_lengths == [6]
    if overlap == 0:
        s.land("r", 8)
    assert s.plan().batch.decode_input_ids == [-1 if overlap else 8]


def test_pd11_a_decode_worker_needs_room_to_generate() -> None:
    s = DecodeWorker([FULL], 3)
    assert s.scheduler.max_single_request_tokens() == 6
    with pytest.raises(ValueError, match="need room for 8"):
        s.submit("r", 4, max_new=4)


def test_pd12_the_peers_token_comes_once_and_is_a_token() -> None:
    s = DecodeWorker([FULL], 8)
    s.submit("r", 4)
    with pytest.raises(RuntimeError, match="RemotePrefillDoneEvent; state=tokenspeed::fsm::Bootstrapping"):
        s.done("r")
    s.advance(PD.BootstrappedEvent("r"))
    with pytest.raises(RuntimeError, match="RemotePrefillDoneEvent; state=tokenspeed::fsm::Submitted"):
        s.done("r")
    s.plan()
    with pytest.raises(ValueError, match=r"'r' must be >= 0, got -1"):
        s.done("r", -1)
    assert s.scheduler.remote_prefilling_size() == 1
    s.done("r", 42)
    s.done("r", 43)
    assert s.plan().batch.decode_input_ids == [42]
    s.done("r", 43)
    s.finish("r")
    s.done("r", 43)
    assert s.scheduler.request_token_size("r") == 5


@pytest.mark.parametrize("groups", [(FULL, swa(4)), (FULL, FULL, swa(8))])
def test_pd13_a_landing_is_never_cut_at_a_boundary_worth_promoting(groups: tuple[Group, ...]) -> None:
    s = DecodeWorker(groups, 127, P=4)
    prompt = s.fresh(40)
    s.receive("seed", prompt)
    s.plan()
    s.land("seed", 1)
    s.finish("seed")
    # History covers 24 tokens of it, the window only what it held at the end of the seed.
    s.start("r", prompt[:24] + s.fresh(16))
    step = s.landing()
    assert (step.prefixes, step.inputs, step.batch.prefill_lengths) == ([0], [40], [40])


def test_a_state_does_not_keep_history_from_being_reused() -> None:
    s = DecodeWorker((FULL, STATE), 63, P=4)
    prompt = s.fresh(10)
    seed = s.receive("seed", prompt)
    s.plan()
    s.land("seed", 1)
    s.finish("seed")
    s.start("r", prompt[:8] + s.fresh(5))
    step = s.landing()
    assert (step.prefixes, step.inputs) == ([8], [5])
    assert step.row("r")[:2] == seed.row("seed")[:2]
    assert shape(step.row("r", 1)) == [False, False, False, True, True]


def test_only_a_snapshot_that_landed_on_a_boundary_is_shared() -> None:
    for length, hit in ((8, 8), (10, 0)):
        s = DecodeWorker((FULL, STATE), 63, P=4)
        prompt = s.fresh(length)
        s.receive("r", prompt)
        s.plan()
        s.land("r", 1)
        s.retract("r")
        # A recovery is local and needs the snapshot.
        step = s.plan()
        assert (step.ids, step.prefixes, step.batch.prefill_lengths) == (["r"], [hit], [length + 2])


def test_rp9_a_landing_brings_the_windows_and_nothing_is_fed_again() -> None:
    s = DecodeWorker((FULL, replayable(16, granularity=4), replayable(2, granularity=2)), 255, P=8)
    s.start("r", 40)
    step = s.landing()
    assert (step.prefixes, step.replays, step.inputs) == ([0], [0], [40])
    assert step.row("r", 1)[:7] == [0] * 6 + step.row("r", 1)[6:7]
    assert shape(step.row("r", 1)[6:]) == [True] * len(step.row("r", 1)[6:])
    assert shape(step.row("r", 2)) == [False] * 19 + [True] * (len(step.row("r", 2)) - 19)


def test_a_replayable_window_lands_whole_however_far_the_hit_reaches() -> None:
    s = DecodeWorker((FULL, replayable(16, granularity=4)), 255, P=8)
    prompt = s.fresh(32)
    s.receive("seed", prompt)
    s.plan()
    s.land("seed", 1)
    s.finish("seed")
    s.start("r", prompt + s.fresh(8))
    step = s.landing()
    assert (step.prefixes, step.replays, step.inputs) == ([32], [0], [8])
    assert shape(step.row("r", 1)) == [False] * 6 + [True] * 5


def test_results_of_the_peers_work_do_not_land_here() -> None:
    s = DecodeWorker([FULL], 8)
    s.start("r", 4)
    s.plan()
    for event, name in (
        (extend_result("r", [1]), "ExtendResultEvent"),
        (named(ForwardEvent.Finish, "r"), "FinishEvent"),
        (reserve("r", 1), "UpdateReserveNumTokensEvent"),
        (PD.SucceededEvent("r"), "SucceededEvent"),
    ):
        with pytest.raises(RuntimeError, match=f"{name}; state=tokenspeed::fsm::RemotePrefilling"):
            s.advance(event)
    s.done("r")
    s.plan()
    with pytest.raises(ValueError, match="role P"):
        s.advance(extend_result("r", [1], [2]))


def test_arrays_of_results_follow_the_same_rules() -> None:
    s = DecodeWorker([FULL], 8)
    s.start("r", 4)
    (slot,) = s.landing().batch.request_pool_indices
    slots, one = np.array([slot], np.int32), np.array([1], np.int32)
    with pytest.raises(RuntimeError, match="'r' has no forward in flight"):
        s.scheduler.advance_rows(slots, one, one)
    with pytest.raises(RuntimeError, match="'r' is the peer's to end"):
        s.scheduler.finish_rows(slots)
    s.done("r")
    s.plan()
    s.scheduler.advance_rows(slots, one, one)
    s.scheduler.finish_rows(slots)
    s.plan()
    assert s.available == 8


def test_a_landing_and_its_decode_may_be_judged_in_one_batch() -> None:
    s = DecodeWorker([FULL], 8)
    s.start("r", 4)
    s.plan()
    s.advance(PD.RemotePrefillDoneEvent("r", 5), named(ForwardEvent.Finish, "r"))
    s.plan()
    assert s.available == 8


@pytest.mark.parametrize("event", [PD.FailedEvent("r"), named(ForwardEvent.Abort, "r")])
def test_a_landing_that_fails_gives_everything_back_and_publishes_nothing(event: object) -> None:
    s = DecodeWorker([FULL], 8)
    prompt = s.fresh(5)
    s.start("r", prompt)
    s.plan()
    s.advance(event)
    s.plan()
    assert (s.scheduler.empty_lcm_blocks(), s.scheduler.pd_transfer_size()) == (8, 0)


def test_a_landing_that_was_never_asked_for_is_recovered_here() -> None:
    s = DecodeWorker([FULL], 8)
    s.start("r", 4)
    s.plan()
    s.retract("r")
    assert (s.scheduler.waiting_size(), s.available) == (1, 8)
    step = s.plan()
    assert (step.ids, step.inputs, landing_ids(step)) == (["r"], [4], [])
    s.land("r", 1)
    with pytest.raises(RuntimeError, match="no forward in flight"):
        s.land("r", 2)


def test_who_is_being_landed_never_gives_way() -> None:
    s = DecodeWorker([FULL], 6)
    s.receive("a", 3)
    # Less urgent, so that it would be the first to be looked at.
    s.start("landing", 6, priority=1)
    step = s.plan()
    assert (step.ids, landing_ids(step)) == (["a"], ["landing"])
    s.land("a", 1)
    for token in range(20):
        step = s.plan()
        if not step.ids:
            break
        s.land("a", token)
    assert (s.scheduler.num_retractions(), s.scheduler.remote_prefilling_size()) == (1, 1)
    s.done("landing")
    assert s.plan().ids == ["landing"]


def test_nobody_gives_way_in_a_round_that_lands_a_prompt() -> None:
    s = DecodeWorker([FULL], 8)
    s.receive("a", 5)
    s.plan()
    s.land("a", 1)
    s.reserve("a", 12)
    s.start("small", 2)
    step = s.plan()
    assert (step.ids, landing_ids(step), s.scheduler.num_retractions()) == ([], ["small"], 0)
    assert s.plan().landing is None
    assert s.scheduler.num_retractions() == 1


def test_decode_rows_take_no_budget_on_a_decode_worker() -> None:
    s = DecodeWorker([FULL], 32, budget=1, decode_input_tokens=3)
    s.receive("a", 4)
    s.receive("b", 4)
    assert s.plan().inputs == [3, 3]


def test_the_line_is_held_for_a_landing_that_was_passed_too_often() -> None:
    s = DecodeWorker([FULL], 9, P=4, max_overtaken_rounds=2)
    s.receive("running", 15, 1)
    s.start("head", 24)
    for name in ("a", "b"):
        s.start(name, 1)
        assert landing_ids(s.plan()) == [name]
    s.start("c", 1)
    s.start("urgent", 1, priority=-1)
    assert landing_ids(s.plan()) == ["urgent"]
    assert landing_ids(s.plan()) == []
    s.abort("head")
    assert landing_ids(s.plan()) == ["c"]


def test_an_urgent_prompt_is_landed_before_a_recovery_is_tried() -> None:
    s = DecodeWorker([FULL], 16)
    s.receive("r", 4)
    s.plan()
    s.land("r", 7)
    s.retract("r")
    s.start("urgent", 4, priority=-1)
    assert landing_ids(s.plan()) == ["urgent"]
    step = s.plan()
    assert (step.ids, landing_ids(step)) == (["r"], [])


def test_an_unfinished_recovery_keeps_later_prompts_from_taking_what_it_waits_for() -> None:
    s = DecodeWorker([FULL], 10, budget=4)
    s.receive("other", 5)
    s.start("r", 11)
    assert landing_ids(s.plan()) == ["r"]
    s.retract("r")
    s.start("urgent", 1, priority=-1)
    assert landing_ids(s.plan()) == ["urgent"]
    assert [s.plan().inputs for _ in range(2)] == [[4], [4]]
    # One block is left; the rest of "r" takes two, "new" would take one.
    assert s.scheduler.empty_lcm_blocks() == 1
    s.start("new", 1)
    assert landing_ids(s.plan()) == []
    s.abort("urgent")
    step = s.plan()
    assert (step.ids, step.inputs) == (["r"], [3])


def test_a_recovery_is_cut_until_it_fits_a_pool_sized_for_landings() -> None:
    s = DecodeWorker([swa(4, granularity=2, packing=2)], 3, P=4, budget=64, disable_prefix_cache=True)
    s.receive("r", 40, 4)
    s.plan()
    s.land("r", 1)
    s.retract("r")
    assert s.scheduler.clear_cache()
    computed = 0
    while computed < 42:
        step = s.plan()
        assert step.prefixes == [computed]
        computed += step.inputs[0]
        s.land("r", *([2] if computed == 42 else []))
    assert s.plan().ids == ["r"]
    assert s.scheduler.num_retractions() == 1


def test_salts_separate_prefixes_on_a_decode_worker() -> None:
    s = DecodeWorker([FULL], 63)
    prompt = s.fresh(8)
    s.receive("seed", prompt)
    s.plan()
    s.start("other", [*prompt, 1], cache_salt="x")
    assert s.landing().prefixes == [0]
    s.start("same", [*prompt, 1])
    assert s.landing().prefixes == [8]
