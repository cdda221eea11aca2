"""A random workload over two schedulers and a simulated device, with every plan checked."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed_jax.scheduler import ExecutionEvent, ForwardEvent, RequestSpec, Scheduler

from .scenario import Group, Step, extend_result, make_config, named, reserve, spec
from .simulated_device import DeviceRequest, Landing, SimulatedDevice, prefix_identities
from .simulated_tiers import load_backs, write_backs
from .table_follower import TableFollower

P = 4


@dataclass
class Live:
    """What the host knows of a request."""

    tokens: list[int]  # prompt and landed output
    prompt: int
    stop_after: int  # generated tokens
    most: int  # tokens that its tables may ever cover
    tables: list[list[int]] | None = None  # None while it holds no cache
    slot: int | None = None
    in_flight: int = 0
    end: int = -1  # of its last chunk; -1 once it decodes
    reserved: bool = False  # its prompt is complete and its first decode step is still to come
    family: str | None = None  # of those that take over each other's blocks


@dataclass
class RowArrays:
    """A step's results as `advance_rows` and `finish_rows` take them."""

    slots: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def add(self, slot: int, tokens: Sequence[int]) -> None:
        self.slots.append(slot)
        self.counts.append(len(tokens))
        self.tokens += tokens

    def land(self, scheduler: Scheduler, round_number: int) -> None:
        slots, counts, tokens, finished = (
            np.array(values, np.int32) for values in (self.slots, self.counts, self.tokens, self.finished)
        )
        scheduler.advance_rows(slots, counts, tokens, round_number)
        scheduler.finish_rows(finished)


