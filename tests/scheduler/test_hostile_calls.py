"""Calls that are wrong: each is refused in words, or ignored where that is the rule, and leaves everything as it was.

After every hostile call all gauges are as before, and a twin that never got the call plans the same ever after.
"""

import pytest

from tokenspeed_jax.scheduler import (
    PD,
    Cache,
    ExecutionEvent,
    ForwardEvent,
    RequestSpec,
    Scheduler,
)

from .scenario import FULL, STATE, Group, extend_result, named, replayable, reserve, spec, swa
from .twins import Twins, advance, finish_rows, result, rows

GROUP_SETS = [(FULL,), (FULL, swa(4), STATE), (Group(packing=2), replayable(3))]


@pytest.fixture(params=GROUP_SETS, ids=["full", "mixed", "replayable"])
def twins(request: pytest.FixtureRequest) -> Twins:
    """a and b (slots 1, 2) have their prompt's first token out, c (slot 3) a chunk of an unfinished prompt."""
    made = Twins(request.param, budget=16)
    made.submit("a", range(4))
    made.submit("b", range(10, 14))
    made.submit("c", range(20, 40))
    step = made.plan()
    assert (step.ids, step.batch.request_pool_indices, step.inputs) == (["a", "b", "c"], [1, 2, 3], [4, 4, 8])
    return made


def overlapping(width: int = 1) -> Twins:
    """a (slot 1) has two rows out: its prompt, of round 1, and a decode step, of round 2."""
    twins = Twins([FULL, swa(4)], overlap_schedule_depth=1, decode_input_tokens=width)
    twins.submit("a", range(4))
    assert [twins.plan().ids, twins.plan().ids] == [["a"], ["a"]]
    return twins


# Results --------------------------------------------------------------------------------------------------------------


def test_two_results_for_one_row(twins: Twins) -> None:
    twins.land("a", 7)
    twins.refused(RuntimeError, "no forward in flight.*event 0 of a batch of 1", advance(result("a", [7])))
    twins.refused(RuntimeError, "no forward in flight", advance(result("a", [7], 1)))
    twins.refused(RuntimeError, "event 1 of a batch of 2", advance(result("b", [7]), result("b", [7])))
    for round_number in (0, 1):
        words = r"entry 0 \(slot 1\): request 'a' has no forward in flight"
        twins.refused(RuntimeError, words, rows([1], [1], [7], round_number))
        words = r"entry 1 \(slot 2\): the slot occurs twice"
        twins.refused(ValueError, words, rows([2, 2], [1, 1], [7, 7], round_number))
    twins.land("b", 7)
    twins.land("c")
    twins.run_out()


def test_two_results_for_one_row_while_another_row_is_out() -> None:
    twins = overlapping()
    twins.advance(result("a", [7], 1))
    twins.refused(RuntimeError, "round 1 has no row of it that is out", advance(result("a", [7], 1)))
    twins.refused(RuntimeError, "request 'a' has no row of round 1 that is out", rows([1], [1], [7], 1))
    twins.advance(result("a", [8], 2))
    twins.run_out()


def test_results_of_one_request_out_of_order() -> None:
    twins = overlapping()
    twins.refused(RuntimeError, "round 2 comes after one that has not landed", advance(result("a", [8], 2)))
    twins.refused(RuntimeError, "a row before round 2 that has not landed", rows([1], [1], [8], 2))
    twins.land("a", 7)
    twins.land("a", 8)
    twins.run_out()


def test_results_of_rounds_that_never_were(twins: Twins) -> None:
    for round_number in (-1, 2, 2**63 - 1):
        twins.refused(ValueError, r"round_number must be in \[0, 1\]", rows([1], [1], [7], round_number))
        twins.refused(RuntimeError, "no row of it that is out", advance(result("a", [7], round_number)))
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()


