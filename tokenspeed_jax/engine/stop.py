"""When a sample ends, and which of its text may be shown before that is known."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from tokenspeed_jax.engine.sampling_params import SamplingParams


class TextSource(Protocol):
    """Turns ids into text piece by piece, as `text.Detokenizer` does."""

    def push(self, ids: list[int], /) -> str:
        """Text that became certain with these ids."""
        ...

    def flush(self) -> str:
        """What was held back, now that no id follows."""
        ...


@dataclass(frozen=True)
class StopUpdate:
    """What one token brought.

    Attributes:
        text_delta: text that may be shown; the deltas of a sample join to its whole text.
        finish_reason: None while the sample goes on.
        stop_reason: the stop string or the id of `stop_token_ids` that ended it; None for every other end.
    """

    text_delta: str
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, however it is cut.

    The match that is complete first wins, and of those complete at the same character the longest. Text that may
    still turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Collection[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is certainly before any stop string, and the stop string if one is complete."""
        pending = self._held + text
        matches = [(start + len(stop), start, stop) for stop in self._stops if (start := pending.find(stop)) >= 0]
        if matches:
            _, start, stop = min(matches)
            self._held = ""
            return pending[:start], stop
        shown = len(pending) - max((_overlap(pending, stop) for stop in self._stops), default=0)
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """The text held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins without being complete."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class StopChecker:
    """Decides after each token of one sample whether it ends there.

    Looked at in this order: an id of `params.stop_token_ids`, an end-of-sequence id (unless `ignore_eos`), a stop
    string in the decoded text, `max_tokens`. The text of an id that ends the sample is not shown, nor a stop string
    and what follows it; with `include_stop_str_in_output` only what follows it is not. None of the first three ends a
    sample within its first `min_tokens` tokens; a stop string must lie wholly in text that later tokens brought. A
    character belongs to the token that completes it. The end of a grammar ends the sample like an end-of-sequence id,
    without any such exception: nothing could follow.

    Args:
        eos_token_ids: the model's end-of-sequence ids.
        max_tokens: tokens after which the sample ends with "length"; where it is 0, the first one ends it unseen.
        detokenizer: a fresh one, for this sample alone.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], max_tokens: int, detokenizer: TextSource
    ) -> None:
        if max_tokens < 0:
            raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
        self._stop_ids = frozenset(params.stop_token_ids)
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self._min_tokens = params.min_tokens
        self._max_tokens = max_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop)
        self._tokens = 0
        self._is_finished = False

    def push(self, token_id: int, *, ends_grammar: bool = False) -> StopUpdate:
        """Takes the sample's next token. Raises RuntimeError once the sample has ended.

        Args:
            ends_grammar: the token is the end of the grammar that constrains the sample.
        """
        if self._is_finished:
            raise RuntimeError("a token was pushed after the sample had ended")
        self._tokens += 1
        if self._max_tokens == 0:
            return self._end("", "length", None)
        if self._tokens > self._min_tokens:
            if token_id in self._stop_ids:
                return self._end_at(token_id, token_id)
            if token_id in self._eos_ids:
                return self._end_at(token_id, None)
        if ends_grammar:
            return self._end_at(token_id, None)
        shown, stop = self._match(self._detokenizer.push([token_id]))
        if stop is not None:
            self._is_finished = True
            return StopUpdate(shown, "stop", stop)
        if self._tokens >= self._max_tokens:
            return self._end(shown, "length", None)
        return StopUpdate(shown)

    def flush(self) -> str:
        """Ends the sample from outside (abort) and returns the text that was still held back."""
        if self._is_finished:
            return ""
        return self._end("", "stop", None).text_delta

    def _match(self, text: str) -> tuple[str, str | None]:
        if self._tokens <= self._min_tokens:
            return text, None
        shown, stop = self._matcher.push(text)
        return (shown + stop if stop is not None and self._includes_stop else shown), stop

    def _end_at(self, token_id: int, stop_reason: int | None) -> StopUpdate:
        """Ends the sample with an id."""
        if not self._includes_stop:
            return self._end("", "stop", stop_reason)
        self._is_finished = True
        # Nothing of the text is left out, so it does not matter any more where a stop string may begin.
        shown = self._matcher.flush() + self._detokenizer.push([token_id]) + self._detokenizer.flush()
        return StopUpdate(shown, "stop", stop_reason)

    def _end(self, shown: str, reason: Literal["stop", "length"], stop_reason: int | None) -> StopUpdate:
        """Ends the sample; bytes of an unfinished character come out now and may still complete a stop string."""
        self._is_finished = True
        last, stop = self._match(self._detokenizer.flush())
        if stop is not None:
            return StopUpdate(shown + last, "stop", stop)
        return StopUpdate(shown + last + self._matcher.flush(), reason, stop_reason)
