"""Landing: a step's outputs become tokens, stop decisions and deltas, and results for the scheduler.

A late stop costs one wasted row: the next step may already be in flight with the sample's row in it, and what that
row drew is dropped here. Its slot may be another sample's by then; the scheduler knows by the round that it is not.
"""

from dataclasses import dataclass, field

import numpy as np

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.outputs import RequestDelta, TopLogprobs
from tokenspeed_jax.engine.requests import SampleState
from tokenspeed_jax.engine.step import StepOutputs
from tokenspeed_jax.engine.stop import StopUpdate


@dataclass
class RowResults:
    """What the scheduler has to know of a landed step.

    Attributes:
        slots: request-pool slots of the rows whose samples still ran.
        token_counts: tokens of each of these rows, 1 or 0.
        tokens: their tokens, one after the other.
        finished: slots whose samples ended with this step.
    """

    slots: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def apply(self, scheduler: scheduling.Scheduler, round_number: int) -> None:
        """Advances the scheduler by these results, which are all that the plan of this round will ever have."""
        slots, counts = np.array(self.slots, np.int32), np.array(self.token_counts, np.int32)
        scheduler.advance_rows(slots, counts, np.array(self.tokens, np.int32), round_number)
        scheduler.finish_rows(np.array(self.finished, np.int32))


def land(
    batch: BuiltBatch, outputs: StepOutputs, weight_version: int
) -> tuple[RowResults, list[tuple[SampleState, RequestDelta]]]:
    """What one landed step means.

    Args:
        weight_version: of the weights with which the step was dispatched.

    Returns:
        The results to apply to the scheduler, and the deltas to deliver after that.
    """
    results = RowResults()
    deltas = []
    tokens = outputs.tokens.tolist()
    for index, (sample, slot, draws) in enumerate(zip(batch.samples, batch.slots, batch.draws, strict=True)):
        if sample.finished:
            continue
        results.slots.append(slot)
        results.token_counts.append(int(draws))
        if not draws:
            continue
        sample.weight_version = weight_version
        token = tokens[index]
        results.tokens.append(token)
        matcher = sample.matcher
        if matcher is not None and not matcher.accept(token):
            # What was drawn means nothing, but the scheduler has to be told of some token.
            sample.finished = True
            results.finished.append(slot)
            deltas.append((sample, sample.delta([], sample.stop.flush(), "abort", matcher.error)))
            continue
        if sample.request.max_tokens > 0:
            sample.token_ids.append(token)
        update = sample.stop.push(token, ends_grammar=matcher is not None and matcher.is_complete)
        if update.finish_reason is not None:
            sample.finished = True
            results.finished.append(slot)
        deltas.append((sample, _delta(sample, token, update, outputs, index)))
    return results, deltas


def _delta(sample: SampleState, token: int, update: StopUpdate, outputs: StepOutputs, index: int) -> RequestDelta:
    params = sample.params
    if sample.request.max_tokens == 0:
        return sample.delta([], update.text_delta, update.finish_reason)
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