@pytest.mark.parametrize("reaped", [False, True])
def test_a_late_result_of_an_earlier_request_with_the_same_id(twins: Twins, reaped: bool) -> None:
    twins.advance(result("b", [7]), result("c"))
    twins.end(ForwardEvent.Abort, "a")
    assert "a" not in twins.plan().ids
    twins.land("c", 7)
    twins.submit("a", range(50, 56))
    if reaped:
        assert twins.plan().ids == ["a"]  # the new request has a row out, too
    twins.both(lambda scheduler: scheduler.advance(ExecutionEvent()))
    size = twins.victim.request_token_size("a")
    twins.land("a", 99)  # of the old one
    assert twins.victim.request_token_size("a") == size == 6
    if not reaped:
        twins.refused(RuntimeError, "state=tokenspeed::fsm::Submitted", advance(result("a", [99])))
        assert twins.plan().ids == ["a"]
    twins.land("a", 7)
    assert twins.victim.request_token_size("a") == 7
    twins.refused(RuntimeError, "no forward in flight", advance(result("a", [7])))
    twins.run_out()


def test_a_late_result_that_names_its_round_finds_its_row_in_any_order(twins: Twins) -> None:
    twins.advance(result("b", [7]), result("c"))
    twins.end(ForwardEvent.Abort, "a")
    twins.plan()
    twins.land("c", 7)
    twins.submit("a", range(50, 56))
    step = twins.plan()
    twins.advance(result("a", [7], step.plan.round_number))
    assert twins.victim.request_token_size("a") == 7
    twins.advance(result("a", [99], 1))
    assert twins.victim.request_token_size("a") == 7
    twins.refused(RuntimeError, "no forward in flight", advance(result("a", [99], 1)))
    twins.run_out()


def test_a_late_row_of_an_earlier_request_in_the_same_slot() -> None:
    twins = Twins([FULL], max_batch_size=1)
    twins.submit("old", range(4))
    twins.submit("new", range(4, 8))
    assert twins.plan().ids == ["old"]
    twins.end(ForwardEvent.Abort, "old")
    step = twins.plan()
    assert (step.ids, step.batch.request_pool_indices, step.plan.round_number) == (["new"], [1], 2)
    twins.ignored(rows([1], [1], [99], 1))
    assert twins.victim.request_token_size("new") == 4
    twins.both(rows([1], [1], [7], 2))
    assert twins.victim.request_token_size("new") == 5
    # The round is closed, so that its slot's late row is nobody's any more.
    twins.refused(RuntimeError, "request 'new' has no forward in flight", rows([1], [1], [99], 1))
    twins.run_out()


def test_rows_that_are_left_out_are_expected_no_more(twins: Twins) -> None:
    twins.end(ForwardEvent.Abort, "a")
    twins.both(rows([2, 3], [1, 0], [7], 1))
    twins.land(twins.plan().ids[0], 7)
    twins.submit("a", range(6))
    step = twins.plan()
    assert "a" in step.ids
    twins.advance(*(result(request_id, [7]) for request_id in step.ids))
    assert twins.victim.request_token_size("a") == 7
    twins.run_out()


def test_a_right_result_after_a_refused_one(twins: Twins) -> None:
    twins.refused(ValueError, "2 tokens are more than its scheduled forwards", advance(result("a", [7, 8])))
    twins.refused(RuntimeError, "state=tokenspeed::fsm::Prefilling", advance(result("c", [7])))
    twins.refused(ValueError, "got 2 tokens, more than its scheduled", rows([1], [2], [7, 8]))
    twins.refused(RuntimeError, "request 'c' has an unfinished prompt", rows([3], [1], [7]))
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()


@pytest.mark.parametrize("width", [1, 3])
def test_more_tokens_than_the_row_could_produce(width: int) -> None:
    twins = overlapping(width)
    words = "more than its scheduled forwards can have produced"
    # Together its rows could produce that many, the oldest alone could not.
    twins.refused(ValueError, words, rows([1], [2], [7, 8]))
    twins.refused(ValueError, f"2 tokens are {words}", advance(result("a", [7, 8])))
    twins.land("a", 7)
    for count in (width + 1, 10_000):
        twins.refused(ValueError, f"{count} tokens are {words}", advance(result("a", [7] * count)))
        twins.refused(ValueError, f"got {count} tokens, {words}", rows([1], [count], [7] * count))
    twins.refused(ValueError, "spec_candidate_ids belong to role P", advance(with_candidates()))
    twins.land("a", *[8] * width)
    assert twins.victim.request_token_size("a") == 5 + width
    twins.run_out()


