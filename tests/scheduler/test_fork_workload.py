"""Random families of requests on a simulated device, held against a model of when and what a fork takes over."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .random_configurations import GROUP_SETS, Configuration, configurations
from .scenario import Group, Step, swa
from .workload import P, Workload, run_mixed_load


class ForkWorkload(Workload):
    """Most requests have siblings with the same prompt, submitted with them or while they run."""

    def __init__(self, groups: tuple[Group, ...], usable: int, seed: int, **fields: object) -> None:
        super().__init__(groups, usable, seed, **fields)
        self.parents: dict[str, str] = {}
        self.admitted: set[str] = set()  # forks that have had a row
        self.completed: set[str] = set()  # whose prompt has been scheduled to its end, in an earlier round
        self.back_with_output: set[str] = set()
        self.taken_over = 0
        self.forks_alone = 0  # forks that were admitted like anybody else although their parent was there

    def submit(self, prompt: int | None = None, new: int | None = None, declared: bool | None = None) -> bool:
        roots = [name for name in self.live if name not in self.parents]
        if roots and self.random.random() < 0.3:
            self.enter([self.fork(self.random.choice(roots))])
            return True
        before = self.submitted
        specs = []
        entered, self.enter = self.enter, specs.extend  # type: ignore[method-assign]
        accepted = super().submit(prompt, new, declared)
        self.enter = entered  # type: ignore[method-assign]
        if accepted:
            root = f"r{before}"
            self.enter([*specs, *(self.fork(root) for _ in range(self.random.randint(0, 3)))])
        return accepted

    def fork(self, root: str):
        parent = self.live[root]
        parent.family = root
        prompt = parent.tokens[: parent.prompt]
        new = self.random.randint(1, parent.stop_after)  # no longer than what was accepted
        room = new + self.width * (1 + self.depth)
        name = f"r{self.submitted}"
        made = self.describe(prompt, new, room if self.random.random() < 0.7 else 0, fork_of=root)
        self.live[name].family = root
        self.device.requests[name].variant = self.random.randint(0, 2)
        self.parents[name] = root
        return made

    def find_takers(self, step: Step) -> set[str]:
        extends = step.batch.num_extends()
        lengths = step.batch.prefill_lengths
        complete_now = {step.ids[r] for r in range(extends) if step.prefixes[r] + step.inputs[r] == lengths[r]}
        for row, name in enumerate(step.ids[:extends]):
            if lengths[row] > self.live[name].prompt:
                self.back_with_output.add(name)
        takers = set()
        copies = {f"g{group}": [] for group in range(len(self.groups))}
        for row, name in enumerate(step.ids[:extends]):
            if name not in self.parents or name in self.admitted:
                continue
            self.admitted.add(name)
            root = self.parents[name]
            if root not in self.live:
                continue
            assert root in self.completed, "a fork runs before its parent's prompt is computed"
            # One that is back and ends its prompt again in this very round may do so behind a more urgent fork only.
            again = root in complete_now
            assert not again or step.ids.index(root) > row
            if not again and self.follow(step, row, root, copies):
                takers.add(name)
            else:
                self.forks_alone += 1
        self.check_copies(step, copies if takers else {})
        self.taken_over += len(takers)
        self.completed |= complete_now
        return takers

    def check_copies(self, step: Step, expected: dict[str, list[tuple[int, int]]]) -> None:
        assert step.copied == expected

    def follow(self, step: Step, row: int, root: str, copies: dict[str, list[tuple[int, int]]]) -> bool:
        """Whether the fork in `row` takes its parent's blocks over; if it does, that it takes the right ones."""
        name, parent = step.ids[row], self.live[root]
        tail = max(self.config.prefix_replay_tokens, 1)
        begin = self.live[name].prompt - tail
        if self.state(root) not in ("PrefillDone", "Decoding") or begin <= 0 or root in self.back_with_output:
            return False
        expected = []
        for group, kind in enumerate(self.groups):
            held = step.row(root, group) if root in step.ids else parent.tables[group]  # type: ignore[index]
            g = self.device.granularity(group)
            window = begin + 1 if kind.window is None else kind.window
            read = {position // g for position in range(max(0, begin - window + 1), begin)}
            if kind.state or any(held[slot] == 0 for slot in read):
                return False
            # The prefix page that the prompt leaves unfinished becomes another page in each of the family.
            own = self.live[name].prompt // P * P if not kind.replayable else begin
            shared = {slot for slot in read if (slot + 1) * g <= min(own, begin)}
            expected.append(
                (
                    group,
                    [held[slot] if slot in shared else 0 for slot in range(min(read - shared, default=begin // g))],
                    {s: held[s] for s in sorted(read - shared)},
                )
            )
        assert (step.prefixes[row], step.replays[row]) == (begin, 0)
        for group, shared, sources in expected:
            table = step.row(name, group)
            assert table[: len(shared)] == shared
            copies[f"g{group}"] += [(source, table[slot]) for slot, source in sources.items()]
        return True


@pytest.mark.parametrize(
    ("mixed", "overlap", "no_cache"), list(itertools.product((False, True), (0, 1), (False, True)))
)
@pytest.mark.parametrize("which", range(len(GROUP_SETS)))
def test_a_crowded_pool_serves_every_family(which: int, mixed: bool, overlap: int, no_cache: bool) -> None:
    work = ForkWorkload(
        GROUP_SETS[which],
        usable=18,
        seed=100 + which,
        enable_mixed_prefill_decode=mixed,
        overlap_schedule_depth=overlap,
        disable_prefix_cache=no_cache,
        max_batch_size=4,
    )
    run_mixed_load(work, requests=40)
    assert work.submitted >= 40


@settings(max_examples=60, deadline=None)
@given(configuration=configurations(), mixed=st.booleans())
def test_any_configuration_serves_every_family(configuration: Configuration, mixed: bool) -> None:
    work = ForkWorkload(
        configuration.groups,
        configuration.usable,
        configuration.seed,
        enable_mixed_prefill_decode=mixed,
        **configuration.fields,
    )
    work.priorities = configuration.priorities
    run_mixed_load(work, requests=20)


@pytest.mark.parametrize("groups", [(Group(),), (Group(), swa(6)), (Group(granularity=2, packing=4, shards=2),)])
def test_workloads_take_over_and_run_short(groups: tuple[Group, ...]) -> None:
    """Guards the tests above: families that never share, or never run short, would prove little."""
    work = ForkWorkload(groups, usable=18, seed=3, max_batch_size=4)
    run_mixed_load(work, requests=120)
    assert work.taken_over > 10
    assert work.scheduler.num_retractions() > 0
    assert len(groups) == 1 or work.forks_alone > 0
