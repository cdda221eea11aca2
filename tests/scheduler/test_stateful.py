"""Stateful property tests: hypothesis chooses the calls, scheduler_machine.py and tiered_machine.py judge what comes.

An ordinary run makes the same calls every time, so that what it comes upon can be asserted;
`pytest --hypothesis-profile=long` makes others, and a hundred times as many steps.
"""

from hypothesis import HealthCheck, settings

from .scheduler_machine import MET, SchedulerMachine
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
        assert min(MET[kind] for kind in IN_ANY_RUN) > 0, MET


class TestSchedulerOverTiers(TieredMachine.TestCase):
    settings = chosen(examples=100)

    def runTest(self) -> None:
        MET.clear()
        super().runTest()
        assert min(MET[kind] for kind in (*IN_ANY_RUN, *OVER_THE_TIERS)) > 0, MET
