"""Landing: a step's outputs become tokens, stop decisions and deltas, and events for the scheduler.

A late stop costs one wasted row: the next step may already be in flight with the sample's row in it, and what that
row drew is dropped here.
"""

from collections.abc import Sequence

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.batch import ScheduledRow
from tokenspeed_jax.engine.outputs import RequestDelta, TopLogprobs
from tokenspeed_jax.engine.requests import SampleState
from tokenspeed_jax.engine.step import StepOutputs
from tokenspeed_jax.engine.stop import StopUpdate


def extend_result(scheduler_id: str, tokens: list[int]) -> scheduling.ForwardEvent.ExtendResult:
    """The scheduler's event for one landed row."""
    event = scheduling.ForwardEvent.ExtendResult()
    event.request_id = scheduler_id
    event.tokens = tokens
    return event


def finish(scheduler_id: str) -> scheduling.ForwardEvent.Finish:
    """The scheduler's event for a sample that ended normally."""
    event = scheduling.ForwardEvent.Finish()
    event.request_id = scheduler_id
    return event


def land(
    rows: Sequence[ScheduledRow], outputs: StepOutputs
) -> tuple[scheduling.ExecutionEvent, list[tuple[SampleState, RequestDelta]]]:
    """What one landed step means.

    Returns:
        The events to advance the scheduler by, and the deltas to deliver after that.
    """
    events = scheduling.ExecutionEvent()
    deltas = []
    for index, row in enumerate(rows):
        sample = row.sample
        if sample.finished:
            continue
        if not row.produces_token:
            events.add_event(extend_result(sample.scheduler_id, []))
            continue
        token = int(outputs.tokens[index])
        sample.token_ids.append(token)
        update = sample.stop.push(token)
        events.add_event(extend_result(sample.scheduler_id, [token]))
        if update.finish_reason is not None:
            sample.finished = True
            events.add_event(finish(sample.scheduler_id))
        deltas.append((sample, _delta(sample, token, update, outputs, index)))
    return events, deltas


def _delta(sample: SampleState, token: int, update: StopUpdate, outputs: StepOutputs, index: int) -> RequestDelta:
    params = sample.params
    if not params.logprobs:
        return sample.delta([token], update.text_delta, update.finish_reason, update.stop_reason)
    top: list[TopLogprobs] | None = None
    if params.top_logprobs:
        ids = outputs.top_ids[index, : params.top_logprobs].tolist()
        values = outputs.top_logprobs[index, : params.top_logprobs].tolist()
        top = [dict(zip(ids, values, strict=True))]
    return sample.delta(
        [token],
        update.text_delta,
        update.finish_reason,
        update.stop_reason,
        logprobs=[float(outputs.logprobs[index])],
        sampling_logprobs=[float(outputs.sampling_logprobs[index])],
        top_logprobs=top,
    )
