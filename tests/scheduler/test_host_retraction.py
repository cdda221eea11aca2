"""Retraction and readmission over a host tier: snapshots, who comes back first, and patience (S-RT12 and S-RT17)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent

from .scenario import FULL, Scenario, Step, named, swa
from .simulated_tiers import load_backs, write_back_done, write_backs
from .tier_scenario import TierScenario, land_all


def driven_to_retraction(usable: int = 12, **fields: object) -> tuple[TierScenario, Step]:
    """r1 and r2 (prompts of 4) decode until one of them gives way; returns that round's step."""
    s = TierScenario((FULL, FULL), usable, 40, **fields)
    s.acknowledges = True
    s.submit("r1", 4)
    s.submit("r2", 4)
    for _ in range(50):
        s.acknowledges = s.scheduler.num_retractions() == 0
        step = s.plan()
        if s.scheduler.num_retractions() > 0:
            return s, step
        land_all(s, step)
    pytest.fail("nobody gave way")


def test_rt12_a_retraction_stores_without_holding_and_its_request_waits_its_turn() -> None:
    s, step = driven_to_retraction()
    (op,) = write_backs(step)
    assert not op.pinned
    assert {t.group for t in op.transfers} == {0, 1}
    assert s.scheduler.waiting_size() == 1
    (running,) = {"r1", "r2"} - {"r1"}
    for token in range(4):
        step = s.plan()
        assert step.ids == [running]
        assert s.scheduler.waiting_size() == 1
        s.stored(*write_backs(step))
        s.land(running, token)
    s.stored(op)
    s.finish(running)
    step = s.plan()
    assert step.ids == []  # what the other has left is still being copied
    s.stored(*write_backs(step))
    step = s.plan()
    assert step.ids == ["r1"]
    assert step.prefixes[0] + step.inputs[0] == step.batch.prefill_lengths[0] == 7
    assert step.prefixes == [6]


def test_a_retracted_request_takes_back_from_the_host_what_the_device_recycled() -> None:
    s, step = driven_to_retraction()
    s.stored(*write_backs(step))
    s.acknowledges = True
    for token in range(3):
        s.plan()
        s.land("r2", token)
    s.finish("r2")
    s.submit("new", 10, priority=-1)  # goes before the readmission and takes the whole pool
    assert [s.plan().ids for _ in range(2)] == [[], ["new"]]
    s.land("new", 1)
    s.finish("new")
    assert s.plan().ids == []
    step = s.plan()
    assert (step.ids, step.prefixes) == (["r1"], [6])
    assert len(load_backs(step)[0].transfers) == 6


def test_new_prompts_are_sealed_while_a_readmission_does_not_fit_and_decodes_go_on() -> None:
    s, step = driven_to_retraction()
    s.stored(*write_backs(step))
    s.acknowledges = True
    s.submit("tiny", 1)
    for token in range(3):
        step = s.plan()
        assert (step.ids, s.scheduler.num_retractions()) == (["r2"], 1)
        s.land("r2", token)
    s.finish("r2")
    step = s.plan()
    assert step.ids == ["r1"]
    land_all(s, step)
    assert "tiny" in s.plan().ids


def test_rt17_who_has_generated_comes_back_before_an_unfinished_prompt_that_gave_way_earlier() -> None:
    s = TierScenario((FULL, FULL), 22, 80, budget=8)
    s.acknowledges = True
    for request_id in ("d1", "d2"):
        s.prefill(request_id, 4)
    s.submit("half", 16)
    step = s.plan()
    assert (step.ids, step.inputs) == (["half"], [8])
    land_all(s, step)
    step = s.plan()
    assert (step.ids, s.scheduler.num_retractions()) == (["d1", "d2"], 1)
    while s.scheduler.num_retractions() == 1:
        land_all(s, step)
        step = s.plan()
    step = s.plan()
    assert (step.ids, s.scheduler.waiting_size()) == (["d2"], 2)
    s.abort("d2")
    step = s.plan()
    assert (step.ids, step.prefixes, step.batch.prefill_lengths) == (["d1"], [12], [13])
    s.abort("d1")
    assert s.plan().ids == ["half"]


def test_without_a_host_a_retracted_request_competes_like_a_new_prompt() -> None:
    s = Scenario((FULL, FULL), 12)
    s.submit("r1", 4)
    s.submit("r2", 4)
    while s.scheduler.num_retractions() == 0:
        land_all(s, s.plan())
    s.submit("tiny", 1)
    step = s.plan()
    assert step.ids == ["tiny"]


def test_a_runtime_retraction_takes_no_snapshot() -> None:
    s = TierScenario((FULL, swa(4)), 20, 20)
    s.prefill("a", 9)
    s.advance(named(ForwardEvent.Retract, "a"))
    step = s.plan()
    assert (step.ids, write_backs(step), step.prefixes) == (["a"], [], [0])


def test_an_unfinished_prompt_stores_no_more_than_it_computed() -> None:
    s = TierScenario((FULL, FULL), 18, 40, budget=8)
    s.acknowledges = True
    s.prefill("done", 4)
    s.submit("half", 16)
    assert s.plan().inputs == [8]
    s.land("half")
    s.submit("waiting", 2)
    s.acknowledges = False
    step = s.plan()
    assert s.scheduler.num_retractions() == 1
    unpinned = [op for op in write_backs(step) if not op.pinned]
    assert [len(op.transfers) for op in unpinned] == [12]  # those of `done`, which this round completed, ride along


def test_nobody_gives_way_while_a_copy_will_return_the_blocks() -> None:
    """The finished request's pages are what the blocked decode waits for."""
    s = TierScenario((FULL, FULL), 12, 40)
    s.submit("r1", 4)
    s.submit("r2", 4)
    ops = []
    for _ in range(3):
        step = s.plan()
        ops += write_backs(step)
        land_all(s, step)
    s.finish("r2")
    for _ in range(4):
        step = s.plan()
        ops += write_backs(step)
        land_all(s, step)
    assert s.scheduler.num_retractions() == 0
    s.stored(*ops)
    assert s.plan().ids == ["r1"]


def test_a_steady_flow_of_copies_does_not_put_a_retraction_off_for_ever() -> None:
    s = TierScenario((FULL, swa(4)), 20, 60)
    s.submit("steady", 2, max_new=16)
    s.submit("grows", 2)
    out: list[int] = []
    rounds_with_copies = 0
    for _ in range(16):
        step = s.plan()
        started = [op.op_id for op in write_backs(step)]
        if started and out:  # a copy is acknowledged only when the next one is under way
            s.advance(*(write_back_done(op_id) for op_id in out))
            out = []
        out += started
        rounds_with_copies += bool(out)
        if s.scheduler.num_retractions():
            break
        land_all(s, step)
    assert s.scheduler.num_retractions() == 1
    assert rounds_with_copies > 8
