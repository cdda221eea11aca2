"""Reasoning between `<think>` and `</think>` in front of the reply: Qwen3, DeepSeek, Kimi, MiniMax."""

from collections.abc import Iterable
from typing import ClassVar

from tokenspeed_jax.text.transcripts.events import Content, Event, Reasoning, TranscriptParser
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps

THINK, END_THINK = "<think>", "</think>"


class ThinkParser(SteppedParser):
    """Reasoning first; everything behind it is another parser's.

    Args:
        is_open: the prompt ended inside the reasoning, as the templates of models that always reason have it. Else
            there is reasoning only if the reply begins with the marker.
        interrupts: markers that end the reasoning as well and belong to what follows.
        rest: parser of what follows; None when all of it is content.
    """

    markers: ClassVar[tuple[str, ...]] = (THINK, END_THINK)

    def __init__(self, *, is_open: bool, interrupts: Iterable[str] = (), rest: TranscriptParser | None = None) -> None:
        self._is_open = is_open
        self._ends = (END_THINK, *interrupts)
        self._rest = rest
        super().__init__()

    def steps(self, reader: Reader) -> Steps[None]:
        space = yield from reader.skip_space()
        is_marked = yield from reader.take(THINK)
        if is_marked or self._is_open:
            yield from reader.skip_space()
            _, marker = yield from reader.pass_until(self._ends, Reasoning)
            if marker == END_THINK:
                reader.consume(len(marker))
            space = ""
            yield from reader.skip_space()
        yield from self._pass_rest(reader, space)

    def _pass_rest(self, reader: Reader, lead: str) -> Steps[None]:
        reader.text = lead + reader.text
        while True:
            text = reader.consume(len(reader.text))
            if text:
                yield from self._events_of(text)
            if not (yield from reader.more()):
                break
        if self._rest is not None:
            yield from self._rest.finish()

    def _events_of(self, text: str) -> list[Event]:
        return [Content(text)] if self._rest is None else self._rest.feed(text)
