"""Configurations for random workloads: the sets of cache groups they run over, and everything else drawn at random."""

from dataclasses import dataclass

from hypothesis import strategies as st

from .scenario import FULL, STATE, Group, replayable, swa
from .workload import P

GROUP_SETS: list[tuple[Group, ...]] = [
    (FULL,),
    (FULL, swa(4)),
    (FULL, FULL),
    (Group(granularity=2, packing=3), swa(5, granularity=4), swa(9, granularity=2, packing=2)),
    (swa(6),),
    (Group(granularity=1, packing=4), swa(1, granularity=2, packing=2)),
    (Group(packing=4, shards=2), swa(3, granularity=1, packing=2)),
    (FULL, STATE),
    (STATE,),
    (Group(packing=3), Group(granularity=2, packing=2, state=True), Group(granularity=1, packing=4, state=True)),
    (swa(3), STATE),
    (Group(granularity=2, packing=2), swa(5, granularity=4), Group(packing=2, shards=2, state=True)),
    (FULL, replayable(6)),
    (Group(packing=2), replayable(3, granularity=2), replayable(2, granularity=1, packing=4)),
    (FULL, swa(6), replayable(5, granularity=2, packing=2)),
]


def least_budget(groups: tuple[Group, ...]) -> int:
    """What the scheduler asks for, so that every chunk moves."""
    window = max((group.window or 0 for group in groups if group.replayable), default=0)
    return max(P if any(group.state for group in groups) else 1, window + max(window, P) if window else 1)


@dataclass(frozen=True)
class Configuration:
    groups: tuple[Group, ...]
    usable: int
    seed: int
    fields: dict[str, object]  # of SchedulerConfig
    priorities: tuple[int, ...]


@st.composite
def configurations(draw: st.DrawFn, group_sets: list[tuple[Group, ...]] = GROUP_SETS) -> Configuration:
    """Of either half of a worker too: `enable_mixed_prefill_decode` is left out."""
    groups = draw(st.sampled_from(group_sets))
    fields: dict[str, object] = {
        "budget": max(draw(st.integers(3, 40)), least_budget(groups)),
        "overlap_schedule_depth": draw(st.integers(0, 1)),
        "decode_input_tokens": draw(st.integers(1, 3)),
        "disable_prefix_cache": draw(st.booleans()),
        "prefix_replay_tokens": draw(st.integers(0, 6)),
        "max_batch_size": draw(st.integers(1, 6)),
        "max_overtaken_rounds": draw(st.sampled_from([0, 1, 3, 64])),
    }
    return Configuration(
        groups,
        usable=draw(st.integers(3, 40)),
        seed=draw(st.integers(0, 2**32)),
        fields=fields,
        priorities=draw(st.sampled_from([(0,), (0, 1), (-5, 0, 7)])),
    )
