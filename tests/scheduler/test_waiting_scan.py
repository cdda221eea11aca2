"""Waiting requests that were refused are not looked at again until something changed: the plans are those of a
scheduler that looks every time."""

import pytest

from tokenspeed_jax.scheduler import ExecutionEvent, ForwardEvent, Scheduler

from .scenario import FULL, STATE, Group, Scenario, Step, named, spec, swa
from .workload import Workload

GROUP_SETS = [(FULL,), (FULL, swa(6)), (Group(packing=3), STATE), (swa(5, packing=2),)]


def disturb(scheduler: Scheduler, name: str) -> None:
    """A request that comes and goes, so that the scheduler has to look again."""
    scheduler.submit_requests([spec(name, [1])])
    scheduler.advance(ExecutionEvent().add_event(named(ForwardEvent.Abort, name)))


class Disturbed(Workload):
    """Only the second scheduler is disturbed, before every plan."""

    plans = 0

    def plan(self) -> Step:
        self.plans += 1
        disturb(self.schedulers[1], f"passer{self.plans}")
        return super().plan()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("groups", GROUP_SETS)
def test_plans_equal_those_of_a_scheduler_that_always_looks(groups: tuple[Group, ...], mixed: bool) -> None:
    for seed in range(3):
        work = Disturbed(groups, usable=14, seed=seed, enable_mixed_prefill_decode=mixed)
        for _ in range(250):
            while len(work.live) < 12:
                work.submit()
            work.round()
            work.disturb()
        work.drain(rounds=5000)


def round_of_the_second_start(disturbed: bool) -> int:
    """`second` is what `first` is going to say, and fits once most of it is cached."""
    s = Scenario([FULL], 13, enable_mixed_prefill_decode=True)
    said, answer = s.fresh(4), s.fresh(14)
    s.submit("first", said, max_new=16)
    s.plan()
    s.land("first", answer[0])
    s.submit("second", [*said, *answer[:10], 1], max_new=2)
    for number in range(1, 14):
        if disturbed:
            disturb(s.scheduler, f"passer{number}")
        step = s.plan()
        if "second" in step.ids:
            assert step.prefixes == [12]  # nine blocks are needed, three are free
            return number
        s.land("first", answer[number])
    raise AssertionError("second never started")


def test_a_blocked_prompt_starts_once_another_has_cached_enough_of_it() -> None:
    assert 4 < round_of_the_second_start(disturbed=False) == round_of_the_second_start(disturbed=True) < 13
