"""Llama 3: a reply that begins with `{"name": ..., "parameters": {...}}`, or such an object after `<|python_tag|>`."""

from typing import ClassVar

from tokenspeed_jax.text.transcripts.call_syntax import CallSyntax
from tokenspeed_jax.text.transcripts.events import Content
from tokenspeed_jax.text.transcripts.json_calls import json_call
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps

_TAG = "<|python_tag|>"


class Llama3Parser(SteppedParser):
    """See the file's docstring. Further calls follow the first, with or without a semicolon between them.

    Python code after the tag, which the larger models write for their built-in interpreter, stays content.
    """

    markers: ClassVar[tuple[str, ...]] = (_TAG,)
    syntax: ClassVar[CallSyntax] = CallSyntax(
        call_begin='{"name": "', name_end='", "parameters": ', call_end="}", separator="; "
    )

    def steps(self, reader: Reader) -> Steps[None]:
        called = False
        lead = yield from self._lead(reader, after_call=False)
        while True:
            while (yield from json_call(reader)):
                called = True
                lead = yield from self._lead(reader, after_call=True)
            if lead and (lead.strip() or reader.text or not called):
                yield Content(lead)
            space, marker = yield from reader.pass_until((_TAG,), Content, drops_blank_end=called)
            if marker is None:
                return
            reader.consume(len(marker))
            lead = space + marker + (yield from reader.skip_space())

    def _lead(self, reader: Reader, *, after_call: bool) -> Steps[str]:
        """Consumes and returns what may stand in front of a call."""
        lead = yield from reader.skip_space()
        for marker in (";", _TAG) if after_call else (_TAG,):
            if (yield from reader.take(marker)):
                lead += marker + (yield from reader.skip_space())
        return lead