def with_candidates() -> ForwardEvent.ExtendResult:
    event = extend_result("a", [7])
    event.spec_candidate_ids = [1, 2]
    return event


# Events in wrong states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [ForwardEvent.Finish, ForwardEvent.Abort])
@pytest.mark.parametrize("reaped", [False, True])
def test_events_after_the_end_change_nothing(twins: Twins, end: type, reaped: bool) -> None:
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.end(end, "a")
    if reaped:
        twins.advance(*(result(request_id, [7]) for request_id in twins.plan().ids))
    for event in (
        result("a", [7]),
        result("a", [7], 1),
        *(named(kind, "a") for kind in (ForwardEvent.Finish, ForwardEvent.Abort, ForwardEvent.Retract)),
        reserve("a", -5),
        PD.BootstrappedEvent("a"),
        PD.FailedEvent("a"),
        PD.SucceededEvent("a"),
        PD.RemotePrefillDoneEvent("a", -5),
    ):
        twins.ignored(advance(event))
    words = r"entry 0 \(slot 1\): no request holds this slot"
    for call in (rows([1], [1], [7]), rows([1], [1], [7], 1), finish_rows(1)):
        twins.refused(RuntimeError, words, call)
    twins.run_out()


def test_events_for_rows_that_are_not_out() -> None:
    twins = Twins([FULL])
    twins.submit("a", range(4))
    for event in (result("a", [7]), named(ForwardEvent.Finish, "a"), named(ForwardEvent.Retract, "a"), reserve("a", 1)):
        twins.refused(RuntimeError, "state=tokenspeed::fsm::Submitted", advance(event))
    twins.refused(RuntimeError, "no request holds this slot", rows([1], [1], [7]))
    twins.refused(RuntimeError, "no request holds this slot", finish_rows(1))
    twins.plan()
    twins.refused(RuntimeError, "state=tokenspeed::fsm::PrefillDone", advance(reserve("a", 1)))
    twins.land("a", 7)
    twins.refused(RuntimeError, "no forward in flight", advance(result("a")))
    twins.end(ForwardEvent.Retract, "a")
    for event in (result("a", [7]), reserve("a", 1)):
        twins.refused(RuntimeError, "state=tokenspeed::fsm::Retracted", advance(event))
    twins.ignored(advance(named(ForwardEvent.Retract, "a")))
    twins.run_out()


def test_a_result_after_the_executor_said_that_the_forward_was_not_run(twins: Twins) -> None:
    twins.advance(result("b", [7]), result("c"))
    twins.end(ForwardEvent.Retract, "a")
    twins.refused(RuntimeError, "state=tokenspeed::fsm::Retracted", advance(result("a", [7])))
    step = twins.plan()
    assert "a" in step.ids
    twins.refused(RuntimeError, "round 1 has no row of it that is out", advance(result("a", [7], 1)))
    twins.advance(*(result(request_id, [7], step.plan.round_number) for request_id in step.ids))
    twins.run_out()


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, "one over"])
@pytest.mark.parametrize(("groups", "usable", "most"), [([FULL], 31, 62), ([FULL], 63, 64), ([swa(4)], 63, 64)])
def test_reserves_that_are_negative_huge_or_over_the_budget(
    groups: list[Group], usable: int, most: int, value: int | str
) -> None:
    twins = Twins(groups, usable)
    twins.submit("a", range(4))
    twins.plan()
    twins.land("a", 7)
    twins.plan()
    value = most + 1 if isinstance(value, str) else value
    words = rf"request 'a' must be in \[0, {most}\], got {value} \(event 1 of a batch of 2\)"
    twins.refused(ValueError, words, advance(result("a", [8]), reserve("a", value)))
    twins.land("a", 8)
    twins.run_out()


def test_a_reserve_over_the_free_blocks_is_no_dead_end() -> None:
    twins = Twins([FULL], usable=31)
    twins.submit("a", range(4))
    twins.submit("b", range(20))
    twins.plan()
    twins.advance(result("a", [7]), result("b", [7]))
    twins.plan()
    twins.advance(result("a", [8]), result("b", [8]), reserve("a", 62), reserve("b", 62))
    twins.run_out(rounds=200)


