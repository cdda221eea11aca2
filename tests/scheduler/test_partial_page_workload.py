"""Random workloads with `reuse_partial_pages`: what is copied is what the model says, and nobody reads a wrong row."""

import copy
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .partial_page_workload import Copies, PartialPages
from .scenario import FULL, Group, Step, swa
from .test_fork_workload import ForkWorkload
from .test_workload import GROUP_SETS, run_mixed_load
from .tier_workload import TierWorkload
from .workload import Workload

SETS = [groups for groups in GROUP_SETS if not any(group.state or group.replayable for group in groups)]


class PartialWorkload(PartialPages, Workload):
    pass


class PartialTierWorkload(PartialPages, TierWorkload):
    pass


class PartialForkWorkload(PartialPages, ForkWorkload):
    def check_copies(self, step: Step, expected: Copies) -> None:
        """Those that are left when the partial pages' are taken out."""
        stripped = copy.copy(step)
        stripped.copied = self.of_forks if expected else {n: c for n, c in self.of_forks.items() if c}
        super().check_copies(stripped, expected)


@pytest.mark.parametrize(("mixed", "overlap", "width"), list(itertools.product((False, True), (0, 1), (1, 3))))
@pytest.mark.parametrize("which", range(len(SETS)))
def test_a_roomy_pool_finds_all_that_was_left(which: int, mixed: bool, overlap: int, width: int) -> None:
    work = PartialWorkload(
        SETS[which],
        usable=4000,
        seed=which,
        enable_mixed_prefill_decode=mixed,
        overlap_schedule_depth=overlap,
        decode_input_tokens=width,
        enable_kv_cache_events=True,
        max_batch_size=4,
    )
    work.never_evicts = True
    run_mixed_load(work, requests=150)
    assert work.copying_rows > 20


@pytest.mark.parametrize(("mixed", "overlap", "width"), list(itertools.product((False, True), (0, 1), (1, 3))))
@pytest.mark.parametrize("which", range(len(SETS)))
def test_a_crowded_pool_serves_everybody(which: int, mixed: bool, overlap: int, width: int) -> None:
    work = PartialWorkload(
        SETS[which],
        usable=18,
        seed=50 + which,
        enable_mixed_prefill_decode=mixed,
        overlap_schedule_depth=overlap,
        decode_input_tokens=width,
        max_batch_size=4,
    )
    run_mixed_load(work, requests=60)
    assert work.submitted == 60


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, len(SETS) - 1),
    usable=st.integers(3, 40),
    host=st.sampled_from([0, 1, 6, 40]),
    storage=st.booleans(),
    forks=st.booleans(),
    seed=st.integers(0, 2**32),
    mixed=st.booleans(),
    overlap=st.integers(0, 1),
    width=st.integers(1, 3),
    replay=st.integers(0, 6),
    budget=st.integers(3, 40),
    batch=st.integers(1, 6),
    priorities=st.sampled_from([(0,), (0, 1), (-5, 0, 7)]),
    overtaken=st.sampled_from([0, 1, 64]),
    failure_rate=st.sampled_from([0.0, 0.2]),
)
# A fork takes over a block that its parent has just got in exchange for an equal one.
@example(
    which=0,
    usable=13,
    host=0,
    storage=False,
    forks=True,
    seed=1123549,
    mixed=True,
    overlap=0,
    width=1,
    replay=0,
    budget=3,
    batch=3,
    priorities=(0, 1),
    overtaken=0,
    failure_rate=0.0,
)
def test_any_configuration_serves_everybody(
    which: int,
    usable: int,
    host: int,
    storage: bool,
    forks: bool,
    seed: int,
    mixed: bool,
    overlap: int,
    width: int,
    replay: int,
    budget: int,
    batch: int,
    priorities: tuple[int, ...],
    overtaken: int,
    failure_rate: float,
) -> None:
    groups = SETS[which]
    fields: dict[str, object] = {
        "budget": budget,
        "enable_mixed_prefill_decode": mixed,
        "overlap_schedule_depth": overlap,
        "decode_input_tokens": width,
        "prefix_replay_tokens": replay,
        "max_batch_size": batch,
        "max_overtaken_rounds": overtaken,
    }
    if host:
        sharded = any(group.shards > 1 for group in groups)
        work = PartialTierWorkload(groups, usable, host, seed, storage=storage and not sharded, **fields)
        work.failure_rate = failure_rate
    else:
        work = (PartialForkWorkload if forks else PartialWorkload)(groups, usable, seed, **fields)
    work.priorities = priorities
    run_mixed_load(work, requests=20)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, swa(6)), (Group(granularity=2, packing=4, shards=2),)])
def test_workloads_copy_and_evict(groups: tuple[Group, ...]) -> None:
    """Guards the tests above: a workload that copies nothing, or never evicts, would prove little."""
    work = PartialWorkload(groups, usable=40 * len(groups), seed=3, max_batch_size=4)
    run_mixed_load(work, requests=300)
    assert work.copying_rows > 10
    assert work.found_less > 10


@pytest.mark.parametrize("groups", [(FULL,), (FULL, swa(6))])
def test_workloads_with_a_host_copy_and_load(groups: tuple[Group, ...]) -> None:
    work = PartialTierWorkload(groups, 40 * len(groups), 60, 3, storage=True, max_batch_size=4)
    run_mixed_load(work, requests=300)
    assert work.copying_rows > 10
    assert work.tiers.loaded > 50


def test_families_copy_and_take_over() -> None:
    work = PartialForkWorkload((FULL,), usable=40, seed=3, max_batch_size=4)
    run_mixed_load(work, requests=300)
    assert work.copying_rows > 10
    assert work.taken_over > 10
