"""Calls in plain JSON, which a model writes when it is made to: read the same however they are cut, losing nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.text.transcripts import (
    Arguments,
    CallBegun,
    Content,
    Event,
    JsonListParser,
    NamedCallParser,
    TranscriptFormat,
    TranscriptParser,
)

from .transcripts import call, joined

LISTS: list[tuple[str, list[Event]]] = [
    ('[{"name": "f", "parameters": {"a": "]}"}}, {"name": "g", "arguments": {}}]',
     [*call("f", '{"a": "]}"}'), *call("g", "{}")]),
    ('\n[ {"name":"f","parameters":{"a":[1]}} ]\n', call("f", '{"a":[1]}')),
    ('[{"name": "f", "parameters": {}}] and more', [*call("f", "{}"), Content(" and more")]),
    ('[{"name": "f", "parameters": {}}, x', [*call("f", "{}"), Content(", x")]),
    ('[{"name": "f", "parameters": {"a": 1', [CallBegun("f"), Arguments('{"a": 1')]),
    ('[{"na', [Content('[{"na')]),
    ("[1, 2]", [Content("[1, 2]")]),
    ("It rains.", [Content("It rains.")]),
    ("", []),
]  # fmt: skip
NAMED: list[tuple[str, list[Event]]] = [
    ('{"a": {"b": "}"}}', call("f", '{"a": {"b": "}"}}')),
    ("\n{}\n", call("f", "{}")),
    ('{"a": 1', [CallBegun("f"), Arguments('{"a": 1')]),
    ("{} more", [*call("f", "{}"), Content("more")]),
    ("It rains.", [Content("It rains.")]),
    ("", []),
]


def read(parser: TranscriptParser, pieces: list[str]) -> list[Event]:
    return joined([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


@pytest.mark.parametrize(("text", "expected"), LISTS)
def test_lists_of_calls_at_every_cut(text: str, expected: list[Event]) -> None:
    assert read(JsonListParser(), list(text)) == expected
    for cut in range(len(text) + 1):
        assert read(JsonListParser(), [text[:cut], text[cut:]]) == expected, text[:cut]


@pytest.mark.parametrize(("text", "expected"), NAMED)
def test_arguments_alone_at_every_cut(text: str, expected: list[Event]) -> None:
    assert read(NamedCallParser("f"), list(text)) == expected
    for cut in range(len(text) + 1):
        assert read(NamedCallParser("f"), [text[:cut], text[cut:]]) == expected, text[:cut]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(['{"name": "f", "parameters": ', "{}", "}", "[", "]", ",", " ", "x", "<", '"'])))
def test_heaps_of_pieces_never_raise_and_never_depend_on_cuts(pieces: list[str]) -> None:
    for parser in (JsonListParser, lambda: NamedCallParser("f")):
        assert read(parser(), pieces) == read(parser(), ["".join(pieces)])


def test_they_stand_behind_reasoning_as_calls_of_any_format_do() -> None:
    parser = TranscriptFormat("qwen3").parser({}, reasoning_is_open=True, plain_calls=NamedCallParser("f"))
    assert parser is not None
    assert read(parser, list("Hm.</think>\n{}"))[1:] == call("f", "{}")
