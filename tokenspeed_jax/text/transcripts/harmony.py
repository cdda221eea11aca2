"""gpt-oss's harmony: messages with a channel each, `<|channel|>analysis<|message|>...<|end|><|start|>assistant...`."""

import re
from collections.abc import Callable
from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax, ChannelSyntax
from tokenspeed_jax.text.transcripts.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps, first_marker

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_LONGEST_HEADER = 512
_HEADER = re.compile(
    r"\s*(?:assistant)?\s*(?:to=(?P<early>[^\s<]+)\s*)?<\|channel\|>\s*(?P<channel>\w+)"
    r"(?:\s*to=(?P<late>[^\s<]+))?\s*(?:<\|constrain\|>)?\s*\w*\s*"
)
_NAMESPACE = "functions."


class HarmonyParser(SteppedParser):
    """See the file's docstring.

    The analysis channel is reasoning; final, and commentary addressed to nobody, are content; commentary to
    `functions.NAME` is a call. Messages to anybody else, to a built-in tool that nobody serves, are content with their
    headers. Messages of one kind are joined by a line end.

    Args:
        has_tools: whether the client can answer calls; without, they are content with their headers.
    """

    markers: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
    # The token that ends a call ends the sample.
    syntax: ClassVar[CallSyntax] = CallSyntax(
        call_begin=f"{_CHANNEL}commentary to={_NAMESPACE}",
        name_end=f" {_CONSTRAIN}json{_MESSAGE}",
        call_end="",
        is_single=True,
    )
    channels: ClassVar[ChannelSyntax] = ChannelSyntax(
        reasoning_header=f"{_CHANNEL}analysis{_MESSAGE}",
        preamble_header=f"{_CHANNEL}commentary{_MESSAGE}",
        aside_end=_ENDS[0],
        next_message=f"{_START}assistant",
        content_header=f"{_CHANNEL}final{_MESSAGE}",
    )

    def __init__(self, *, has_tools: bool) -> None:
        self._has_tools = has_tools
        self._shown: set[type[Event]] = set()
        super().__init__()

    def steps(self, reader: Reader) -> Steps[None]:
        while True:
            raw = ""
            # The prompt ends behind the start and the role of the first message.
            if (yield from reader.take(_START)):
                raw = _START
            yield from self._message(reader, raw)
            yield from reader.skip_space()
            if not reader.text and reader.is_final:
                return

    def _message(self, reader: Reader, raw: str) -> Steps[None]:
        header = yield from self._header(reader)
        if header is None:
            # Not harmony: content, up to where a message may begin.
            if raw or reader.text.startswith(_CHANNEL):
                raw += reader.consume(len(_CHANNEL)) if reader.text.startswith(_CHANNEL) else ""
                yield Content(raw)
            yield from reader.pass_until((_START, _CHANNEL), Content)
            return
        raw += reader.consume(header.end() + len(_MESSAGE))
        recipient = header["early"] or header["late"]
        if recipient is None and header["channel"] in ("analysis", "commentary", "final"):
            yield from self._text(reader, Reasoning if header["channel"] == "analysis" else Content)
        elif self._has_tools and recipient is not None and recipient.removeprefix(_NAMESPACE) not in ("", recipient):
            yield from self._call(reader, recipient.removeprefix(_NAMESPACE))
        else:
            yield Content(raw)
            end = yield from self._body(reader, Content)
            if end is not None:
                yield Content(end)

    def _text(self, reader: Reader, event: type[Content] | type[Reasoning]) -> Steps[None]:
        lead = "\n" if event in self._shown else ""

        def joined(text: str) -> Event:
            nonlocal lead
            self._shown.add(event)
            lead, before = "", lead
            return event(before + text)

        yield from self._body(reader, joined)

    def _call(self, reader: Reader, name: str) -> Steps[None]:
        yield CallBegun(name)
        last = ""

        def arguments(text: str) -> Event:
            nonlocal last
            last = text.rstrip()[-1:] or last
            return Arguments(text)

        end = yield from self._body(reader, arguments)
        # The token that ends a call ends the sample too, and then its text is not shown.
        if not last:
            yield Arguments("{}")
        if end is not None or last in ("", "}"):
            yield CallEnded()

    def _body(self, reader: Reader, event: Callable[[str], Event]) -> Steps[str | None]:
        """Passes on what a message says, and returns the marker that ended it; one that begins another is left."""
        _, marker = yield from reader.pass_until((*_ENDS, _START), event)
        if marker in _ENDS:
            return reader.consume(len(marker))
        return None

    def _header(self, reader: Reader) -> Steps[re.Match[str] | None]:
        """What stands in front of `<|message|>`; None for anything that is no header."""
        while True:
            head = reader.text[:_LONGEST_HEADER]
            if found := first_marker(head, (_MESSAGE, _START, *_ENDS)):
                return _HEADER.fullmatch(head, 0, found[0]) if found[1] == _MESSAGE else None
            if len(head) == _LONGEST_HEADER or not (yield from reader.more()):
                return None
