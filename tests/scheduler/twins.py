"""Two schedulers that get the same calls, but for hostile ones, which only the first gets: they must stay equal."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tokenspeed_jax.scheduler import ExecutionEvent, ForwardEvent, Scheduler

from .plan_content import content, gauges
from .scenario import Group, Step, extend_result, make_config, named, spec


class Twins:
    def __init__(self, groups: Sequence[Group], usable: int = 63, **fields: object) -> None:
        config = make_config(groups, usable, **({"enable_kv_cache_events": True} | fields))  # type: ignore[arg-type]
        self.victim, self.undisturbed = Scheduler(config), Scheduler(config)
        self.groups = [group.group_id for group in config.cache_groups]
        self.usable = usable
        self.ids: list[str] = []

    def both(self, call: Callable[[Scheduler], object]) -> None:
        results = [content(call(scheduler)) for scheduler in (self.victim, self.undisturbed)]
        assert results[0] == results[1]

    def submit(self, request_id: str, tokens: Sequence[int], max_new: int = 0) -> None:
        self.ids.append(request_id)
        self.both(lambda scheduler: scheduler.submit_requests([spec(request_id, tokens, max_new)]))

    def plan(self) -> Step:
        plans = [scheduler.next_execution_plan() for scheduler in (self.victim, self.undisturbed)]
        assert content(plans[0]) == content(plans[1])
        return Step(plans[0])

    def advance(self, *events: object) -> None:
        self.both(lambda scheduler: scheduler.advance(batch_of(*events)))

    def land(self, request_id: str, *tokens: int) -> None:
        self.advance(extend_result(request_id, tokens))

    def end(self, kind: type, request_id: str) -> None:
        self.advance(named(kind, request_id))

    def state(self, scheduler: Scheduler) -> list[tuple[str, object]]:
        return gauges(scheduler, self.groups, self.ids)

    def refused(self, error: type[Exception], words: str, call: Callable[[Scheduler], object]) -> None:
        """The victim refuses the call, and nothing that can be asked of it has changed."""
        before = self.state(self.victim)
        with pytest.raises(error, match=words):
            call(self.victim)
        assert self.state(self.victim) == before == self.state(self.undisturbed)

    def ignored(self, call: Callable[[Scheduler], object]) -> None:
        """The victim takes the call, and nothing comes of it."""
        before = self.state(self.victim)
        call(self.victim)
        assert self.state(self.victim) == before == self.state(self.undisturbed)

    def run_out(self, rounds: int = 60) -> None:
        """Plans on, lands and finishes everything in both, comparing every plan; nothing may be held in the end."""
        generated: dict[str, int] = {}
        for _ in range(rounds):
            step = self.plan()
            for row, request_id in enumerate(step.ids):
                extends = row < step.batch.num_extends()
                whole = not extends or step.prefixes[row] + step.inputs[row] == step.batch.prefill_lengths[row]
                self.land(request_id, *([generated.get(request_id, 0)] if whole else []))
                generated[request_id] = generated.get(request_id, 0) + whole
                if generated[request_id] > 4:
                    self.end(ForwardEvent.Finish, request_id)
            self.both(lambda scheduler: scheduler.drain_kv_events())
        assert not self.plan().ids
        self.both(lambda scheduler: scheduler.clear_cache())
        assert self.victim.empty_lcm_blocks() == self.usable
        assert self.state(self.victim) == self.state(self.undisturbed)


def batch_of(*events: object) -> ExecutionEvent:
    batch = ExecutionEvent()
    for event in events:
        batch.add_event(event)  # type: ignore[arg-type]
    return batch


def advance(*events: object) -> Callable[[Scheduler], object]:
    return lambda scheduler: scheduler.advance(batch_of(*events))


def rows(
    slots: Sequence[int], counts: Sequence[int], tokens: Sequence[int], round_number: int = 0
) -> Callable[[Scheduler], object]:
    arrays = [np.array(values, np.int32) for values in (slots, counts, tokens)]
    return lambda scheduler: scheduler.advance_rows(*arrays, round_number)


def finish_rows(*slots: int) -> Callable[[Scheduler], object]:
    return lambda scheduler: scheduler.finish_rows(np.array(slots, np.int32))


def result(request_id: str, tokens: Sequence[int] = (), round_number: int = 0) -> ForwardEvent.ExtendResult:
    event = extend_result(request_id, tokens)
    event.round_number = round_number
    return event
