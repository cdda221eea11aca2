"""Stateful property tests: hypothesis chooses the calls, scheduler_machine.py and tiered_machine.py judge what comes.

An ordinary run makes the same calls every time, so that what it comes upon can be asserted;
`pytest --hypothesis-profile=long` makes others, and a hundred times as many steps.
"""

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

    def runTest(self) -> None:
        MET.clear()
        super().runTest()
        # A run that never shares and never runs short would prove little.
        assert [kind for kind in IN_ANY_RUN if not MET[kind]] == []


class TestSchedulerOverTiers(TieredMachine.TestCase):
    settings = chosen(examples=100)

    def runTest(self) -> None:
        MET.clear()
        super().runTest()
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
