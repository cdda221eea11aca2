"""Random workloads: no wrong read, no block shared but by a hit, no leak, no starvation, equal plans."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .random_configurations import GROUP_SETS, Configuration, configurations, least_budget
from .scenario import FULL, STATE, Group, replayable, swa
from .workload import Workload, run_mixed_load

SWITCHES = list(itertools.product((False, True), (0, 1), (False, True)))


@pytest.mark.parametrize("overtaken", [0, 2, 64])
@pytest.mark.parametrize(("mixed", "overlap", "no_cache"), SWITCHES)
@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_crowded_pool_serves_everybody(which: int, mixed: bool, overlap: int, no_cache: bool, overtaken: int) -> None:
    groups = GROUP_SETS[which]
    work = Workload(
        groups,
        usable=18,
        seed=which,
        enable_mixed_prefill_decode=mixed,
        overlap_schedule_depth=overlap,
        disable_prefix_cache=no_cache,
        max_batch_size=4,
        max_overtaken_rounds=overtaken,
    )
    run_mixed_load(work, requests=25)
    assert work.submitted == 25


@settings(max_examples=60, deadline=None)
@given(configuration=configurations(), mixed=st.booleans())
def test_any_configuration_serves_everybody(configuration: Configuration, mixed: bool) -> None:
    work = Workload(
        configuration.groups,
        configuration.usable,
        configuration.seed,
        enable_mixed_prefill_decode=mixed,
        **configuration.fields,
    )
    work.priorities = configuration.priorities
    run_mixed_load(work, requests=12)


@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_request_of_the_longest_accepted_size_completes_alone(which: int) -> None:
    for usable, width, (mixed, overlap, no_cache), budget in itertools.product(
        (3, 4, 7, 12), (1, 3), SWITCHES, (4, 5, 16)
    ):
        work = Workload(
            GROUP_SETS[which],
            usable,
            seed=usable,
            budget=max(budget, least_budget(GROUP_SETS[which])),
            decode_input_tokens=width,
            enable_mixed_prefill_decode=mixed,
            overlap_schedule_depth=overlap,
            disable_prefix_cache=no_cache,
        )
        bound = min(work.scheduler.max_single_request_tokens(), 80)
        tail = width * (1 + overlap)
        for new in (1, 9):
            if bound - new - tail < 1:
                continue
            # Twice the same size, so that the second also meets what the first has left in the cache.
            for _ in range(2):
                assert work.submit(bound - new - tail, new, declared=True)
                for _ in range(400):
                    if not work.live:
                        break
                    work.round()
                assert not work.live
        work.drain(rounds=0)


@pytest.mark.parametrize(("width", "overlap"), list(itertools.product((2, 3, 4), (0, 1))))
@pytest.mark.parametrize("groups", [(FULL, STATE), (FULL, Group(granularity=2, state=True), STATE)])
def test_wide_decodes_never_pass_a_boundary_off_as_a_snapshot(
    groups: tuple[Group, ...], width: int, overlap: int
) -> None:
    """Many requests in a roomy pool: what a decode step jumps over is soon hit, if it is published."""
    work = Workload(
        groups, usable=48, seed=width, decode_input_tokens=width, overlap_schedule_depth=overlap, max_batch_size=4
    )
    run_mixed_load(work, requests=600)
    assert work.hits > 300


@pytest.mark.parametrize("groups", [(FULL, swa(4)), (FULL, STATE), (STATE,), (FULL, replayable(6))])
def test_workloads_meet_hits_and_retractions(groups: tuple[Group, ...]) -> None:
    """Guards the tests above: a workload that never shares and never runs short would prove little."""
    work = Workload(groups, usable=18 if FULL in groups else 10, seed=3, max_batch_size=4)
    run_mixed_load(work, requests=40)
    assert work.hits > 0
    assert work.scheduler.num_retractions() > 0
