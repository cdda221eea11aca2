"""Stateful property tests: hypothesis chooses the calls, scheduler_machine.py and tiered_machine.py judge what comes.

An ordinary run is short; `pytest --hypothesis-profile=long` makes a hundred times as many steps. What hypothesis comes
upon differs between versions and even processes, so whether the machines come upon enough is asked of seeded walks.
"""

from collections.abc import Callable
from random import Random

from hypothesis import HealthCheck, settings

from .scheduler_machine import GROUP_SETS, MET, SchedulerMachine
from .tiered_machine import TieredMachine

IN_ANY_RUN = ("hits", "retractions", "late", "hostile", "rows")
OVER_THE_TIERS = (
    "host hits",
    "store hits",
    "snapshots",
    "recoveries",
    "failed copies",
    "missing objects",
    "retries",
    "ended during its load",
    "ended before its failure is told",
    "host evictions",
    "clears above a host",
)


def chosen(examples: int) -> settings:
    if settings.get_current_profile_name() == "long":
        return settings()
    return settings(
        max_examples=examples,
        stateful_step_count=80,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )


class TestScheduler(SchedulerMachine.TestCase):
    settings = chosen(examples=80)


class TestSchedulerOverTiers(TieredMachine.TestCase):
    settings = chosen(examples=100)


def tokens(dice: Random) -> list[int]:
    return [0] * dice.randint(0, 12) + [dice.randint(0, 1) for _ in range(dice.randint(1, 6))]


def prompts(dice: Random, most: int) -> list[list[int]]:
    return [tokens(dice) for _ in range(dice.randint(1, most))]


def calls(machine: SchedulerMachine, dice: Random) -> list[Callable[[], None]]:
    """The calls that are right at this moment, with arguments for each."""
    found: list[Callable[[], None]] = [
        lambda: machine.submit(prompts(dice, 4), dice.randint(2, 18), declared=False, salt="", priority=0)
    ]
    if machine.live:
        found.append(lambda: machine.abort(dice.randint(0, 9)))
        found.append(lambda: machine.hostile(dice.randint(0, 9), dice.choice(["one too many", "round", "submission"])))
    if machine.forceable():
        found.append(lambda: machine.land_forced(dice.randint(0, 9), dice.randint(1, 9)))
    if machine.late:
        found.append(lambda: machine.late_result(named_round=True))
    if not isinstance(machine, TieredMachine):
        return [*found, lambda: machine.run(dice.randint(1, 12), accepted=1)] if machine.live else found

    def failures() -> int:
        return dice.choice([0, 0, 1, 2])

    found.append(
        lambda: machine.come_back(
            dice.choice(["device", "both"]),
            prompts(dice, 3),
            dice.randint(2, 18),
            failures(),
            lost=dice.choice([0, 1, 99]),
        )
    )
    if machine.live:
        found += 2 * [
            lambda: machine.run(dice.randint(1, 12), 1, copies=dice.randint(0, 3), failures=failures(), aborts=1)
        ]
    if machine.may_plan():
        found.append(lambda: machine.plan(1, failures()))
    if machine.failed:
        found.append(lambda: machine.tell_of_failure(["keys", "requests", "operations"], aborts=dice.randint(0, 1)))
    if machine.under_way:
        found.append(lambda: machine.complete_one(dice.randint(0, 9)))
    return found


def walk(machine: SchedulerMachine, dice: Random) -> None:
    for _ in range(40):
        dice.choice(calls(machine, dice))()
    machine.teardown()


def test_seeded_walks_meet_everything_that_the_machine_is_for() -> None:
    MET.clear()
    for seed in range(10):
        machine = SchedulerMachine()
        mixed = seed % 2 == 1
        machine.build(GROUP_SETS[seed % len(GROUP_SETS)], 10, budget=16, width=1, overlap=1, mixed=mixed, batch=4)
        walk(machine, Random(seed))
    assert [kind for kind in (*IN_ANY_RUN, "forced") if not MET[kind]] == []


def test_seeded_walks_meet_everything_that_the_machine_over_tiers_is_for() -> None:
    MET.clear()
    for seed in range(150):
        machine, dice = TieredMachine(), Random(seed)
        machine.build(
            GROUP_SETS[seed % 3],
            usable=dice.randint(9, 12),
            host=dice.randint(6, 20),
            storage=True,
            budget=16,
            width=1,
            overlap=seed % 2,
            mixed=False,
            batch=4,
            caches=True,
        )
        walk(machine, dice)
    assert [kind for kind in (*IN_ANY_RUN, *OVER_THE_TIERS) if not MET[kind]] == []


def test_a_block_of_a_hit_that_publishing_replaces_is_replaced_in_the_plans_too() -> None:
    """Found by a long run: the plan went on naming a block of a window that the request had let go of."""
    machine = TieredMachine()
    machine.build(
        GROUP_SETS[1],
        usable=16,
        host=11,
        storage=True,
        budget=17,
        width=1,
        overlap=0,
        mixed=False,
        batch=5,
        caches=True,
    )
    zeros = [0] * 16
    first = [[*zeros[:9], 1], zeros[:3], [*zeros[:9], 1, 0], [0, 1, 1, 1, 0, 1]]
    machine.submit(first, new=2, declared=False, salt="", priority=-1)
    second = [[*zeros[:9], 1, 0, 1, 0, 0, 1], [*zeros[:6], 1, 1, 1], zeros[:11], zeros[:6]]
    machine.submit(second, new=13, declared=False, salt="", priority=-1)
    third = [[*zeros[:13], 1, 1, 1], [*zeros[:8], 1, *zeros[:4]], [0, 0, 0, 1, 1, 0, 1, 0, 1]]
    machine.come_back("both", third, new=12, failures=0, lost=0)
    machine.clear_device()
    machine.come_back("both", [[0, 0, 0, 1, 1], [*zeros[:12], 1, 0, 1], [*zeros, 1, 1]], new=15, failures=0, lost=0)
    machine.submit([[*zeros[:5], 1, 0, 1]], new=12, declared=False, salt="", priority=1)
    machine.come_back("device", [zeros[:4], zeros[:11], [*zeros[:8], 1, 1, 0, 1, 0, 0]], new=18, failures=0, lost=0)
    machine.teardown()
