"""What an engine is doing right now, for people who watch it: its live requests, and what its parents are taken for."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.requests import RequestState, SampleState

Phase = Literal["waiting", "prefill", "decode", "retracted"]


@dataclass(frozen=True)
class LiveRequest:
    """One request in figures. It has neither its text nor its id, which may be its client's secret.

    Attributes:
        phase: "waiting" until a sample of it is started, "prefill" until there is a token, then "decode"; "retracted"
            while it waits to start again, since others got the blocks of all its samples.
        age: seconds since its submission.
        cached_tokens: prompt tokens that came from the prefix cache.
        output_tokens: of all its samples.
        samples: how many continuations it asks for.
    """

    phase: Phase
    age: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    samples: int


@dataclass(frozen=True)
class Activity:
    """One moment between two steps.

    Attributes:
        requests: started requests and then waiting ones, each in order of arrival, and no more of each than asked for.
        parent_uses: int32 [parents], what each parent of the arena is taken for: 0 for nothing; g + 1 where a request
            holds a block of group g; -(g + 1) where blocks of group g are only cached. Groups count as in
            `MemoryReport.groups`.
    """

    requests: tuple[LiveRequest, ...]
    parent_uses: npt.NDArray[np.int32]


def take_activity(
    scheduler: scheduling.Scheduler,
    requests: Iterable[RequestState],
    queued: Collection[str],
    slot_owner: Mapping[int, SampleState],
    max_requests: int,
) -> Activity:
    """The activity of now; called on the loop's thread.

    Args:
        requests: all live ones, in order of arrival.
        queued: ids of those that have not been started.
        slot_owner: the sample that was last admitted to each request slot.
    """
    started: list[RequestState] = []
    waiting: list[RequestState] = []
    for request in requests:
        kind = waiting if request.request_id in queued else started
        if len(kind) < max_requests:
            kind.append(request)
        elif len(started) == len(waiting) == max_requests:
            break
    now = time.monotonic()
    resident = _resident(scheduler, slot_owner)
    listed = [_figures(request, now, _phase(request, resident)) for request in started]
    listed += [_figures(request, now, "waiting") for request in waiting]
    return Activity(tuple(listed), scheduler.lcm_block_uses())


def _resident(scheduler: scheduling.Scheduler, slot_owner: Mapping[int, SampleState]) -> set[str]:
    """Scheduler ids of the samples that hold blocks: the table of a slot is empty when its owner had to leave it."""
    tables = scheduler.block_table_views().values()
    return {
        sample.scheduler_id
        for slot, sample in slot_owner.items()
        if any(slot < len(table) and (table[slot] > 0).any() for table in tables)
    }


def _phase(request: RequestState, resident: Collection[str]) -> Phase:
    running = [sample for sample in request.samples if not sample.finished]
    has_started = any(sample.scheduled_at is not None for sample in running)
    if has_started and not any(sample.scheduler_id in resident for sample in running):
        return "retracted"
    return "decode" if any(sample.token_ids for sample in request.samples) else "prefill"


def _figures(request: RequestState, now: float, phase: Phase) -> LiveRequest:
    output_tokens = sum(len(sample.token_ids) for sample in request.samples)
    return LiveRequest(
        phase=phase,
        age=now - request.submitted_at,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.cached_tokens or 0,
        output_tokens=output_tokens,
        samples=len(request.samples),
    )
