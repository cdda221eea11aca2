"""One worker of a disaggregated pair: a scheduler, its simulated device, and checks of every plan it makes."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed_jax.scheduler import ExecutionEvent, ForwardEvent, Scheduler, SchedulerConfig

from .scenario import Group, Step, extend_result, make_config, named, reserve, spec
from .simulated_device import DeviceRequest, Landing, SimulatedDevice, prefix_identities

P = 4


@dataclass
class Resident:
    """What a request was last seen to hold."""

    slot: int
    tables: list[list[int]]
    in_flight: int = 0
    reserved: bool = False  # its prompt is complete and its first decode step is still to come


@dataclass
class Worker:
    role: SchedulerConfig.Role
    groups: Sequence[Group]
    usable: int
    random: random.Random
    fields: dict[str, object]
    resident: dict[str, Resident] = field(default_factory=dict)
    pending: list[list[Landing]] = field(default_factory=list)  # results by step, oldest first
    live: set[str] = field(default_factory=set)
    hits: int = 0

    def __post_init__(self) -> None:
        self.config = make_config(
            self.groups,
            self.usable,
            **({"P": P, "budget": 16, "role": self.role} | self.fields),  # type: ignore[arg-type]
        )
        self.scheduler, self.twin = Scheduler(self.config), Scheduler(self.config)
        self.width = self.config.decode_input_tokens
        self.device = SimulatedDevice(self.groups, P, self.width, lambda: self.random.randint(1, self.width))

    # Calls, made to the scheduler and to its twin --------------------------------------------------------------------

    def submit(self, request_id: str, tokens: list[int], max_new: int, priority: int) -> None:
        for scheduler in (self.scheduler, self.twin):
            scheduler.submit_requests([spec(request_id, tokens, max_new, priority=priority)])
        self.device.requests[request_id] = DeviceRequest(list(tokens))
        self.live.add(request_id)

    def advance(self, *events: object) -> None:
        batch = ExecutionEvent()
        for event in events:
            batch.add_event(event)  # type: ignore[arg-type]
        for scheduler in (self.scheduler, self.twin):
            scheduler.advance(batch)

    def end(self, request_id: str, event: object) -> None:
        """The request ends by this event, if it has not done so before."""
        self.advance(event)
        self.live.discard(request_id)
        self.resident.pop(request_id, None)

    def retract(self, request_id: str) -> None:
        self.advance(named(ForwardEvent.Retract, request_id))
        self.resident.pop(request_id, None)

    def state(self, request_id: str) -> str:
        """The request's state, read off an event that is refused in every one of them and so changes nothing."""
        try:
            self.scheduler.advance(ExecutionEvent().add_event(reserve(request_id, -1)))
        except ValueError:
            return "Decoding"
        except RuntimeError as error:
            (state,) = re.findall(r"state=tokenspeed::fsm::(\w+)", str(error))
            return state
        return "Finished"

    def quiescent(self, request_id: str) -> bool:
        return request_id in self.resident and self.resident[request_id].in_flight == 0

    # Rounds ----------------------------------------------------------------------------------------------------------

    def plan(self) -> Step:
        """Plans and runs a round."""
        unable = {r for r in self.resident if self.scheduler.pd_transfer_pinned(r) or not self.quiescent(r)}
        retractions = self.scheduler.num_retractions()
        step, twin = Step(self.scheduler.next_execution_plan()), Step(self.twin.next_execution_plan())
        for own, other in ((step, twin), (step.hand_off, twin.hand_off), (step.landing, twin.landing)):
            assert (own is None) == (other is None)
            if own is not None and other is not None:
                assert (own.ids, own.inputs, own.prefixes, own.replays) == (
                    other.ids,
                    other.inputs,
                    other.prefixes,
                    other.replays,
                )
                assert (own.tables, own.zeroed) == (other.tables, other.zeroed)
        if self.scheduler.num_retractions() > retractions:
            self.notice_retractions(unable)
        self.check_limits(step)
        self.check_tables(step)
        self.pending.append(self.device.run(step))
        return step

    def notice_retractions(self, unable: set[str]) -> None:
        for request_id in [r for r in self.resident if self.state(r) == "Retracted"]:
            only_restarts = self.role is SchedulerConfig.Role.P and self.quiescent(request_id)
            assert only_restarts or request_id not in unable, "a request gave way that a step or a peer may touch"
            del self.resident[request_id]

    def land(self, candidates: dict[str, list[int]]) -> list[Landing]:
        """The oldest step's results, as events or as arrays; draft candidates by request go with events only."""
        landed = [landing for landing in self.pending.pop(0) if landing.request_id in self.live]
        events, reserves = ExecutionEvent(), []
        for landing in landed:
            drafts = candidates.get(landing.request_id, []) if landing.tokens else []
            events.add_event(extend_result(landing.request_id, landing.tokens, drafts))
            if landing.request_id in self.resident:
                self.resident[landing.request_id].in_flight -= 1
            if landing.is_decode:
                reserves.append(reserve(landing.request_id, len(landing.tokens)))
        self.scheduler.advance(events)
        if candidates:
            self.twin.advance(events)
        else:
            columns = ([row.slot for row in landed], [len(row.tokens) for row in landed])
            tokens = [token for row in landed for token in row.tokens]
            self.twin.advance_rows(*(np.array(values, np.int32) for values in (*columns, tokens)))
        self.advance(*reserves)
        return landed

    def check_nothing_held(self) -> None:
        for scheduler in (self.scheduler, self.twin):
            scheduler.next_execution_plan()
            assert scheduler.waiting_size() == scheduler.prefilling_size() == scheduler.decoding_size() == 0
            assert scheduler.bootstrapping_size() == scheduler.pd_transfer_size() == 0
            assert (scheduler.active_lcm_blocks(), scheduler.available_lcm_blocks()) == (0, self.usable)
            assert scheduler.clear_cache()
            assert scheduler.empty_lcm_blocks() == self.usable

    # Checks ----------------------------------------------------------------------------------------------------------

    def check_limits(self, step: Step) -> None:
        remote = [] if step.hand_off is None else step.hand_off.ids
        remote = remote if step.landing is None else [*remote, *step.landing.ids]
        assert len({*step.ids, *remote}) == len(step.ids) + len(remote)
        assert len(step.ids) <= self.config.max_batch_size
        extends = step.batch.num_extends()
        assert sum(step.inputs[:extends]) <= self.config.max_scheduled_tokens
        assert all(length == self.width for length in step.inputs[extends:])
        if self.role is SchedulerConfig.Role.P:
            assert extends == len(step.ids)
            assert step.landing is None
        else:
            assert step.hand_off is None
            assert extends == 0 or (len(step.ids) == 1 and step.landing is None), "a recovery runs alone"
            assert step.landing is None or len(step.landing.ids) == 1
        ends = [step.prefixes[row] + step.inputs[row] for row in range(extends)]
        truncated = [row for row in range(extends) if ends[row] < step.batch.prefill_lengths[row]]
        assert truncated in ([], [extends - 1])
        if any(group.state for group in self.groups):
            assert all(ends[row] % P == 0 for row in truncated), "a chunk ends where no snapshot can be shared"

    def check_tables(self, step: Step) -> None:
        fresh: dict[str, list[int]] = {}
        for batch in (step, step.hand_off, step.landing):
            for row in range(0 if batch is None else len(batch.ids)):
                assert batch is not None
                self.check_row(batch, row, runs_here=batch is step, fresh=fresh)
        assert {name: sorted(blocks) for name, blocks in fresh.items() if blocks} == {
            name: sorted(blocks) for name, blocks in step.zeroed.items() if blocks
        }
        slots = [request.slot for request in self.resident.values()]
        assert len(set(slots)) == len(slots)
        self.check_sharing()

    def check_row(self, batch: Step, row: int, runs_here: bool, fresh: dict[str, list[int]]) -> None:
        request_id, slot = batch.ids[row], batch.batch.request_pool_indices[row]
        extends = row < batch.batch.num_extends()
        tables = [batch.row(request_id, group) for group in range(len(self.groups))]
        seen = self.resident.get(request_id)
        hit = batch.prefixes[row] + batch.replays[row] if extends else 0
        if seen is None:
            assert extends
            assert hit % P == 0
            self.hits += hit
            assert 1 <= slot <= self.config.max_batch_size
        else:
            assert slot == seen.slot
        for group, table in enumerate(tables):
            if seen is not None:
                held = len(seen.tables[group])
            else:
                held = 0 if self.groups[group].replayable else hit // self.device.granularity(group)
            assert len(table) >= held
            assert extends or seen is None or not seen.reserved or len(table) == held, "the first decode was reserved"
            fresh.setdefault(f"g{group}", []).extend(block for block in table[held:] if block > 0)
        whole = extends and batch.prefixes[row] + batch.inputs[row] == batch.batch.prefill_lengths[row]
        in_flight = (0 if seen is None else seen.in_flight) + runs_here
        self.resident[request_id] = Resident(slot, tables, in_flight, reserved=whole)

    def check_sharing(self) -> None:
        holders: dict[tuple[int, int], tuple[int, int | None]] = {}
        for request_id, resident in self.resident.items():
            identities = prefix_identities(self.device.requests[request_id].tokens)
            for group, table in enumerate(resident.tables):
                g = self.device.granularity(group)
                for slot, block in enumerate(table):
                    if block <= 0:
                        continue
                    end = (slot + 1) * g
                    shared = end <= len(identities) and not self.groups[group].replayable
                    meaning = (slot, identities[end - 1] if shared else None)
                    other = holders.setdefault((group, block), meaning)
                    assert other is meaning or (other == meaning and other[1] is not None), "shared without a hit"
