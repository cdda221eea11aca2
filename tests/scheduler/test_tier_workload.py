"""Random workloads over host tier and external store: no wrong read, no leak, no starvation, equal plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .random_configurations import GROUP_SETS, Configuration, configurations
from .scenario import FULL, STATE, Group, replayable, swa
from .tier_workload import TierWorkload
from .workload import run_mixed_load


def is_sharded(groups: tuple[Group, ...]) -> bool:
    return any(group.shards > 1 for group in groups)


@pytest.mark.parametrize("patience", [0, 5, 40])
@pytest.mark.parametrize("host", [1, 6, 60])
@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_crowded_pool_over_a_slow_host_serves_everybody(which: int, host: int, patience: int) -> None:
    groups = GROUP_SETS[which]
    work = TierWorkload(
        groups,
        usable=14,
        host=host,
        seed=which,
        storage=not is_sharded(groups) and patience > 0,
        enable_mixed_prefill_decode=bool(host % 2),
        overlap_schedule_depth=which % 2,
        enable_kv_cache_events=True,
        max_batch_size=4,
    )
    work.patience = patience
    work.failure_rate = 0.05
    run_mixed_load(work, requests=20)
    assert work.submitted == 20


@settings(max_examples=60, deadline=None)
@given(
    configuration=configurations(),
    mixed=st.booleans(),
    host=st.integers(1, 40),
    storage=st.booleans(),
    patience=st.sampled_from([0, 3, 20]),
    failure_rate=st.sampled_from([0.0, 0.05, 0.2]),
)
def test_any_configuration_serves_everybody_through_the_tiers(
    configuration: Configuration, mixed: bool, host: int, storage: bool, patience: int, failure_rate: float
) -> None:
    work = TierWorkload(
        configuration.groups,
        configuration.usable,
        host,
        configuration.seed,
        storage=storage and not is_sharded(configuration.groups),
        enable_mixed_prefill_decode=mixed,
        **configuration.fields,
    )
    work.priorities = configuration.priorities
    work.patience = patience
    work.failure_rate = failure_rate
    run_mixed_load(work, requests=12)


@pytest.mark.parametrize("groups", [(FULL, swa(4)), (FULL, STATE), (STATE,), (FULL, replayable(6))])
def test_workloads_meet_loads_misses_and_retractions(groups: tuple[Group, ...]) -> None:
    """Guards the tests above: a workload that brings nothing back, or misses nothing, would prove little."""
    work = TierWorkload(groups, usable=14 if FULL in groups else 8, host=16, seed=3, storage=True, max_batch_size=4)
    run_mixed_load(work, requests=400)
    assert work.tiers.loaded > 50
    assert work.tiers.fetched > 0
    assert work.missed > 0
    assert work.scheduler.num_retractions() > 0


@pytest.mark.parametrize("groups", [groups for groups in GROUP_SETS if is_sharded(groups)])
def test_sharded_blocks_come_back_from_the_host(groups: tuple[Group, ...]) -> None:
    work = TierWorkload(groups, usable=6, host=20, seed=5, max_batch_size=4)
    run_mixed_load(work, requests=400)
    assert work.tiers.loaded > 50
