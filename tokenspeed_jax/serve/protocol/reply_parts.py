"""A reply as parts that begin, grow and end one after the other: reasoning, text and tool calls.

This is the form of OpenAI's responses and of Anthropic's messages; each writes the same events in its own words.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from tokenspeed_jax.engine.outputs import RequestDelta, TopLogprobs
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, chat_logprobs
from tokenspeed_jax.serve.protocol.message_deltas import MessageDeltas

PartKind = Literal["reasoning", "text", "call"]
PartStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass(eq=False)
class Part:
    """One part of the reply.

    Attributes:
        index: its place among the parts.
        pieces: its text so far; of a call, the arguments.
        logprobs: entries in chat's format for the tokens of a text, if asked for.
        status: "incomplete" if it ended because the reply had to.
    """

    kind: PartKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    status: PartStatus = "in_progress"

    @property
    def text(self) -> str:
        """All of its text."""
        return "".join(self.pieces)


@dataclass(frozen=True)
class Begun:
    """A part begins; `part` stays as empty as it is then."""

    part: Part


@dataclass(frozen=True)
class Grown:
    """A part has more text, and the entries of the tokens that became of it."""

    part: Part
    text: str
    logprobs: list[dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """A part is over."""

    part: Part


PartEvent = Begun | Grown | Ended


class ReplyParts:
    """The parts of one reply, as its deltas arrive.

    Args:
        names: names of tokens, if texts are to have log-probabilities.

    Attributes:
        parts: all parts so far.
        reasoning_tokens: how many tokens the reasoning took, its markers included.
    """

    def __init__(self, deltas: MessageDeltas, names: TokenNames | None) -> None:
        self._deltas = deltas
        self._tokens = _UnclaimedTokens(names)
        self._open: Part | None = None
        self.parts: list[Part] = []
        self.reasoning_tokens = 0

    def push(self, delta: RequestDelta) -> list[PartEvent]:
        """What one delta makes certain."""
        is_end = delta.finish_reason is not None
        self._tokens.add(delta)
        events: list[PartEvent] = []
        grown = self._deltas.push(delta.text, is_last=is_end)
        for position, piece in enumerate(grown):
            events += self._pushed(piece, is_newest=position == len(grown) - 1)
        return [*events, *self._end(is_cut=delta.finish_reason == "length")] if is_end else events

    def empty_text(self) -> list[PartEvent]:
        """A text part without text, for protocols in which no reply is without a part."""
        return [*self._begin("text"), *self._end(is_cut=False)]

    def _pushed(self, piece: dict[str, Any], *, is_newest: bool) -> list[PartEvent]:
        events: list[PartEvent] = []
        kind: PartKind = "text"
        if calls := piece.get("tool_calls"):
            kind, text = "call", calls[0]["function"]["arguments"]
            if "id" in calls[0]:
                events += self._begin(kind, calls[0]["id"], calls[0]["function"]["name"])
        elif "reasoning" in piece:
            kind, text = "reasoning", piece["reasoning"]
        else:
            text = piece["content"]
        if self._open is None or self._open.kind != kind:
            events += self._begin(kind)
        assert self._open is not None
        count, logprobs = self._tokens.claim(text, is_newest=is_newest)
        if kind == "reasoning":
            self.reasoning_tokens += count
        if text:
            logprobs = logprobs if kind == "text" else []
            self._open.pieces.append(text)
            self._open.logprobs += logprobs
            events.append(Grown(self._open, text, logprobs))
        return events

    def _begin(self, kind: PartKind, call_id: str = "", name: str = "") -> list[PartEvent]:
        ended = self._end(is_cut=False)
        begun = Begun(Part(kind, len(self.parts), call_id, name))
        self._open = Part(kind, len(self.parts), call_id, name)
        self.parts.append(self._open)
        return [*ended, begun]

    def _end(self, *, is_cut: bool) -> list[PartEvent]:
        part, self._open = self._open, None
        if part is None:
            return []
        part.status = "incomplete" if is_cut else "completed"
        return [Ended(part)]


class _UnclaimedTokens:
    """Tokens whose text no part has shown yet: a parser holds back what may be a marker."""

    def __init__(self, names: TokenNames | None) -> None:
        self._names = names
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._tops: list[TopLogprobs] = []

    def add(self, delta: RequestDelta) -> None:
        self._ids += delta.token_ids
        if self._names is not None:
            self._logprobs += delta.logprobs or []
            self._tops += delta.top_logprobs or [{}] * len(delta.token_ids)

    def claim(self, text: str, *, is_newest: bool) -> tuple[int, list[dict[str, Any]]]:
        """Takes the tokens up to the end of `text`: how many, and the entries of those that spell it.

        Args:
            is_newest: nothing behind `text` is known yet.
        """
        if self._names is None:
            count = len(self._ids) if is_newest else 0
            del self._ids[:count]
            return count, []
        first, end = self._place(text, is_newest=is_newest)
        rows = slice(first, end)
        entries = chat_logprobs(self._names, self._ids[rows], self._logprobs[rows], self._tops[rows])["content"]
        for waiting in (self._ids, self._logprobs, self._tops):
            del waiting[:end]
        return end, entries

    def _place(self, text: str, *, is_newest: bool) -> tuple[int, int]:
        """First token of `text` and the one behind its last."""
        assert self._names is not None
        spelled = [self._names.of(token_id)[1] for token_id in self._ids]
        whole, wanted = b"".join(spelled), text.encode()
        # In front of the newest text stand markers, in front of any other the text that follows it.
        start = whole.rfind(wanted) if is_newest else whole.find(wanted)
        if start < 0:
            # Tokens that are gone hold a part of it, or the model wrote it otherwise, as some formats have arguments.
            return 0, len(spelled)
        first, end, at = len(spelled), 0, 0
        for index, piece in enumerate(spelled):
            if at < start + len(wanted) and at + len(piece) > start:
                first, end = min(first, index), index + 1
            at += len(piece)
        return (first, end) if first < end else (0, 0)
