"""Constrained replies and forced calls of the real server: a model without sense writes only what it may."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from .conftest import TINY
from .server_process import ServerProcess

TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "<assistant><think>{% if not thinking %}</think>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "The quick brown fox"}]


class Order(pydantic.BaseModel):
    """Small enough for any text to end soon."""

    dish: Literal["soup", "fish"]
    count: int = pydantic.Field(ge=1, le=99)
    hot: bool


SCHEMA = {**Order.model_json_schema(), "additionalProperties": False}
ORDER = {"type": "function", "function": {"name": "order", "parameters": SCHEMA}}
LEAVE = {"type": "function", "function": {"name": "leave"}}
NAMED = {"type": "function", "function": {"name": "order"}}


@pytest.fixture(scope="module")
def calling_server(tmp_path_factory: pytest.TempPathFactory, compiled_programs: Path) -> Iterator[ServerProcess]:
    """A server that reads calls and reasoning, of a checkpoint whose template shows tools. It takes one sample at a
    time, for which it compiles the fewest programs."""
    folder = tmp_path_factory.mktemp("calling") / "llama"
    shutil.copytree(TINY / "llama", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = [
        "--model", str(folder), "--served-model-name=tiny", "--port=0", "--dtype=float32", "--max-num-seqs=1",
        "--max-num-batched-tokens=128", "--kv-cache-memory-bytes=33554432", "--no-warmup", "--disable-progress-bars",
        f"--compilation-cache-dir={compiled_programs}", "--enable-auto-tool-choice", "--tool-call-parser=hermes",
        "--reasoning-parser=qwen3",
    ]  # fmt: skip
    with ServerProcess(options) as server:
        yield server


@pytest.fixture
def calling(calling_server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The real `openai` client of `calling_server`."""
    url = calling_server.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_replies_follow_the_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 1.0, "max_tokens": 400, "seed": 7}
    whole = client.chat.completions.parse(response_format=Order, n=3, **request)
    orders = [choice.message.parsed for choice in whole.choices]
    assert all(isinstance(order, Order) for order in orders)
    assert len({choice.message.content for choice in whole.choices}) > 1
    assert all(choice.finish_reason == "stop" for choice in whole.choices)
    with client.chat.completions.stream(response_format=Order, **request) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == orders[0]


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_regex": "(ab|c){3}[0-9]"}, "(ab|c){3}[0-9]"),
        ({"structured_outputs": {"choice": ["yes", "no", "\u20ac 5"]}}, "yes|no|\u20ac 5"),
        ({"guided_grammar": 'start: "(" INT ("," INT)? ")"\nINT: /[0-9]{1,3}/'}, r"\([0-9]{1,3}(,[0-9]{1,3})?\)"),
        ({"ebnf": 'root ::= "<" word ">"\nword ::= [a-f]{2,4}'}, "<[a-f]{2,4}>"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1, "\u00e9"]}}}},
         r'\s*\[\s*1\s*,\s*"(\u00e9|\\u00e9)"\s*\]'),
    ],
)  # fmt: skip
def test_completions_are_what_was_asked_for(client: openai.OpenAI, field: dict[str, Any], pattern: str) -> None:
    reply = client.completions.create(
        model="tiny", prompt="The quick", max_tokens=400, temperature=1.0, n=3, seed=3, extra_body=field
    )
    for choice in reply.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_follow_their_schemas_whole_and_streamed(calling: openai.OpenAI, choice: Any) -> None:
    request: dict[str, Any] = {
        "model": "tiny", "messages": MESSAGES, "tools": [ORDER, LEAVE], "tool_choice": choice,
        "parallel_tool_calls": False, "temperature": 1.0, "max_tokens": 600,
    }  # fmt: skip
    names = set()
    for seed in range(3):
        whole = calling.chat.completions.create(seed=seed, **request).choices[0]
        (call,) = whole.message.tool_calls
        names.add(call.function.name)
        arguments = json.loads(call.function.arguments)
        assert arguments == {} if call.function.name == "leave" else Order(**arguments)
        assert whole.message.content is None
        assert whole.finish_reason == ("tool_calls" if choice == "required" else "stop")
        pieces = [
            made.function
            for chunk in calling.chat.completions.create(seed=seed, stream=True, **request)
            for made in chunk.choices[0].delta.tool_calls or []
        ]
        assert "".join(piece.arguments for piece in pieces) == call.function.arguments
    assert names <= {"order", "leave"}
    assert choice == "required" or names == {"order"}
    broken = {"name": "f", "parameters": {"$ref": "#/nowhere"}, "strict": True}
    with pytest.raises(openai.BadRequestError) as refused:
        calling.chat.completions.create(**request | {"tools": [{"type": "function", "function": broken}]})
    assert refused.value.param == ("tools" if choice == "required" else "tool_choice")


BAD = [
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    ({"guided_json": {"type": "strange"}}, "guided_json"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
     "response_format"),
]  # fmt: skip
HOSTILE: list[dict[str, Any]] = [
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"allOf": [{"$ref": "#"}]}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"enum": list(range(15000))}},
    {"guided_json": {"type": "array", "minItems": 10**9}},
    {"guided_json": {"allOf": [{"anyOf": [{"minLength": i}, {"maxLength": i}]} for i in range(20)]}},
    {"guided_grammar": "start: start"},
    {"guided_grammar": "start: " + "(" * 30000},
    {"guided_regex": "(" * 30000},
    {"ebnf": "root ::= " + "(" * 10000},
]


def test_bad_and_hostile_constraints_are_refused_and_harm_nobody(server: ServerProcess, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "The", "max_tokens": 4}
    before = client.completions.create(**request, temperature=0).choices[0].text
    for field, param in BAD:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(**request, extra_body=field)
        assert error.value.param == param, field
        assert param in error.value.message
    for field in HOSTILE:
        status, reply = server.post("/v1/completions", request | field)
        assert status == 200 or (status, reply["error"]["param"]) == (400, *field), reply
    assert "ok" in server.get("/health")
    assert client.completions.create(**request, temperature=0).choices[0].text == before
