"""Calls that are JSON: the arguments are passed on as they are written."""

import json
import re
from typing import Any

from tokenspeed_jax.text.transcripts.events import Arguments, CallBegun, CallEnded
from tokenspeed_jax.text.transcripts.reader import Reader, Steps

_LONGEST_HEAD = 1024
_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*({_STRING})\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_FIRST_KEY = re.compile(r'\{\s*"([^"\\]*+)"\s*:')
_SILENT_KEYS = frozenset({"type", "id"})
_KEYS = frozenset({"name", "arguments", "parameters"}) | _SILENT_KEYS
_STRUCTURE = re.compile(r'["{}\[\]<]')
_STRING_PART = re.compile(r'["\\]')


class ObjectEnd:
    """Finds where a JSON object ends, without a judgement on what is in it.

    Attributes:
        is_closed: the last brace has come.
    """

    def __init__(self, depth: int = 0) -> None:
        self.is_closed = False
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Takes the next piece of the object.

        Returns:
            How much of the piece belongs to the object, when it ended here: behind its last brace, or in front of a
            `<` outside strings, which is no JSON and may begin a marker. None when it goes on.
        """
        at = 0
        if self._is_escaped and text:
            self._is_escaped = False
            at = 1
        while found := (_STRING_PART if self._in_string else _STRUCTURE).search(text, at):
            at = found.end()
            match found[0]:
                case "\\" if at == len(text):
                    self._is_escaped = True
                    return None
                case "\\":
                    at += 1
                case '"':
                    self._in_string = not self._in_string
                case "<":
                    return found.start()
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth == 0:
                        self.is_closed = True
                        return at
        return None


def pass_arguments(reader: Reader) -> Steps[bool]:
    """Passes one JSON object on as arguments. False when it was cut short, and then there is no `CallEnded`."""
    end = ObjectEnd()
    while True:
        length = end.scan(reader.text)
        piece = reader.consume(len(reader.text) if length is None else length)
        if piece:
            yield Arguments(piece)
        if length is not None:
            if end.is_closed:
                yield CallEnded()
            return end.is_closed
        if not (yield from reader.more()):
            return False


def json_call(reader: Reader) -> Steps[bool]:
    """Reads one `{"name": ..., "arguments": {...}}`; `parameters` is another word for `arguments`.

    With the name first, as models are taught to write it, arguments are passed on while they are written. In any other
    order the call is held until it is complete.

    Returns:
        False when the text begins with no such object; then nothing is consumed.
    """
    end = ObjectEnd()
    scanned = 0
    while True:
        head = reader.text[:_LONGEST_HEAD]
        if head and head[0] != "{":
            return False
        if found := _HEAD.match(head):
            name = _loaded(found[1])
            if not name:
                return False
            reader.consume(found.end())
            yield CallBegun(name)
            if (yield from pass_arguments(reader)):
                yield from _skip_rest(reader)
            return True
        if (key := _FIRST_KEY.match(head)) and key[1] not in _KEYS:
            return False
        length = end.scan(reader.text[scanned:])
        if length is not None:
            return (yield from _whole_call(reader, scanned + length))
        scanned = len(reader.text)
        if not (yield from reader.more()):
            return False


def _skip_rest(reader: Reader) -> Steps[None]:
    """Drops the end of the object whose arguments have been passed on; leaves anything that is no such end."""
    yield from reader.skip_space()
    if (yield from reader.take("}")) or not reader.text.startswith(","):
        return
    end = ObjectEnd(depth=1)
    scanned = 0
    while (length := end.scan(reader.text[scanned:])) is None:
        scanned = len(reader.text)
        if not (yield from reader.more()):
            return
    length += scanned
    rest = _loaded("{" + reader.text[1:length]) if end.is_closed else None
    if isinstance(rest, dict) and rest.keys() <= _SILENT_KEYS:
        reader.consume(length)


def _whole_call(reader: Reader, length: int) -> Steps[bool]:
    call = _loaded(reader.text[:length])
    if not isinstance(call, dict) or not call.keys() <= _KEYS or call.get("type", "function") != "function":
        return False
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):  # some models write them as OpenAI's API does, as JSON in a string
        arguments = _loaded(arguments)
    if not (isinstance(name, str) and name and isinstance(arguments, dict)):
        return False
    reader.consume(length)
    yield CallBegun(name)
    yield Arguments(json.dumps(arguments, ensure_ascii=False))
    yield CallEnded()
    return True


def _loaded(text: str) -> Any:
    """The JSON value, None for what is not JSON."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
