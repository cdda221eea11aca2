"""Jump-forward: output that a grammar forces is taken over at once, instead of being drawn token by token.

Where a grammar admits one text only, such as the next key of a JSON object, llguidance knows the tokens that spell it,
and a mask would admit them alone, one after the other. A constrained row draws once everything before its token has
landed, so that is when forced tokens are found: the row then draws nothing, the scheduler is told at once what it
brings, and the sample's next row feeds all of that in one step. Clients are told when the row's step has landed.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.requests import Jump, SampleState
from tokenspeed_jax.engine.sampling_state import blocked_ids
from tokenspeed_jax.engine.stats import StatsCollector


@dataclass(frozen=True)
class JumpForward:
    """Finds jumps and tells the scheduler. Owned by the step loop; not thread-safe."""

    scheduler: scheduling.Scheduler
    programs: StepPrograms
    stats: StatsCollector
    eos_token_ids: Collection[int]

    def take(self, built: BuiltBatch, round_number: int) -> list[int]:
        """Lets samples of a dispatched batch jump; the results before it must have landed.

        Returns:
            The constrained rows that have a token to draw yet.
        """
        drawing = []
        events = scheduling.ExecutionEvent()
        for row in built.constrained:
            sample = built.samples[row]
            sample.jump = _jump_of(sample)
            if sample.jump is None:
                drawing.append(row)
            else:
                self._follow(sample, sample.jump, round_number, events)
                self._note_history(sample, built.slots[row])
        if len(drawing) < len(built.constrained):
            self.scheduler.advance(events)
        return drawing

    def _follow(self, sample: SampleState, jump: Jump, round_number: int, events: scheduling.ExecutionEvent) -> None:
        self.stats.observe_jump(len(jump.token_ids))
        sample.token_ids.extend(jump.token_ids)
        # The row counts as a draw already.
        sample.num_dispatched += len(jump.token_ids) - 1
        result = scheduling.ForwardEvent.ExtendResult()
        result.request_id, result.round_number = sample.scheduler_id, round_number
        result.tokens = jump.token_ids[:1]
        if jump.update.finish_reason is None:
            result.forced_tokens = jump.token_ids[1:]
            events.add_event(result)
            return
        end = scheduling.ForwardEvent.Finish()
        end.request_id = sample.scheduler_id
        events.add_event(result).add_event(end)

    def _note_history(self, sample: SampleState, slot: int) -> None:
        """Penalties are for tokens that were not drawn, too."""
        if sample.params.uses_history:
            self.programs.begin_request(slot, sample, blocked_ids(sample.params, self.eos_token_ids))


def _jump_of(sample: SampleState) -> Jump | None:
    # Log-probabilities are those of what a step has drawn, and none of what is forced is drawn. What is forced at a
    # sample's end is not even fed, and has no experts.
    params = sample.params
    if sample.finished or sample.matcher is None or params.logprobs or params.return_routed_experts:
        return None
    if sample.request.max_tokens == 0:
        return None
    tokens = sample.matcher.take_forced()
    if not tokens:
        return None
    text = ""
    for count, token in enumerate(tokens, 1):
        update = sample.stop.push(token)
        text += update.text_delta
        if update.finish_reason is not None or count == len(tokens):
            return Jump(tokens[:count], dataclasses.replace(update, text_delta=text))
    return None
