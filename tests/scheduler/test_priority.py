"""Priority: who is admitted first, who grows first, and who gives way first."""

import pytest

from tokenspeed_jax.scheduler import RequestSpec

from .scenario import FULL, Group, Scenario, extend_result, swa
from .workload import Workload, run_mixed_load

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def test_waiting_requests_are_served_by_priority_and_in_order_within_one() -> None:
    s = Scenario([FULL], 63)
    for request_id, priority in (("a", 1), ("b", 0), ("c", HIGHEST), ("d", -1), ("e", 0), ("f", LOWEST), ("g", 1)):
        s.submit(request_id, 4, priority=priority)
    assert s.plan().ids == ["f", "d", "b", "e", "a", "g", "c"]


def test_a_later_urgent_request_goes_before_those_that_wait() -> None:
    s = Scenario([FULL], 63, max_batch_size=1)
    s.prefill("running", 4)
    s.submit("early", 4)
    s.submit("urgent", 4, priority=-1)
    assert s.plan().ids == ["running"]  # nobody who runs is interrupted
    s.land("running", 1)
    s.finish("running")
    assert s.plan().ids == ["urgent"]


def test_an_urgent_prompt_waits_for_the_unfinished_one() -> None:
    s = Scenario([FULL], 63, budget=4)
    s.submit("long", 8)
    assert s.plan().ids == ["long"]
    s.submit("urgent", 4, priority=-1)
    assert s.plan().ids == ["long"]
    assert s.plan().ids == ["urgent"]


def test_urgent_decodes_are_fed_first() -> None:
    s = Scenario([FULL], 63, budget=2, enable_mixed_prefill_decode=True)
    for request_id, priority in (("a", 2), ("b", 0), ("c", 1)):
        s.submit(request_id, 1, priority=priority)
    assert s.plan().ids == ["b", "c"]  # the prompts
    s.land("b", 1)
    s.land("c", 1)
    for _ in range(3):
        assert s.plan().ids == ["b", "c"]
        s.land("b", 1)
        s.land("c", 1)
    s.finish("b")
    assert s.plan().ids == ["a", "c"]  # the prompt of a comes first in the batch


@pytest.mark.parametrize("priority", [LOWEST, -1, 3, HIGHEST])
def test_plans_do_not_depend_on_a_priority_that_all_share(priority: int) -> None:
    def trace(priority: int) -> list[object]:
        work = Workload((FULL, swa(4)), usable=18, seed=5, max_batch_size=4, overlap_schedule_depth=1)
        work.priorities = (priority,)
        steps = []
        for _ in range(300):
            if len(work.live) < 8:
                work.submit()
            step = work.round()
            steps.append((step.ids, step.inputs, step.prefixes, step.tables, step.zeroed))
            work.disturb()
        assert work.scheduler.num_retractions() > 0
        return steps

    assert trace(priority) == trace(0)


def run_until_retraction(priorities: dict[str, int], prompts: dict[str, int]) -> str:
    """Decodes until somebody gives way; who that is."""
    s = Scenario([FULL, FULL], 14)
    for request_id, prompt in prompts.items():
        s.submit(request_id, prompt, priority=priorities[request_id])
    for token in range(40):
        step = s.plan()
        if s.scheduler.num_retractions() > 0:
            (victim,) = [r for r in prompts if r not in resident(s, prompts)]
            return victim
        s.advance(*(extend_result(request_id, [token]) for request_id in step.ids))
    pytest.fail("nobody was retracted")


def resident(s: Scenario, ids: dict[str, int]) -> list[str]:
    """Who can be told to finish a chunk: a waiting request refuses every result as one of its state."""
    running = []
    for request_id in ids:
        try:
            s.advance(extend_result(request_id, [1] * 1000))
        except ValueError:
            running.append(request_id)  # too many tokens: a forward is out
        except RuntimeError as error:
            if "no forward in flight" in str(error):
                running.append(request_id)
    return running


def test_the_least_urgent_gives_way_even_if_another_would_release_more() -> None:
    prompts = {"a": 6, "b": 4}
    assert run_until_retraction({"a": 0, "b": 0}, prompts) == "a"
    assert run_until_retraction({"a": 5, "b": 5}, prompts) == "a"
    assert run_until_retraction({"a": 0, "b": 1}, prompts) == "b"
    assert run_until_retraction({"a": 1, "b": 0}, prompts) == "a"
    assert run_until_retraction({"a": LOWEST, "b": HIGHEST}, prompts) == "b"


def test_a_less_urgent_decode_gives_way_before_an_unfinished_urgent_prompt() -> None:
    def retracted(priority: int) -> tuple[bool, bool]:
        """Whether the unfinished prompt and whether the blocked decode gave way."""
        s = Scenario([FULL], 9, budget=8)
        s.submit("decode", 4, priority=priority)
        s.plan()
        s.land("decode", 1)
        s.submit("long", 16)
        for token in range(30):
            step = s.plan()
            if s.scheduler.num_retractions() > 0:
                return "decode" in resident(s, {"decode": 0}), "long" in resident(s, {"long": 0})
            ends = [p + n for p, n in zip(step.prefixes, step.inputs, strict=False)]
            for row, request_id in enumerate(step.ids):
                whole = row >= len(ends) or ends[row] == step.batch.prefill_lengths[row]
                s.land(request_id, *([token] if whole else []))
        pytest.fail("nobody was retracted")

    assert retracted(1) == (False, True)
    assert retracted(-1) == (True, False)


def test_what_an_urgent_request_gives_up_is_not_granted_to_a_less_urgent_one() -> None:
    """In this workload a request once came back in the round in which it had been retracted for an urgent one."""
    work = Workload(
        (Group(granularity=1, packing=4), swa(1, granularity=2, packing=2)),
        usable=15,
        seed=1447674839,
        budget=12,
        overlap_schedule_depth=1,
        decode_input_tokens=3,
        prefix_replay_tokens=3,
        max_batch_size=4,
        max_overtaken_rounds=2,
    )
    work.priorities = (0, 1)
    run_mixed_load(work, requests=25)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, "1", None])
def test_a_priority_is_an_int32(value: object) -> None:
    with pytest.raises(TypeError):
        RequestSpec().priority = value  # type: ignore[assignment]
    assert RequestSpec().priority == 0
