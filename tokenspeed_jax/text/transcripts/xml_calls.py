"""Calls written as tags, one per parameter: Qwen3-Coder and MiniMax. Values are bare text, typed by schemas."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed_jax.text.transcripts.events import Arguments, CallBegun, CallEnded, Content
from tokenspeed_jax.text.transcripts.reader import Reader, SteppedParser, Steps, first_marker, partial_marker

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""Tool name -> JSON schema of its arguments, as the client sent it."""

_LONGEST_TAG = 256
_TYPES = {
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


@dataclass(frozen=True)
class XmlTags:
    """The tags of one family. A call and a parameter open with a prefix, a name and a suffix."""

    open: str
    close: str
    call_prefix: str
    call_suffix: str
    call_close: str
    parameter_prefix: str
    parameter_suffix: str
    parameter_close: str

    @property
    def all(self) -> tuple[str, ...]:
        """Every tag that a tokenizer may have as one token."""
        return (self.open, self.close, self.call_close, self.parameter_close)


class XmlParser(SteppedParser):
    """See the file's docstring.

    A value ends at its closing tag, or where the next parameter begins or the call ends: models forget the tag. One
    line end after the opening tag and one before the closing tag are layout.
    """

    def __init__(self, tags: XmlTags, tools: ToolSchemas) -> None:
        self._tags = tags
        self._tools = tools
        self._value_ends = (tags.parameter_close, tags.parameter_prefix, tags.call_close)
        self._part_begins = (tags.parameter_prefix, tags.call_close, tags.close)
        super().__init__()

    def steps(self, reader: Reader) -> Steps[None]:
        tags = self._tags
        called = False
        while True:
            space, marker = yield from reader.pass_until((tags.open,), Content, drops_blank_end=called)
            if marker is None:
                return
            reader.consume(len(marker))
            inner = yield from reader.skip_space()
            name = yield from _named_tag(reader, tags.call_prefix, tags.call_suffix)
            if name is None:
                yield Content(space + marker + inner)
                continue
            called = True
            while name is not None:
                yield CallBegun(name)
                yield from self._parameters(reader, self._tools.get(name, {}))
                yield from reader.skip_space()
                name = yield from _named_tag(reader, tags.call_prefix, tags.call_suffix)
            yield from reader.take(tags.close)

    def _parameters(self, reader: Reader, schema: Mapping[str, Any]) -> Steps[None]:
        """Everything behind a call's opening tag, its closing tag included."""
        tags = self._tags
        lead = "{"
        while True:
            yield from reader.skip_space()
            key = yield from _named_tag(reader, tags.parameter_prefix, tags.parameter_suffix)
            if key is not None:
                yield Arguments(lead + json.dumps(key, ensure_ascii=False) + ": ")
                lead = ", "
                yield from self._value(reader, value_types(schema, key))
            elif (yield from reader.take(tags.call_close)) or (yield from reader.begins_with(tags.close)):
                yield Arguments("{}" if lead == "{" else "}")
                yield CallEnded()
                return
            else:  # neither a parameter nor an end
                if reader.text.startswith(tags.parameter_prefix):
                    yield Content(reader.consume(len(tags.parameter_prefix)))
                _, marker = yield from reader.pass_until(self._part_begins, Content)
                if marker is None:
                    return

    def _value(self, reader: Reader, types: frozenset[str]) -> Steps[None]:
        if types == {"string"}:
            yield from self._string(reader)
        else:
            text, end = yield from reader.read_until(self._value_ends)
            if end is not None:
                text = json_literal(text.removeprefix("\n").removesuffix("\n"), types)
            if text:
                yield Arguments(text)
        yield from reader.take(self._tags.parameter_close)

    def _string(self, reader: Reader) -> Steps[None]:
        """Passes a string on while it is written; one that is cut short has no closing quote."""
        yield Arguments('"')
        yield from reader.take("\n")
        while True:
            found = first_marker(reader.text, self._value_ends)
            length = len(reader.text) - partial_marker(reader.text, self._value_ends) if found is None else found[0]
            piece = reader.text[:length]
            if found is not None:
                piece = piece.removesuffix("\n")
            elif not reader.is_final:
                length = len(piece := piece.removesuffix("\n"))
            else:
                length = len(piece := reader.text)
            reader.consume(length)
            if piece:
                yield Arguments(_escaped(piece))
            if found is not None:
                yield Arguments('"')
                return
            if not (yield from reader.more()):
                return


def _named_tag(reader: Reader, prefix: str, suffix: str) -> Steps[str | None]:
    """Consumes `prefix`, a name and `suffix`, and returns the name; None, and nothing consumed, for anything else."""
    while True:
        head = reader.text[:_LONGEST_TAG]
        if head.startswith(prefix):
            end = head.find(suffix, len(prefix))
            if end >= 0:
                name = head[len(prefix) : end]
                if not name.strip() or "<" in name or "\n" in name:
                    return None
                reader.consume(end + len(suffix))
                return name.strip()
            if len(head) == _LONGEST_TAG:
                return None
        elif not prefix.startswith(head):
            return None
        if not (yield from reader.more()):
            return None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a schema allows for one parameter; a string where it does not say.

    Schemas are the client's, so nothing about their form is taken for granted.
    """
    properties = schema.get("properties")
    return _types(properties.get(key) if isinstance(properties, Mapping) else None) or frozenset({"string"})


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(item for item in kind if isinstance(item, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(name for value in schema["enum"] for name in _TYPES.get(type(value), ())[:1])
    found: frozenset[str] = frozenset()
    for word in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(word), list):
            found = found.union(*(_types(item, depth + 1) for item in schema[word]))
    return found


def json_literal(text: str, types: frozenset[str]) -> str:
    """A bare value as JSON of one of `types`; as a string when it is none of them."""
    bare = text.strip()
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        value = json.loads(bare, parse_constant=_refused)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_null = value is None and "string" not in types
    if is_null or not types.isdisjoint(_TYPES[type(value)]):
        return bare if not isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