class Workload:
    def __init__(self, groups: Sequence[Group], usable: int, seed: int, **fields: object) -> None:
        self.random = random.Random(seed)
        self.groups = groups
        self.usable = usable
        self.config = make_config(groups, usable, **({"P": P, "budget": 16} | fields))  # type: ignore[arg-type]
        self.width = self.config.decode_input_tokens
        self.depth = self.config.overlap_schedule_depth
        # Both get every call, results as events the one and as arrays the other, which writes no dense tables either;
        # their plans must be equal.
        sparse = make_config(groups, usable, **({"P": P, "budget": 16} | fields))  # type: ignore[arg-type]
        sparse.dense_block_tables = False
        self.schedulers = [Scheduler(self.config), Scheduler(sparse)]
        self.follower = TableFollower(self.schedulers[1])
        self.device = SimulatedDevice(groups, P, self.width, lambda: self.random.randint(1, self.width))
        self.priorities: Sequence[int] = (0,)  # of new requests
        self.live: dict[str, Live] = {}
        self.pending: list[tuple[int, list[Landing]]] = []  # round and results of each step, oldest first
        self.submitted = 0
        self.hits = 0
        self.takers: set[str] = set()  # requests whose first row in this step takes over another one's blocks

    @property
    def scheduler(self) -> Scheduler:
        return self.schedulers[0]

    def submit(self, prompt: int | None = None, new: int | None = None, declared: bool | None = None) -> bool:
        """A random request, or one of the given size; False when it is over the pool's limit."""
        prompt = self.random.randint(1, 24) if prompt is None else prompt
        new = self.random.randint(1, 12) if new is None else new
        # The last steps may write a whole width past the last token that is kept, one of them already planned.
        room = new + self.width * (1 + self.depth)
        if prompt + room > self.scheduler.max_single_request_tokens():
            return False
        declared = self.random.random() < 0.7 if declared is None else declared
        # Few distinct tokens and a common start make prefixes coincide.
        tokens = [0] * self.random.randint(0, prompt) if self.random.random() < 0.7 else []
        tokens += [self.random.randint(0, 1) for _ in range(prompt - len(tokens))]
        self.enter([self.describe(tokens, new, room if declared else 0)])
        return True

    def describe(self, tokens: Sequence[int], new: int, max_new: int, **fields: object) -> RequestSpec:
        """The next request's spec; it is known from now on and has to be entered."""
        request_id = f"r{self.submitted}"
        self.submitted += 1
        room = new + self.width * (1 + self.depth)
        self.live[request_id] = Live(list(tokens), len(tokens), new, len(tokens) + room + self.width)
        self.device.requests[request_id] = DeviceRequest(list(tokens))
        return spec(request_id, tokens, max_new, priority=self.random.choice(self.priorities), **fields)

    def enter(self, specs: Sequence[RequestSpec]) -> None:
        for scheduler in self.schedulers:
            scheduler.submit_requests(specs)

    def advance(self, *events: object) -> None:
        batch = ExecutionEvent()
        for event in events:
            batch.add_event(event)  # type: ignore[arg-type]
        for scheduler in self.schedulers:
            scheduler.advance(batch)

    def state(self, request_id: str) -> str:
        """The request's state, read off an event that is refused in every one of them and so changes nothing."""
        probe = ExecutionEvent().add_event(reserve(request_id, -1))
        try:
            self.scheduler.advance(probe)
        except ValueError:
            return "Decoding"
        except RuntimeError as error:
            (state,) = re.findall(r"state=tokenspeed::fsm::(\w+)", str(error))
            return state
        return "Finished"

    # Rounds ---------------------------------------------------------------------------------------------------------

    def round(self) -> Step:
        """Plans, runs, and lands all but the steps that may stay out."""
        step = self.plan()
        while len(self.pending) > (self.depth if step.ids else 0):
            self.land()
        return step

    def plan(self) -> Step:
        retractions = self.scheduler.num_retractions()
        step, twin = Step(self.scheduler.next_execution_plan()), self.schedulers[1].next_execution_plan()
        (batch,) = twin.forward
        assert (step.ids, step.inputs, step.prefixes) == (
            batch.request_ids,
            batch.input_lengths,
            batch.extend_prefix_lens,
        )
        assert step.replays == batch.extend_replay_lens
        assert (step.tables, step.zeroed) == (self.follower.follow(twin), twin.pages_to_zero)
        assert step.copied == twin.pages_to_copy
        assert (write_backs(step), load_backs(step)) == (write_backs(twin), load_backs(twin))
        if self.scheduler.num_retractions() > retractions:
            self.notice_readmissions(step)
        self.takers = self.find_takers(step)
        self.check_limits(step)
        self.check_tables(step)
        for request_id in step.ids:
            self.live[request_id].in_flight += 1
        self.execute(step)
        return step

    def execute(self, step: Step) -> None:
        self.pending.append((step.plan.round_number, self.device.run(step)))

    def settle(self) -> None:
        """What must happen after the last request, before everything is back."""

    def notice_readmissions(self, step: Step) -> None:
        """Requests that gave way in this very round and were then granted what another one gave up."""
        for row in range(step.batch.num_extends()):
            request = self.live[step.ids[row]]
            continues = step.prefixes[row] + step.replays[row] == request.end
            if not continues or step.batch.request_pool_indices[row] != request.slot:
                assert request.tables is None or request.in_flight == 0
                request.tables = request.slot = None

    def find_takers(self, step: Step) -> set[str]:
        """Whoever of this step takes over another one's blocks; nobody does unless a workload forks."""
        del step
        return set()

    def land(self) -> None:
        """The oldest step's results; requests that have enough end."""
        results, rows = ExecutionEvent(), RowArrays()
        reserves: list[object] = []
        round_number, landings = self.pending.pop(0)
        for landing in landings:
            request_id, tokens = landing.request_id, landing.tokens
            results.add_event(extend_result(request_id, tokens))
            request = self.live.get(request_id)
            if request is None:
                continue  # ended while its last step was out
            rows.add(landing.slot, tokens)
            request.in_flight -= 1
            request.tokens += tokens
            if len(request.tokens) - request.prompt >= request.stop_after:
                results.add_event(named(ForwardEvent.Finish, request_id))
                rows.finished.append(landing.slot)
                del self.live[request_id]
            elif landing.is_decode:
                reserves.append(reserve(request_id, len(tokens)))
        by_event, by_row = self.schedulers
        by_event.advance(results)
        rows.land(by_row, round_number)
        self.advance(*reserves)

    def disturb(self) -> None:
        """Now and then somebody gives up, or is told to start again."""
        for request_id, request in list(self.live.items()):
            if self.random.random() < 0.02:
                self.advance(named(ForwardEvent.Abort, request_id))
                del self.live[request_id]
            elif self.random.random() < 0.02 and request.tables is not None and request.in_flight == 0:
                self.advance(named(ForwardEvent.Retract, request_id))
                request.tables = request.slot = None

    def drain(self, rounds: int) -> None:
        """Runs until everybody has finished, and checks that everything has come back."""
        for _ in range(rounds):
            if not self.live:
                break
            self.round()
        assert not self.live, f"still live: { ({r: self.state(r) for r in self.live}) }"
        while self.pending:
            self.land()
        self.settle()
        for scheduler in self.schedulers:
            scheduler.next_execution_plan()
            assert scheduler.waiting_size() == scheduler.prefilling_size() == scheduler.decoding_size() == 0
            assert (scheduler.active_lcm_blocks(), scheduler.available_lcm_blocks()) == (0, self.usable)
            assert scheduler.clear_cache()
            assert scheduler.empty_lcm_blocks() == self.usable

    # Checks ---------------------------------------------------------------------------------------------------------

    def check_limits(self, step: Step) -> None:
        assert len(set(step.ids)) == len(step.ids) <= self.config.max_batch_size
        assert sum(step.inputs) <= self.config.max_scheduled_tokens
        extends = step.batch.num_extends()
        if not self.config.enable_mixed_prefill_decode:
            assert extends in (0, len(step.ids))
        ends = [step.prefixes[row] + step.inputs[row] for row in range(extends)]
        assert all(ends[row] <= step.batch.prefill_lengths[row] for row in range(extends))
        truncated = [row for row in range(extends) if ends[row] < step.batch.prefill_lengths[row]]
        assert truncated in ([], [extends - 1])
        replay_window = max((group.window or 0 for group in self.groups if group.replayable), default=0)
        for row in range(extends):
            takes_over = step.ids[row] in self.takers
            first = self.live[step.ids[row]].tables is None and not takes_over
            begin = step.prefixes[row] + step.replays[row]
            assert step.replays[row] == (min(replay_window, begin) if first else 0)
            # The end of a prompt in several chunks recomputes a whole window.
            assert first or takes_over or row in truncated or step.inputs[row] >= replay_window
        if any(group.state for group in self.groups):
            assert all(ends[row] % P == 0 for row in truncated), "a chunk ends where no snapshot can be shared"
        assert all(length == self.width for length in step.inputs[extends:])

    def check_tables(self, step: Step) -> None:
        """Growth, request slots and zeroing of the plan's rows; sharing among all who hold cache."""
        fresh: dict[str, list[int]] = {}
        copied = {(name, destination) for name, copies in step.copied.items() for _, destination in copies}
        for row, request_id in enumerate(step.ids):
            request = self.live[request_id]
            tables = [step.row(request_id, group) for group in range(len(self.groups))]
            first = request.tables is None
            if first:
                assert row < step.batch.num_extends()
                hit = step.prefixes[row] + step.replays[row]
                takes_over = request_id in self.takers
                assert takes_over or hit % P == 0
                # The last tokens of a prompt are always computed.
                recomputed = max(self.config.prefix_replay_tokens, 1)
                assert hit <= max(step.batch.prefill_lengths[row] - recomputed, 0)
                self.hits += hit
                request.slot = step.batch.request_pool_indices[row]
                assert 1 <= request.slot <= self.config.max_batch_size
            assert request.slot == step.batch.request_pool_indices[row]
            for group, table in enumerate(tables):
                if request.tables is not None:
                    held = len(request.tables[group])
                else:
                    matched = takes_over or not self.groups[group].replayable
                    held = 0 if not matched else hit // self.device.granularity(group)
                assert len(table) >= held
                # With a width above 1 and a step ahead, every pause of a request leaves a width of slack behind.
                if self.width == 1 or self.depth == 0:
                    # A snapshot has a whole block to move on to.
                    growth = self.device.granularity(group) if self.groups[group].state else 0
                    assert len(table) <= -(-(request.most + growth) // self.device.granularity(group))
                assert not (request.reserved and row >= step.batch.num_extends()) or len(table) == held
                acquired = [block for block in table[held:] if block > 0 and (f"g{group}", block) not in copied]
                fresh.setdefault(f"g{group}", []).extend(acquired)
            request.tables = tables
            end = step.prefixes[row] + step.inputs[row] if row < step.batch.num_extends() else 0
            request.end = end or -1
            request.reserved = end == step.batch.prefill_lengths[row]
        assert {name: sorted(blocks) for name, blocks in fresh.items() if blocks} == {
            name: sorted(blocks) for name, blocks in step.zeroed.items() if blocks
        }
        for request_id, request in self.live.items():
            if request.tables is not None and self.state(request_id) == "Retracted":
                assert request.in_flight == 0
                request.tables = request.slot = None
        self.check_sharing()

    def sharers(self, request: Live, group: int) -> str | None:
        """Among whom blocks of the group are shared: everybody, unless they are never matched."""
        return request.family if self.groups[group].replayable else None

    def check_sharing(self) -> None:
        holders: dict[tuple[int, int], tuple[int, object]] = {}
        slots: set[int | None] = set()
        for request in self.live.values():
            if request.tables is None:
                continue
            assert request.slot not in slots
            slots.add(request.slot)
            identities = prefix_identities(request.tokens)
            for group, table in enumerate(request.tables):
                g = self.device.granularity(group)
                for slot, block in enumerate(table):
                    if block <= 0:
                        continue
                    end = (slot + 1) * g
                    shared = end <= len(identities) and (not self.groups[group].replayable or request.family)
                    meaning = (slot, (self.sharers(request, group), identities[end - 1]) if shared else None)
                    other = holders.setdefault((group, block), meaning)
                    assert other is meaning or (other == meaning and other[1] is not None), "shared without a hit"


def run_mixed_load(work: Workload, requests: int) -> None:
    attempts = 0
    while work.submitted < requests and attempts < 50 * requests:
        attempts += 1
        if len(work.live) < 8:
            work.submit()
        if work.random.random() < 0.7:
            work.round()
        work.disturb()
    work.drain(rounds=5000)
