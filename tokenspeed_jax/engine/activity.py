"""What an engine is doing right now, for people who watch it: its live requests, and what its parents are taken for."""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.requests import RequestState


@dataclass(frozen=True)
class LiveRequest:
    """One request in figures. It has neither its text nor its id, which may be its client's secret.

    Attributes:
        phase: "waiting" until a sample of it is started, "prefill" until there is a token, then "decode".
        age: seconds since its submission.
        cached_tokens: prompt tokens that came from the prefix cache.
        output_tokens: of all its samples.
        samples: how many continuations it asks for.
    """

    phase: Literal["waiting", "prefill", "decode"]
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
    scheduler: scheduling.Scheduler, requests: Iterable[RequestState], queued: Collection[str], max_requests: int
) -> Activity:
    """The activity of now; called on the loop's thread.

    Args:
        requests: all live ones, in order of arrival.
        queued: ids of those that have not been started.
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
    listed = [_figures(request, now, is_queued=False) for request in started]
    listed += [_figures(request, now, is_queued=True) for request in waiting]
    return Activity(tuple(listed), scheduler.lcm_block_uses())


def _figures(request: RequestState, now: float, *, is_queued: bool) -> LiveRequest:
    output_tokens = sum(len(sample.token_ids) for sample in request.samples)
    return LiveRequest(
        phase="waiting" if is_queued else "decode" if output_tokens else "prefill",
        age=now - request.submitted_at,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=request.cached_tokens or 0,
        output_tokens=output_tokens,
        samples=len(request.samples),
    )
