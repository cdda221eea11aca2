"""Parsers as straight-line code: text that arrives in pieces is read by generators that wait for more."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence

from tokenspeed_jax.text.transcripts.events import Event

type Steps[T] = Generator[Event | None, None, T]
"""Yields each event, and None to wait until the reader has more text or knows that none will come."""

_LONGEST_PIECE = 4096


class Reader:
    """The text of one reply that nobody has consumed yet.

    Decisions are made on what the text begins with, never on how much of it there is, so that they do not depend on
    how it was cut. Markers begin with `<` and have no other `<`: none can begin inside another.

    Attributes:
        text: what has arrived and was not consumed.
        is_final: nothing more will arrive.
    """

    def __init__(self) -> None:
        self.text = ""
        self.is_final = False

    def consume(self, length: int) -> str:
        """Takes the first `length` characters."""
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def more(self) -> Steps[bool]:
        """Waits for more text; False when none will come."""
        if self.is_final:
            return False
        yield None
        return True

    def skip_space(self) -> Steps[str]:
        """Consumes white space up to the next character and returns it."""
        skipped = ""
        while True:
            skipped += self.consume(len(self.text) - len(self.text.lstrip()))
            if self.text or not (yield from self.more()):
                return skipped

    def begins_with(self, marker: str) -> Steps[bool]:
        """Whether the text begins with `marker`; consumes nothing."""
        while not self.text.startswith(marker):
            if not marker.startswith(self.text) or not (yield from self.more()):
                return False
        return True

    def take(self, marker: str) -> Steps[bool]:
        """Consumes `marker` if the text begins with it."""
        is_there = yield from self.begins_with(marker)
        if is_there:
            self.consume(len(marker))
        return is_there

    def pass_until(
        self, markers: Sequence[str], event: Callable[[str], Event], *, drops_blank_end: bool = False
    ) -> Steps[tuple[str, str | None]]:
        """Passes text on as events up to the first marker, without the white space in front of it.

        Args:
            drops_blank_end: white space alone up to the end is dropped.

        Returns:
            The white space in front of the marker, and the marker, which is left in the text; None at the end.
        """
        while True:
            found = first_marker(self.text, markers)
            if found is not None:
                before = self.consume(found[0])
                shown = before.rstrip()
                if shown:
                    yield event(shown)
                return before[len(shown) :], found[1]
            if self.is_final:
                rest = self.consume(len(self.text))
                if rest.strip() or (rest and not drops_blank_end):
                    yield event(rest)
                return "", None
            shown = self.text[: len(self.text) - partial_marker(self.text, markers)].rstrip()
            if shown:
                yield event(self.consume(len(shown)))
                drops_blank_end = False
            yield None

    def read_until(self, markers: Sequence[str]) -> Steps[tuple[str, str | None]]:
        """All text before the first marker, and the marker, which is left in the text; None at the end."""
        searched = 0
        longest = max(map(len, markers))
        while True:
            found = first_marker(self.text, markers, searched)
            if found is not None:
                return self.consume(found[0]), found[1]
            searched = max(0, len(self.text) - longest)
            if not (yield from self.more()):
                return self.consume(len(self.text)), None


def first_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first of the markers stands in `text[start:]`, and which it is."""
    found = [(at, marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    return min(found) if found else None


def partial_marker(text: str, markers: Sequence[str]) -> int:
    """Length of the end of `text` that may be the beginning of a marker."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(marker.startswith(text[at:]) for marker in markers) else 0


class SteppedParser(ABC):
    """A `TranscriptParser` written as one generator over a reader."""

    def __init__(self) -> None:
        self._reader = Reader()
        self._running = self.steps(self._reader)

    @abstractmethod
    def steps(self, reader: Reader) -> Steps[None]:
        """Reads the whole reply; returns only when nothing is left and the reader is final."""

    def feed(self, text: str) -> list[Event]:
        """See `TranscriptParser`."""
        events: list[Event] = []
        # A long text at once would be copied for every part of it that is consumed.
        for start in range(0, len(text), _LONGEST_PIECE):
            self._reader.text += text[start : start + _LONGEST_PIECE]
            events += self._advance()
        return events

    def finish(self) -> list[Event]:
        """See `TranscriptParser`."""
        self._reader.is_final = True
        return self._advance()

    def _advance(self) -> list[Event]:
        events: list[Event] = []
        for event in self._running:
            if event is None:
                break
            events.append(event)
        return events
