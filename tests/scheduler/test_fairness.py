"""Fairness: a large prompt is passed by smaller ones behind it, but for a bounded number of rounds only."""

import itertools
import random
from dataclasses import dataclass

import pytest

from .scenario import FULL, Group, Scenario, Step, swa


@dataclass
class Stream:
    """One large prompt beside an endless stream of small ones that always fill the pool (harness workload g)."""

    groups: tuple[Group, ...]
    bound: int
    mixed: bool = False
    budget: int = 256
    large: int = 100
    usable: int = 64
    P: int = 4
    max_batch_size: int = 32
    small: int = 8
    small_new: tuple[int, int] = (2, 30)
    large_priority: int = 0
    small_priority: int = 0

    def __post_init__(self) -> None:
        self.s = Scenario(
            self.groups,
            self.usable,
            P=self.P,
            budget=self.budget,
            max_batch_size=self.max_batch_size,
            enable_mixed_prefill_decode=self.mixed,
            max_overtaken_rounds=self.bound,
        )
        self.left: dict[str, int] = {}  # tokens still to be generated
        self.numbers = itertools.count()
        self.random = random.Random(1)

    def submit_small(self) -> None:
        request_id = f"s{next(self.numbers)}"
        # Of different lengths, or they would end together and leave the pool empty.
        self.left[request_id] = self.random.randint(*self.small_new)
        self.s.submit(request_id, self.small, self.left[request_id], priority=self.small_priority)

    def round(self) -> Step:
        while self.s.scheduler.waiting_size() < 8:
            self.submit_small()
        step = self.s.plan()
        extends = step.batch.num_extends()
        for row, request_id in enumerate(step.ids):
            whole = row >= extends or step.prefixes[row] + step.inputs[row] == step.batch.prefill_lengths[row]
            self.s.land(request_id, *([1] if whole else []))
            self.left[request_id] -= whole
            if self.left[request_id] == 0:
                self.s.finish(request_id)
        return step

    def overtaken_until_start(self, rounds: int) -> tuple[int, int]:
        """Rounds that admitted somebody behind the large prompt before it started, and rounds from the last of them
        to its start; the latter is -1 when it did not start in so many rounds."""
        for _ in range(20):
            self.round()
        first_behind = next(self.numbers)
        self.left["large"] = 4
        self.s.submit("large", self.large, 4, priority=self.large_priority)
        seen: set[str] = set()
        overtaken = since = 0
        for _ in range(rounds):
            step = self.round()
            if "large" in step.ids:
                return overtaken, since
            new = {r for r in step.ids[: step.batch.num_extends()] if int(r[1:]) >= first_behind} - seen
            seen |= new
            overtaken, since = (overtaken + 1, 0) if new else (overtaken, since + 1)
        return overtaken, -1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("groups", [(FULL,), (Group(granularity=2, packing=2), swa(8))])
@pytest.mark.parametrize("budget", [32, 64, 256])
@pytest.mark.parametrize("bound", [1, 10, 64])
def test_a_large_prompt_starts_soon_after_the_bound(
    groups: tuple[Group, ...], mixed: bool, budget: int, bound: int
) -> None:
    overtaken, waited = Stream(groups, bound, mixed, budget).overtaken_until_start(2000)
    assert overtaken <= bound
    assert 0 <= waited <= 100


def test_a_large_prompt_starts_in_a_pool_of_real_size() -> None:
    def start(bound: int) -> tuple[int, int]:
        return Stream(
            (FULL,), bound, True, 4096, 12_000, usable=1023, P=16, max_batch_size=64, small=256, small_new=(64, 64)
        ).overtaken_until_start(1000)

    overtaken, waited = start(64)
    assert overtaken <= 64
    assert 0 <= waited <= 100
    assert start(1_000_000)[1] == -1


def test_without_a_bound_it_is_passed_for_ever() -> None:
    """Guards the test above: the stream really leaves no room for the large prompt."""
    assert Stream((FULL,), 1_000_000).overtaken_until_start(1000)[0] > 100
    overtaken, waited = Stream((Group(granularity=2, packing=2), swa(8)), 1_000_000).overtaken_until_start(1000)
    assert overtaken > 200
    assert waited == -1


@pytest.mark.parametrize("budget", [32, 64])
def test_it_also_finishes(budget: int) -> None:
    stream = Stream((FULL,), 8, budget=budget)
    assert stream.overtaken_until_start(500)[1] >= 0
    for _ in range(300):
        if stream.left["large"] == 0:
            break
        stream.round()
    assert stream.left["large"] == 0


def test_the_stream_goes_on_afterwards() -> None:
    stream = Stream((FULL,), 8)
    assert stream.overtaken_until_start(500)[1] >= 0
    for _ in range(200):
        stream.round()
    done = sum(left == 0 for left in stream.left.values())
    for _ in range(50):
        stream.round()
    assert sum(left == 0 for left in stream.left.values()) > done


def test_the_bound_holds_within_and_below_a_priority_and_not_above() -> None:
    assert Stream((FULL,), 8, large_priority=-1).overtaken_until_start(500)[0] <= 8
    overtaken, waited = Stream((FULL,), 8, large_priority=1).overtaken_until_start(500)
    assert overtaken > 100
    assert waited == -1


def blocked_head(bound: int) -> Scenario:
    """Half the pool is taken and "head", which needs more than the other half, waits first in line."""
    s = Scenario([FULL], 8, P=4, max_overtaken_rounds=bound)
    s.prefill("running", 15, 1)
    s.submit("head", 20)
    return s


def test_with_a_bound_of_zero_nobody_passes() -> None:
    s = blocked_head(0)
    s.submit("behind", 3)
    s.submit("urgent", 3, priority=-1)
    step = s.plan()
    assert step.ids == ["urgent"]
    assert s.scheduler.waiting_size() == 2


def test_each_round_counts_once_however_many_pass() -> None:
    s = blocked_head(2)
    for name in ("a", "b", "c", "d"):
        s.submit(name, 1)
    assert s.plan().ids == ["a", "b", "c", "d"]
    for name in ("a", "b", "c", "d"):
        s.land(name, 1)
        s.finish(name)
    s.submit("e", 1)
    assert s.plan().ids == ["e"]
    s.submit("f", 1)
    assert "f" not in s.plan().ids
    s.abort("head")
    assert s.plan().ids == ["f"]


def test_rounds_that_admit_nobody_do_not_count() -> None:
    s = blocked_head(1)
    for _ in range(10):
        assert "head" not in s.plan().ids
    s.submit("a", 1)
    assert s.plan().ids == ["a"]


def test_a_request_that_has_outgrown_the_pool_holds_nobody() -> None:
    s = Scenario([FULL], 4, P=4, max_overtaken_rounds=0)
    s.prefill("endless", 12)
    for token in range(20):
        step = s.plan()
        if not step.ids:
            break
        s.land("endless", token)
    assert (s.scheduler.num_retractions(), s.scheduler.waiting_size()) == (1, 1)
    s.submit("small", 4)
    assert s.plan().ids == ["small"]
