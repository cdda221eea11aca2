"""Calls of several threads at once."""

import threading

from tokenspeed_jax.scheduler import (
    ExecutionEvent,
)

from .scenario import Group, swa
from .twins import Twins


def test_two_threads_at_once_get_a_clear_error_and_corrupt_nothing() -> None:
    """Planning is the call that lets go of the interpreter lock; prompts of many pages make it last."""
    twins = Twins([Group(granularity=1, packing=8), swa(4, granularity=1, packing=4)], usable=4000, P=4, budget=20_000)
    for number in range(8):
        twins.submit(f"r{number}", range(number, number + 2000))
    refused, plans = [], []
    start = threading.Barrier(4)

    def hammer() -> None:
        start.wait()
        for call in range(200):
            try:
                if call % 4 == 0:
                    plans.append(twins.victim.next_execution_plan())
                else:
                    twins.victim.advance(ExecutionEvent())
                    twins.victim.waiting_size()
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=hammer) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(refused) == {"calls on one Scheduler must not overlap"}
    # Whatever was refused has changed nothing: the plans that were made are those of an undisturbed scheduler.
    made = {plan.round_number: plan.forward[0].request_ids for plan in plans}
    assert sorted(made) == list(range(1, len(plans) + 1))
    for round_number in sorted(made):
        plan = twins.undisturbed.next_execution_plan()
        assert plan.forward[0].request_ids == made[round_number]
    assert twins.state(twins.victim) == twins.state(twins.undisturbed)
