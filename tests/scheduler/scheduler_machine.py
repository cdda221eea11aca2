"""A scheduler that hypothesis calls as it likes, and a deliberately simple model that says what may be read.

The model of the cache is a dictionary from (group, block, row) to the whole token prefix, with salt and weights, that
the row was computed from. It knows nothing of hits, eviction or tables: a forward writes what it is told to write, and
whatever it reads must be its own prefix.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed_jax.scheduler import ForwardEvent, Scheduler, SchedulerConfig

from .plan_content import gauges
from .scenario import FULL, STATE, Group, Step, extend_result, make_config, named, replayable, reserve, spec, swa
from .twins import advance, finish_rows, result, rows

P = 4
# Most begin alike, so that prefixes are shared.
PROMPTS = st.builds(
    lambda shared, own: [0] * shared + own, st.integers(0, 12), st.lists(st.integers(0, 1), min_size=1, max_size=6)
)
WHICH = st.integers(0, 11)  # the rest of its division by the number of things says which of them
MET: Counter[str] = Counter()  # what the runs have come upon
NAMES = [f"r{number}" for number in range(8)]
GROUP_SETS: list[tuple[Group, ...]] = [
    (FULL, swa(4), STATE),
    (Group(granularity=2, packing=3), swa(5), swa(9, granularity=2, packing=2), Group(granularity=2, state=True)),
    (FULL, swa(6), replayable(5, granularity=2, packing=2)),
    (Group(packing=4, shards=2), Group(packing=2, state=True)),
    (swa(3), STATE),
]


def chosen[T: (str, int, tuple)](which: int, things: Iterable[T]) -> T:
    ordered = sorted(things)
    return ordered[which % len(ordered)]


@dataclass(frozen=True)
class Out:
    """A row whose result is still to come."""

    round_number: int
    slot: int
    count: int  # tokens
    decodes: bool
    ran: bool = True  # otherwise no result will come


@dataclass
class Model:
    """One request as the device and the host see it."""

    identity: str
    tokens: list[int]  # prompt and everything sampled
    landed: int  # of these tokens, those that the scheduler has been told
    stop: int
    prompt: int = 0
    out: deque[Out] = field(default_factory=deque)

    @property
    def landable(self) -> bool:
        return bool(self.out) and self.out[0].ran

    def prefix(self, count: int) -> tuple[object, ...]:
        return (self.identity, *self.tokens[:count])


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Model] = {}
        self.late: list[tuple[str, int, list[int]]] = []  # results of rows whose request has ended
        self.memory: dict[tuple[int, int, int], tuple[object, ...]] = {}
        self.weights = "w0"

    @initialize(
        groups=st.sampled_from(GROUP_SETS),
        usable=st.integers(9, 24),
        budget=st.integers(14, 30),
        width=st.integers(1, 3),
        overlap=st.integers(0, 1),
        mixed=st.booleans(),
        batch=st.integers(1, 5),
    )
    def build(
        self, groups: tuple[Group, ...], usable: int, budget: int, width: int, overlap: int, mixed: bool, batch: int
    ) -> None:
        self.start(
            groups,
            usable,
            budget=budget,
            decode_input_tokens=width,
            overlap_schedule_depth=overlap,
            enable_mixed_prefill_decode=mixed,
            max_batch_size=batch,
        )

    def start(self, groups: Sequence[Group], usable: int, *, budget: int, **fields: object) -> None:
        self.groups, self.usable = groups, usable
        fields |= {"enable_kv_cache_events": True, "max_kv_events": 16}
        self.config: SchedulerConfig = make_config(groups, usable, P=P, budget=budget, **fields)
        self.width, self.overlap = self.config.decode_input_tokens, self.config.overlap_schedule_depth
        self.scheduler = Scheduler(self.config)
        self.published: set[int] = set()

    # Right calls ----------------------------------------------------------------------------------------------------

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        new=st.integers(2, 18),
        declared=st.sampled_from([False, False, False, True]),
        salt=st.sampled_from(["", "", "salt"]),
        priority=st.integers(-1, 1),
    )
    def submit(self, prompts: list[list[int]], new: int, declared: bool, salt: str, priority: int) -> None:
        for tokens in prompts:
            self.submit_one(tokens, new, declared, salt, priority)

    def submit_one(self, tokens: list[int], new: int, declared: bool, salt: str, priority: int) -> None:
        tail = self.width * (1 + self.overlap)
        new = min(new, self.scheduler.max_single_request_tokens() - len(tokens) - tail)
        if new < 1:
            return
        room = new + tail
        # Ids are used again as soon as they may be.
        free = [name for name in NAMES if name not in self.live and self.scheduler.request_token_size(name) < 0]
        if not free:
            return
        request_id = free[0]
        specification = spec(request_id, tokens, room if declared else 0, cache_salt=salt, priority=priority)
        self.scheduler.submit_requests([specification])
        self.live[request_id] = Model(
            f"{salt}/{self.weights}", list(tokens), len(tokens), len(tokens) + new, len(tokens)
        )

    def may_plan(self) -> bool:
        return all(len(request.out) <= self.overlap for request in self.live.values())

    @precondition(lambda self: self.may_plan())
    @rule(accepted=st.integers(1, 3))
    def plan(self, accepted: int) -> None:
        self.execute(accepted)

    def execute(self, accepted: int) -> None:
        retractions = self.scheduler.num_retractions()
        step = Step(self.scheduler.next_execution_plan())
        MET["retractions"] += self.scheduler.num_retractions() - retractions
        MET["rows"] += len(step.ids)
        MET["plans"] += 1
        assert len(set(step.ids)) == len(step.ids) <= self.config.max_batch_size
        assert sum(step.inputs) <= self.config.max_scheduled_tokens
        runs = self.make_ready(step)
        for row, request_id in enumerate(step.ids):
            decodes = row >= step.batch.num_extends()
            count = 0
            if runs:
                count = self.decode(step, row, accepted) if decodes else self.prefill(step, row)
            slot = step.batch.request_pool_indices[row]
            self.live[request_id].out.append(Out(step.plan.round_number, slot, count, decodes, runs))

    @precondition(lambda self: self.live)
    @rule(rounds=st.integers(1, 12), accepted=st.integers(1, 3))
    def run(self, rounds: int, accepted: int) -> None:
        """What an executor does most of the time."""
        for _ in range(rounds):
            self.land_all()
            self.execute(accepted)

    @precondition(lambda self: any(request.landable for request in self.live.values()))
    @rule(which=WHICH, named_round=st.booleans(), as_row=st.booleans())
    def land(self, which: int, named_round: bool, as_row: bool) -> None:
        """The oldest row of any request, in any of the forms that results have."""
        request_id = chosen(which, (name for name, model in self.live.items() if model.landable))
        request = self.live[request_id]
        row = request.out.popleft()
        tokens = request.tokens[request.landed : request.landed + row.count]
        if as_row:
            # With a round this would be all results of the plan; others may still have theirs out.
            rows([row.slot], [row.count], tokens)(self.scheduler)
        else:
            # Results that name no round come in order, those of an earlier request of the id first.
            named_round = named_round or self.num_late(request_id) > 0
            advance(result(request_id, tokens, row.round_number if named_round else 0))(self.scheduler)
        request.landed += row.count
        if request.landed >= request.stop:
            self.finish(request_id, row.slot if as_row else None)
        elif row.decodes:
            advance(reserve(request_id, row.count))(self.scheduler)

    def forceable(self) -> list[str]:
        """Requests whose next result may bring forced tokens."""
        if self.width > 1 or not self.config.enable_mixed_prefill_decode:
            return []
        return [
            name for name, model in self.live.items() if len(model.out) == 1 and model.landable and model.out[0].count
        ]

    @precondition(lambda self: self.forceable())
    @rule(which=WHICH, count=st.integers(1, 9))
    def land_forced(self, which: int, count: int) -> None:
        """What a row drew, and output that is certain to follow."""
        MET["forced"] += 1
        request_id = chosen(which, self.forceable())
        request = self.live[request_id]
        row = request.out.popleft()
        room = self.scheduler.max_single_request_tokens() - len(request.tokens)
        event = result(request_id, request.tokens[request.landed :], row.round_number)
        event.forced_tokens = [index % 2 for index in range(min(count, room))]
        advance(event)(self.scheduler)
        request.tokens += event.forced_tokens
        request.landed = len(request.tokens)
        if request.landed >= request.stop:
            self.finish(request_id, None)

    def num_late(self, request_id: str) -> int:
        return sum(late_id == request_id for late_id, _, _ in self.late)

    def finish(self, request_id: str, slot: int | None) -> None:
        if slot is None:
            advance(named(ForwardEvent.Finish, request_id))(self.scheduler)
        else:
            finish_rows(slot)(self.scheduler)
        self.forget(request_id)

    def forget(self, request_id: str) -> None:
        request = self.live.pop(request_id)
        for row in request.out:
            self.late.append((request_id, row.round_number, [0] * row.count))

    @precondition(lambda self: self.live)
    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        request_id = chosen(which, self.live)
        advance(named(ForwardEvent.Abort, request_id))(self.scheduler)
        self.forget(request_id)

    @precondition(lambda self: any(request.out for request in self.live.values()))
    @rule(which=WHICH)
    def retract(self, which: int) -> None:
        """The executor has not run what is out: no result will come, and what was sampled never was."""
        self.start_again(chosen(which, (name for name, model in self.live.items() if model.out)))

    def start_again(self, request_id: str) -> None:
        request = self.live[request_id]
        request.out.clear()
        del request.tokens[request.landed :]
        advance(named(ForwardEvent.Retract, request_id))(self.scheduler)

    @precondition(lambda self: self.late)
    @rule(named_round=st.booleans())
    def late_result(self, named_round: bool) -> None:
        MET["late"] += 1
        request_id, round_number, tokens = self.late.pop(0)
        before = self.state()
        advance(result(request_id, tokens, round_number if named_round else 0))(self.scheduler)
        assert self.state() == before

    @rule()
    def clear(self) -> None:
        clearable = self.scheduler.can_clear_cache()
        assert self.scheduler.clear_cache() == clearable
        if clearable:
            self.note_clear()

    def note_clear(self) -> None:
        self.drain()
        assert not self.published

    @rule(weights=st.sampled_from(["w0", "w1"]))
    def new_weights(self, weights: str) -> None:
        self.weights = weights
        self.scheduler.set_weight_version(weights)

    @rule()
    def drain(self) -> None:
        for event in self.scheduler.drain_kv_events():
            (hash_,) = event.block_hashes
            if event.kind == "BlockStored":
                assert hash_ not in self.published
                self.published.add(hash_)
            else:
                self.published.remove(hash_)

    # Wrong calls ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(which=WHICH, kind=st.sampled_from(["one too many", "long", "reserve", "round", "slot", "submission"]))
    def hostile(self, which: int, kind: str) -> None:
        request_id = chosen(which, self.live)
        late = self.num_late(request_id)
        out = len(self.live[request_id].out) + late
        if kind == "long" and late:
            return  # whatever comes for a row that nobody waits for is dropped
        call = {
            "one too many": advance(*[extend_result(request_id)] * (out + 1)),
            "long": advance(extend_result(request_id, [0] * 50)),
            "reserve": advance(reserve(request_id, [-1, 31, 2**31 - 1][which % 3])),
            "round": advance(result(request_id, [], 10**9)),
            "slot": rows([[-1, 0, 99][which % 3]], [0], []),
            "submission": lambda scheduler: scheduler.submit_requests([spec("new", [1]), spec(request_id, [1])]),
        }[kind]
        MET["hostile"] += 1
        before = self.state()
        with pytest.raises((ValueError, RuntimeError)):
            call(self.scheduler)
        assert self.state() == before

    def state(self) -> list[tuple[str, object]]:
        return gauges(self.scheduler, [f"g{index}" for index in range(len(self.groups))], sorted(self.live))

    # The device -----------------------------------------------------------------------------------------------------

    def granularity(self, group: int) -> int:
        return self.groups[group].granularity or P

    def make_ready(self, step: Step) -> bool:
        """What comes before the forward of a plan; whether that can run."""
        self.zero(step)
        return True

    def zero(self, step: Step) -> None:
        for name, blocks in step.zeroed.items():
            for block, row in itertools.product(blocks, range(self.granularity(int(name[1:])))):
                self.memory.pop((int(name[1:]), block, row), None)

    def write(self, group: int, table: list[int], position: int, content: tuple[object, ...]) -> None:
        g = self.granularity(group)
        assert table[position // g] > 0
        self.memory[group, table[position // g], 0 if self.groups[group].state else position % g] = content

    def read(self, group: int, table: list[int], position: int) -> tuple[object, ...]:
        g = self.granularity(group)
        assert table[position // g] > 0
        return self.memory[group, table[position // g], 0 if self.groups[group].state else position % g]

    def forward(
        self, step: Step, request_id: str, begin: int, end: int, *, replay: int = 0, boundary: int = 0, drafts: int = 0
    ) -> None:
        """Computes [begin, end), feeding `replay` tokens before it again; drafts up to `drafts` turn out to be rubbish.

        Snapshots are taken at the end and at `boundary`, if that lies in between.
        """
        request = self.live[request_id]
        for index, group in enumerate(self.groups):
            table = step.row(request_id, index)
            if group.state:
                assert begin == 0 or self.read(index, table, begin - 1) == request.prefix(begin)
                for position in range(begin, drafts):
                    self.write(index, table, position, ("rubbish",))
                for snapshot in (boundary, end) if begin < boundary < end else (end,):
                    self.write(index, table, snapshot - 1, request.prefix(snapshot))
                continue
            for position in range(begin - (replay if group.replayable else 0), end):
                self.write(index, table, position, request.prefix(position + 1))
            for position in range(end, drafts):
                self.write(index, table, position, ("rubbish",))
            first = 0 if group.window is None else max(0, begin - group.window + 1)
            for position in range(first, end):
                assert self.read(index, table, position) == request.prefix(position + 1), "a foreign row was read"

    def prefill(self, step: Step, row: int) -> int:
        request = self.live[step.ids[row]]
        start, end = step.prefixes[row], step.prefixes[row] + step.inputs[row]
        offset = sum(step.inputs[:row])
        assert step.batch.input_ids[offset : offset + step.inputs[row]] == request.tokens[start:end]
        replay = step.replays[row]
        MET["hits"] += start > 0 and not request.out
        self.forward(step, step.ids[row], start + replay, end, replay=replay, boundary=end - end % P)
        if end < step.batch.prefill_lengths[row]:
            return 0
        request.tokens.append(len(request.tokens) % 3)
        return 1

    def decode(self, step: Step, row: int, accepted: int) -> int:
        request_id, request = step.ids[row], self.live[step.ids[row]]
        begin, count = len(request.tokens) - 1, min(accepted, self.width)
        request.tokens += [(len(request.tokens) + index) % 3 for index in range(count)]
        self.forward(step, request_id, begin, begin + count, drafts=begin + self.width)
        return count

    # Always ---------------------------------------------------------------------------------------------------------

    @invariant()
    def sizes_are_what_was_landed(self) -> None:
        for request_id, request in self.live.items():
            assert self.scheduler.request_token_size(request_id) == request.landed

    @invariant()
    def every_parent_is_counted_once(self) -> None:
        uses = self.scheduler.lcm_block_uses()
        assert uses.shape == (self.usable,)
        assert (uses == 0).sum() == self.scheduler.empty_lcm_blocks()
        assert (uses > 0).sum() == self.scheduler.active_lcm_blocks()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(500):
            if not self.live:
                break
            self.settle()
            self.execute(accepted=1)
        assert not self.live, "everybody finishes"
        for _ in range(3):  # a finish may have copies to start, which only the next plan tells of
            self.execute(accepted=1)
            self.settle()
        assert (self.scheduler.active_lcm_blocks(), self.scheduler.available_lcm_blocks()) == (0, self.usable)
        assert self.scheduler.clear_cache()
        assert self.scheduler.empty_lcm_blocks() == self.usable

    def settle(self) -> None:
        """Brings in everything that is out."""
        self.land_all()

    def land_all(self) -> None:
        for request_id in list(self.live):
            self.land_out(request_id)

    def land_out(self, request_id: str) -> None:
        """All results of a request, in order."""
        request = self.live[request_id]
        while request_id in self.live and request.landable:
            row = request.out.popleft()
            tokens = request.tokens[request.landed : request.landed + row.count]
            advance(result(request_id, tokens, row.round_number))(self.scheduler)
            request.landed += row.count
            if request.landed >= request.stop:
                self.finish(request_id, None)
            elif row.decodes:
                advance(reserve(request_id, row.count))(self.scheduler)
