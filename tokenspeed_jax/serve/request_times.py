"""When the choices of an HTTP request left the queue, had their first token, and ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed_jax.engine.outputs import FinishReason, RequestDelta


@dataclass(slots=True)
class ChoiceTimes:
    """One choice. Times are those of `time.monotonic`, None until they come.

    Attributes:
        scheduled: when it was first given a place in a step.
        first_token, last_token: when the server had them.
    """

    prompt_tokens: int
    num_tokens: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finish_reason: FinishReason | None = None

    def take(self, delta: RequestDelta, arrived: float) -> None:
        """Notes what a delta of this choice brought."""
        self.scheduled = delta.scheduled_at
        if delta.token_ids:
            self.num_tokens += len(delta.token_ids)
            self.last_token = arrived
            if self.first_token is None:
                self.first_token = arrived
        self.finish_reason = delta.finish_reason


@dataclass(frozen=True)
class RequestTimes:
    """One HTTP request.

    Attributes:
        submitted: when its prompts were handed to the engine.
        choices: prompts x n, in OpenAI's order.
        prompt_tokens: tokens of all prompts, each counted once.
    """

    submitted: float
    choices: Sequence[ChoiceTimes]
    prompt_tokens: int

    @property
    def scheduled(self) -> float | None:
        """When the first of its choices left the queue."""
        return min((choice.scheduled for choice in self.choices if choice.scheduled is not None), default=None)

    @property
    def first_token(self) -> float | None:
        """When the first token of any choice came."""
        return min((choice.first_token for choice in self.choices if choice.first_token is not None), default=None)

    @property
    def last_token(self) -> float | None:
        """When the last token so far came."""
        return max((choice.last_token for choice in self.choices if choice.last_token is not None), default=None)

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices."""
        return sum(choice.num_tokens for choice in self.choices)
