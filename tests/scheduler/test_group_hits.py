"""What prompts take over from each cache group is counted per group."""

import random

import pytest

from .scenario import FULL, STATE, Group, Scenario, replayable, swa

P = 4


def scenario(groups: tuple[Group, ...], **fields: object) -> Scenario:
    return Scenario(groups, 63, **({"P": P} | fields))


def hits(s: Scenario, groups: tuple[Group, ...]) -> list[int]:
    return [s.scheduler.cache_group_hit_tokens(f"g{index}") for index in range(len(groups))]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((FULL,), [16]),
        ((FULL, swa(6)), [16, 8]),  # five tokens before the next one, in two blocks of four
        ((FULL, swa(6, granularity=2)), [16, 6]),
        ((FULL, STATE), [16, 4]),
        ((FULL, Group(state=True, granularity=2)), [16, 2]),
        ((swa(6), FULL, STATE), [8, 16, 4]),
        ((FULL, replayable(4)), [16, 0]),
        ((STATE,), [4]),
    ],
)
def test_a_hit_counts_what_each_group_gives_to_it(groups: tuple[Group, ...], expected: list[int]) -> None:
    s = scenario(groups)
    shared = s.fresh(16)
    # Where a state has to stand at the end of what is shared, the first prompt ends there.
    s.life("seed", shared)
    assert hits(s, groups) == [0] * len(groups)
    step = s.life("again", [*shared, *s.fresh(9)])
    assert step.prefixes[0] + step.replays[0] == 16
    assert hits(s, groups) == expected


def test_without_a_prefix_cache_nothing_is_hit() -> None:
    s = scenario((FULL,), disable_prefix_cache=True)
    prompt = s.fresh(17)
    s.life("a", prompt)
    s.life("b", prompt)
    assert hits(s, (FULL,)) == [0]


def test_the_beginning_of_a_page_that_is_copied_counts() -> None:
    groups = (FULL, swa(6, granularity=2))
    s = scenario(groups, P=8, reuse_partial_pages=True)
    prompt = s.fresh(13)
    s.life("a", prompt)
    step = s.life("b", [*prompt, *s.fresh(9)])
    assert step.prefixes == [13]
    # Behind the whole page come five copied tokens, all of which a window of six reads.
    assert hits(s, groups) == [8 + 5, 6 + 5]


def test_the_hits_of_whole_history_are_where_prompts_start() -> None:
    s = scenario((FULL,))
    rng = random.Random(7)
    stems = [s.fresh(24) for _ in range(3)]
    total = 0
    for index in range(60):
        stem = rng.choice(stems)
        step = s.life(f"r{index}", [*stem[: rng.randint(1, 24)], *s.fresh(rng.randint(0, 9))])
        total += step.prefixes[0]
    assert total > 0
    assert hits(s, (FULL,)) == [total]


def test_an_unknown_group_is_an_error() -> None:
    with pytest.raises(IndexError):
        scenario((FULL,)).scheduler.cache_group_hit_tokens("g1")
