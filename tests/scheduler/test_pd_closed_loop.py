"""Both halves of a disaggregated worker in a closed loop: no wrong read, leak or stall, equal plans (I38 to I53)."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from .random_configurations import GROUP_SETS as SHARED_GROUP_SETS
from .random_configurations import Configuration, configurations, least_budget
from .scenario import FULL, STATE, Group, replayable, swa
from .simulated_peer import Pair

# A window of one token needs nothing below a boundary, so that states alone decide how far a hit reaches.
GROUP_SETS = [*SHARED_GROUP_SETS, (swa(1, granularity=1), STATE)]
SWITCHES = list(itertools.product((1, 3), (0, 1), (False, True)))


def run(pair: Pair, requests: int) -> None:
    attempts = 0
    while pair.submitted < requests and attempts < 50 * requests:
        attempts += 1
        if len(pair.prompts) < 8:
            pair.submit()
        pair.round()
    pair.drain(rounds=5000)


@pytest.mark.parametrize(("width", "overlap", "no_cache"), SWITCHES)
@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_crowded_pair_serves_everybody(which: int, width: int, overlap: int, no_cache: bool) -> None:
    fields: dict[str, object] = {
        "decode_input_tokens": width,
        "overlap_schedule_depth": overlap,
        "disable_prefix_cache": no_cache,
        "max_batch_size": 4,
    }
    pair = Pair(GROUP_SETS[which], (16, 18), seed=which, fields=fields)
    run(pair, requests=25)
    assert pair.submitted == 25
    assert pair.landings > 5


@settings(max_examples=60, deadline=None)
@given(configuration=configurations(GROUP_SETS), prefill_usable=st.integers(3, 30), disturbed=st.booleans())
# Each half waits for the other, and a recovery that finds no room for its end starts again and again.
@example(
    configuration=Configuration(
        (FULL,),
        usable=6,
        seed=1,
        fields={
            "budget": 4,
            "overlap_schedule_depth": 1,
            "decode_input_tokens": 2,
            "prefix_replay_tokens": 5,
            "max_batch_size": 2,
            "max_overtaken_rounds": 1,
        },
        priorities=(0, 1),
    ),
    prefill_usable=15,
    disturbed=False,
)
def test_any_configuration_serves_everybody(configuration: Configuration, prefill_usable: int, disturbed: bool) -> None:
    usable = (prefill_usable, configuration.usable)
    pair = Pair(configuration.groups, usable, configuration.seed, configuration.fields, disturbed)
    pair.priorities = configuration.priorities
    run(pair, requests=12)


@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_request_of_the_longest_accepted_size_completes_alone(which: int) -> None:
    groups = GROUP_SETS[which]
    for usable, (width, overlap, no_cache), budget in itertools.product((3, 4, 7, 12), SWITCHES, (4, 5, 16)):
        fields: dict[str, object] = {
            "budget": max(budget, least_budget(groups)),
            "decode_input_tokens": width,
            "overlap_schedule_depth": overlap,
            "disable_prefix_cache": no_cache,
        }
        for sizes in ((usable, 64), (64, usable)):
            pair = Pair(groups, sizes, seed=usable, fields=fields, disturbed=False)
            tail = width * (1 + overlap)
            for new in (1, 9):
                limits = pair.p.scheduler.max_single_request_tokens(), pair.d.scheduler.max_single_request_tokens()
                length = min(limits[0], limits[1] - new - tail, 70)
                # Twice the same size, so that the second also meets what the first has left in the cache.
                for recovers in (False, True) if length > 0 else ():
                    assert pair.submit(length, new)
                    alone(pair, recovers)
            pair.drain(rounds=0)
            assert pair.timeouts == 0


def alone(pair: Pair, recovers: bool) -> None:
    """Runs the one request to its end; perhaps the decode worker has to compute it again on the way."""
    for number in range(600):
        if not pair.prompts:
            return
        pair.round()
        for request_id, prompt in list(pair.prompts.items()):
            if recovers and number > 2 and prompt.generated > 0 and pair.d.quiescent(request_id):
                pair.start_again(request_id, prompt)
                recovers = False
    pytest.fail("a request that was accepted did not complete alone")


@pytest.mark.parametrize("groups", [(FULL, swa(4)), (FULL, STATE), (swa(6),), (FULL, replayable(6))])
def test_pairs_meet_hits_retractions_and_recoveries(groups: tuple[Group, ...]) -> None:
    """Guards the tests above: a loop that never shares and never runs short would prove little."""
    pair = Pair(groups, (18, 14 if FULL in groups else 8), seed=3, fields={"max_batch_size": 4}, disturbed=False)
    run(pair, requests=60)
    assert min(pair.p.hits, pair.d.hits) > 0
    assert pair.d.scheduler.num_retractions() > 0
