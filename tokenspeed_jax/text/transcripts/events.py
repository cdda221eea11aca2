"""The parts of a reply, as a parser reports them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote for itself."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A tool call begins; the `Arguments` up to the next call are its own.

    Attributes:
        call_id: the call's name in the conversation, where the format has one.
    """

    name: str
    call_id: str | None = None


@dataclass(frozen=True)
class Arguments:
    """More of the current call's arguments, as JSON text. What the model got wrong in them stays wrong."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The current call is complete; a call that was cut short has no such event."""


Event = Content | Reasoning | CallBegun | Arguments | CallEnded


class TranscriptParser(Protocol):
    """Takes one reply apart as its text arrives.

    However the text is cut into pieces, the events say the same; only the pieces of text in them differ. No text makes
    a parser raise. What looks like a call and is none becomes content, markers included. Only layout is dropped:
    markers of what was recognised, and white space beside them.
    """

    def feed(self, text: str) -> list[Event]:
        """What became certain with this text."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, when the reply ends."""
        ...
