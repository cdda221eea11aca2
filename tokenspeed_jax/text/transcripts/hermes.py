"""Hermes and Qwen 2.5 and 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax
from tokenspeed_jax.text.transcripts.events import Content
from tokenspeed_jax.text.transcripts.json_calls import json_call
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(SteppedParser):
    """See the file's docstring. One pair of markers per call."""

    markers: ClassVar[tuple[str, ...]] = (_OPEN, _CLOSE)
    syntax: ClassVar[CallSyntax] = CallSyntax(
        call_begin=f'{_OPEN}\n{{"name": "', name_end='", "arguments": ', call_end=f"}}\n{_CLOSE}", separator="\n"
    )

    def steps(self, reader: Reader) -> Steps[None]:
        called = False
        while True:
            space, marker = yield from reader.pass_until((_OPEN,), Content, drops_blank_end=called)
            if marker is None:
                return
            reader.consume(len(marker))
            inner = yield from reader.skip_space()
            if (yield from json_call(reader)):
                called = True
                yield from reader.skip_space()
                yield from reader.take(_CLOSE)
            else:
                yield Content(space + _OPEN + inner)
