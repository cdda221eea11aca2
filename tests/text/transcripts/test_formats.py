"""Which parser a name means, when a reply begins inside the reasoning, and how bare values become JSON."""

# ruff: noqa: RUF001 - DeepSeek's markers have these bars

import json
from typing import get_args

import pytest

from tokenspeed_jax.text.transcripts import CallBegun, ReasoningFormat, ToolCallFormat, TranscriptFormat
from tokenspeed_jax.text.transcripts.xml_calls import json_literal, value_types


@pytest.mark.parametrize("reasoning", [None, *get_args(ReasoningFormat)])
@pytest.mark.parametrize("calls", [None, *get_args(ToolCallFormat)])
def test_formats_go_together_unless_only_one_is_harmony(reasoning, calls) -> None:
    form = TranscriptFormat(reasoning, calls)
    is_harmony = (reasoning == "openai_gptoss", calls == "openai")
    assert (form.defect() is None) == (
        is_harmony in ((False, False), (True, True)) or (reasoning, calls) == ("openai_gptoss", None)
    )
    if form.defect() is None:
        parser = form.parser({}, reasoning_is_open=False)
        assert (parser is None) == (reasoning is None and calls is None)
        assert bool(form.markers(has_tools=True)) == (parser is not None)
        assert bool(form.markers(has_tools=False)) == (reasoning is not None)


def test_the_prompt_or_the_continued_message_says_whether_reasoning_is_open() -> None:
    form = TranscriptFormat("qwen3", None)
    assert form.reasoning_is_open("assistant\n<think>\n", None)
    assert not form.reasoning_is_open("assistant\n<think>\n\n</think>\n\n", None)
    assert not form.reasoning_is_open("explain <think>\nassistant\n", None)
    assert form.reasoning_is_open("", "<think>so far")
    assert not form.reasoning_is_open("<think>", "<think>so far</think> well")
    assert not TranscriptFormat(None, "hermes").reasoning_is_open("<think>", None)
    assert not TranscriptFormat("openai_gptoss", "openai").reasoning_is_open("<think>", None)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": [1, "a"]}, {"integer", "string"}),
        ({"anyOf": [{"type": "number"}, {"oneOf": [{"type": "null"}]}]}, {"number", "null"}),
        ({}, {"string"}),
        ("nonsense", {"string"}),
        ({"type": 5}, {"string"}),
        ({"anyOf": "x", "enum": 3}, {"string"}),
    ],
)
def test_types_of_a_schema(schema, types) -> None:
    assert value_types({"properties": {"key": schema}}, "key") == types
    assert value_types({"properties": {"key": schema}}, "other") == {"string"}
    assert value_types({"properties": [schema]}, "key") == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, 5),
        ("5", {"number"}, 5),
        ("5.5", {"integer"}, "5.5"),
        ("5", {"string", "null"}, "5"),
        ("null", {"integer"}, None),
        ("null", {"string"}, "null"),
        ("null", {"string", "null"}, None),
        ("True", {"boolean"}, True),
        (" false\n", {"boolean"}, False),
        ('{"a": [1]}', {"object"}, {"a": [1]}),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("NaN", {"number"}, "NaN"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("9" * 5000, {"integer"}, "9" * 5000),
        ('"quoted"', {"string", "integer"}, "quoted"),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value)[:20],
)
def test_bare_values_become_json_of_an_allowed_type(text, types, value) -> None:
    assert json.loads(json_literal(text, frozenset(types))) == value


def test_long_names_and_headers_are_held_for_a_bounded_while() -> None:
    for form, begin in (
        (TranscriptFormat(None, "deepseek_v31"), "<｜tool▁call▁begin｜>"),
        (TranscriptFormat(None, "qwen3_coder"), "<tool_call><function="),
        (TranscriptFormat("openai_gptoss", "openai"), "<|channel|>"),
    ):
        parser = form.parser({}, reasoning_is_open=False)
        assert parser is not None
        events = parser.feed(begin + "x" * 2000)
        assert "".join(event.text for event in events) == begin + "x" * 2000
        assert not any(isinstance(event, CallBegun) for event in parser.finish())
