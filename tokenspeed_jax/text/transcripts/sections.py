"""Calls in a section of their own between special tokens, each with a header and a JSON object: DeepSeek, Kimi."""

import re
from dataclasses import dataclass

from tokenspeed_jax.text.transcripts.events import CallBegun, Content
from tokenspeed_jax.text.transcripts.json_calls import pass_arguments
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps, first_marker

_LONGEST_HEADER = 512


@dataclass(frozen=True)
class SectionMarkers:
    """The special tokens of one family.

    Attributes:
        header: what stands between the beginning of a call and the first brace of its arguments; the group `name` is
            the tool's name, and a group `id` the call's.
        fence: what may stand between the arguments and the end of a call.
    """

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    header: re.Pattern[str]
    fence: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every marker."""
        return (self.section_begin, self.section_end, self.call_begin, self.call_end)


class SectionParser(SteppedParser):
    """See the file's docstring."""

    def __init__(self, markers: SectionMarkers) -> None:
        self._markers = markers
        super().__init__()

    def steps(self, reader: Reader) -> Steps[None]:
        markers = self._markers
        stops = (markers.section_begin, markers.call_begin, markers.section_end)
        called = False
        while True:
            raw, marker = yield from reader.pass_until(stops, Content, drops_blank_end=called)
            if marker is None:
                return
            raw += reader.consume(len(marker))
            if marker == markers.section_end and called:
                continue
            if marker == markers.section_begin:
                raw += yield from reader.skip_space()
                if (yield from reader.take(markers.call_begin)):
                    marker = markers.call_begin
                    raw += marker
            if marker == markers.call_begin and (yield from self._call(reader)):
                called = True
            else:
                yield Content(raw)

    def _call(self, reader: Reader) -> Steps[bool]:
        """Reads one call behind its first marker; False, and nothing consumed, when it is none."""
        header = yield from self._header(reader)
        if header is None:
            return False
        reader.consume(header.end())
        groups = header.groupdict()
        yield CallBegun(groups["name"], groups.get("id"))
        yield from pass_arguments(reader)
        yield from reader.skip_space()
        if self._markers.fence is not None and (yield from reader.take(self._markers.fence)):
            yield from reader.skip_space()
        yield from reader.take(self._markers.call_end)
        return True

    def _header(self, reader: Reader) -> Steps[re.Match[str] | None]:
        while True:
            head = reader.text[:_LONGEST_HEADER]
            if found := first_marker(head, ("{", self._markers.call_end)):
                return self._markers.header.fullmatch(head, 0, found[0])
            if len(head) == _LONGEST_HEADER or not (yield from reader.more()):
                return None
