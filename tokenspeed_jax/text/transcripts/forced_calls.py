"""Replies of models that were made to call in plain JSON: a list of calls, or the arguments of a given function."""

from tokenspeed_jax.text.transcripts.events import CallBegun, Content
from tokenspeed_jax.text.transcripts.json_calls import json_call, pass_arguments
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps


class JsonListParser(SteppedParser):
    """Reads what `call_syntax.JSON_LIST` describes. Anything else is content."""

    def steps(self, reader: Reader) -> Steps[None]:
        mark = "["
        while True:
            lead = yield from reader.skip_space()
            if (yield from reader.take(mark)):
                lead += mark
            lead += yield from reader.skip_space()
            if not (yield from json_call(reader)):
                break
            mark = ","
        if mark == "," and (yield from reader.take("]")):
            lead = yield from reader.skip_space()
        if lead.strip() or reader.text:
            yield Content(lead)
        yield from _pass_rest(reader)


class NamedCallParser(SteppedParser):
    """The reply is the arguments of one call, whose name is known beforehand."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def steps(self, reader: Reader) -> Steps[None]:
        yield from reader.skip_space()
        if (yield from reader.begins_with("{")):
            yield CallBegun(self._name)
            yield from pass_arguments(reader)
            yield from reader.skip_space()
        yield from _pass_rest(reader)


def _pass_rest(reader: Reader) -> Steps[None]:
    while True:
        if reader.text:
            yield Content(reader.consume(len(reader.text)))
        if not (yield from reader.more()):
            return