# A batch with one bad entry -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", range(5))
def test_one_bad_event_in_a_batch(twins: Twins, position: int) -> None:
    good = [result("a", [7]), named(ForwardEvent.Finish, "a"), result("b", [7]), result("c")]
    for error, bad in (
        (RuntimeError, result("c", [7])),
        (ValueError, result("b", [7, 8]) if position < 3 else reserve("b", -1)),
        (RuntimeError, reserve("c", 1)),
        (RuntimeError, PD.RemotePrefillDoneEvent("c", 7)),
    ):
        if error is ValueError and position >= 3:
            error = RuntimeError  # b does not decode yet
        batch = [*good[:position], bad, *good[position:]]
        twins.refused(error, rf"\(event {position} of a batch of 5\)$", advance(*batch))
    twins.advance(*good)
    twins.run_out()


def test_a_huge_batch_with_its_last_event_bad(twins: Twins) -> None:
    filling = [named(ForwardEvent.Abort, f"nobody{number}") for number in range(20_000)]
    words = "event 20001 of a batch of 20002"
    twins.refused(RuntimeError, words, advance(result("a", [7]), *filling, result("c", [7])))
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()


@pytest.mark.parametrize("position", range(4))
def test_one_bad_row_in_a_batch(twins: Twins, position: int) -> None:
    good = [(1, [7]), (2, [7]), (3, [])]
    for error, slot, tokens in (
        (RuntimeError, 4, [7]),
        (RuntimeError, 0, []),
        (RuntimeError, -(2**31), []),
        (ValueError, 1 if position > 1 else 2, [7]),
    ):
        batch = [*good[:position], (slot, tokens), *good[position:]]
        # A repeated slot is noticed where it comes up again.
        at = position if error is RuntimeError else max(position, 2 if position < 2 else 0)
        call = rows([s for s, _ in batch], [len(t) for _, t in batch], [token for _, t in batch for token in t])
        twins.refused(error, rf"advance_rows entry {at} \(slot {slot}\)", call)
    twins.both(rows([1, 2, 3], [1, 1, 0], [7, 7]))
    twins.run_out()


@pytest.mark.parametrize("position", range(3))
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (spec("bad", []), r" \(request 'bad'\): tokens must not be empty"),
        (spec("bad", [1], -1), r" \(request 'bad'\): max_new_tokens must be >= 0, got -1"),
        (spec("bad", [1], 2**31 - 1), r" \(request 'bad'\): tokens \(1\) and max_new_tokens \(2147483647\) need room"),
        (spec("", [1]), ": request_id must not be empty"),
        (spec("x" * 4097, [1]), ": request_id must have at most 4096 bytes, got 4097"),
        (spec("b", [1]), r" \(request 'b'\): request_id is already in use"),
        (spec("bad", [1], cache_salt="x" * 65537), r" \(request 'bad'\): cache_salt must have at most"),
    ],
)
def test_one_bad_submission_in_a_batch(twins: Twins, position: int, bad: RequestSpec, words: str) -> None:
    good = [spec("x", [1, 2]), spec("y", [1, 2, 3])]
    batch = [*good[:position], bad, *good[position:]]
    twins.refused(ValueError, f"request_specs entry {position}{words}", lambda s: s.submit_requests(batch))
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.both(lambda scheduler: scheduler.submit_requests(good))
    twins.run_out()


# Clears and completions -----------------------------------------------------------------------------------------------


def test_a_clear_while_rows_are_out(twins: Twins) -> None:
    for clear in (Scheduler.clear_cache, Scheduler.clear_l1_cache):
        if twins.victim.can_clear_cache():
            continue
        twins.ignored(clear)
        assert not clear(twins.victim)
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()


def test_completions_of_transfers_that_never_were(twins: Twins) -> None:
    written = Cache.WriteBackDoneEvent()
    for op_id in (0, 1, 2**32 - 1):
        written.op_id = op_id
        twins.ignored(advance(written, Cache.LoadBackDoneEvent(op_id, True), Cache.LoadBackDoneEvent(op_id, False)))
    for wrong in (-1, 2**32, "1", None):
        with pytest.raises(TypeError):
            written.op_id = wrong  # type: ignore[assignment]
        with pytest.raises(TypeError):
            Cache.LoadBackDoneEvent(wrong, True)  # type: ignore[arg-type]
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()
