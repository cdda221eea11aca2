"""Constraints on the content, as clients of OpenAI, vLLM and SGLang send them, and as the engine gets them."""

import json
import sys
import threading
from typing import Any

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.engine.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.protocol.json_schemas import MAX_DEPTH, MAX_PROPERTIES, MAX_VALUES

from .fake_engine import FakeEngine

COMPLETIONS = ("/v1/completions", {"model": "fake/model", "prompt": "abc"})
CHAT = ("/v1/chat/completions", {"model": "fake/model", "messages": [{"role": "user", "content": "Hi"}]})
GENERATE = ("/generate", {"text": "abc"})
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}, "required": ["b"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
JSON = StructuredOutputsParams(json=json.dumps(SCHEMA))
AB = StructuredOutputsParams(regex="a|b")
EBNF = 'root ::= item+ "!"\nitem ::= [a-c] | "x"\n'


def guided(**options: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=json.dumps(SCHEMA | {"x-guidance": options}))


SAME_ON_BOTH = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None, "regex": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    ({"response_format": FORMAT}, JSON),
    ({"response_format": FORMAT | {"json_schema": FORMAT["json_schema"] | {"strict": True, "description": "x"}}}, JSON),
    ({"response_format": FORMAT | {"json_schema": FORMAT["json_schema"] | {"strict": False}}}, guided(lenient=True)),
    ({"structured_outputs": {"json": SCHEMA}}, JSON),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": True}}, JSON),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputsParams(json_object=True)),
    ({"structured_outputs": {"regex": "a|b", "json": None, "json_object": False, "structural_tag": None}}, AB),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, StructuredOutputsParams(choice=("yes", "no"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputsParams(grammar='start: "a"')),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, guided(whitespace_pattern=" ?")),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
     guided(whitespace_flexible=False, whitespace_pattern=None)),
    ({"guided_json": SCHEMA}, JSON),
    ({"guided_json": json.dumps(SCHEMA), "guided_decoding_backend": "auto"}, JSON),
    ({"guided_json": True}, StructuredOutputsParams(json=True)),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"}, guided(whitespace_pattern=" ?")),
    ({"guided_regex": "a|b"}, AB),
    ({"guided_choice": ["yes", "no"]}, StructuredOutputsParams(choice=("yes", "no"))),
    ({"guided_grammar": 'start: "a"'}, StructuredOutputsParams(grammar='start: "a"')),
    ({"regex": "a|b"}, AB),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [COMPLETIONS, CHAT])
def test_every_spelling_reaches_the_engine(client: TestClient, engine: FakeEngine, path: str, body: dict) -> None:
    for extra, expected in SAME_ON_BOTH:
        reply = client.post(path, json=body | extra)
        assert reply.status_code == 200, (extra, reply.text)
        assert engine.submitted[-1][1].structured_outputs == expected, extra


def test_sglangs_spellings_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    path, body = GENERATE
    given = [
        ({"json_schema": json.dumps(SCHEMA)}, JSON), ({"json_schema": SCHEMA}, JSON), ({"regex": "a|b"}, AB),
        ({"json_schema": None, "regex": None, "ebnf": None}, None),
    ]  # fmt: skip
    for sampling, expected in given:
        assert client.post(path, json=body | {"sampling_params": sampling}).status_code == 200
        assert engine.submitted[-1][1].structured_outputs == expected


def test_properties_keep_the_clients_order(client: TestClient, engine: FakeEngine) -> None:
    path, body = CHAT
    client.post(path, json=body | {"response_format": FORMAT})
    constraint = engine.submitted[-1][1].structured_outputs
    assert list(json.loads(constraint.json)["properties"]) == ["b", "a"]


def test_ebnf_is_rewritten_as_lark(client: TestClient, engine: FakeEngine) -> None:
    path, body = CHAT
    for field in ({"ebnf": EBNF}, {"guided_grammar": EBNF}, {"structured_outputs": {"grammar": EBNF}}):
        assert client.post(path, json=body | field).status_code == 200
        written = engine.submitted[-1][1].structured_outputs.grammar
        assert "start:" in written
        assert "::=" not in written
    path, body = GENERATE
    assert client.post(path, json=body | {"sampling_params": {"ebnf": EBNF}}).status_code == 200
    assert engine.submitted[-1][1].structured_outputs.grammar == written


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED_ON_BOTH = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_object", "json_schema": FORMAT["json_schema"]}},
     "response_format.json_schema", "json_schema only"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
     "response_format.json_schema.name", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
     "response_format.json_schema.schema", "missing"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type", "structural_tag"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "unknown"),
    ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "response_format, guided_json"),
    ({"guided_regex": "a", "guided_choice": ["a"], "regex": "b"}, "guided_choice",
     "guided_regex, guided_choice, regex exclude"),
    ({"structured_outputs": {}}, "structured_outputs", "none"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.json", "json, regex"),
    ({"structured_outputs": {"colour": "a"}}, "structured_outputs.colour", "unknown"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "str"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "non-empty"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", "non-empty"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON"),
    ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "schema"),
    ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag", "supported"),
    ({"structured_outputs": {"json": {}, "disable_additional_properties": True}},
     "structured_outputs.disable_additional_properties", "supported"),
    ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
     "structured_outputs.whitespace_pattern", "JSON"),
    ({"guided_choice": ["a"] * 5000}, "guided_choice", "4096"),
    ({"guided_regex": "", }, "guided_regex", "guided_regex must be"),
    ({"guided_json": "x" * 100}, "guided_json", "JSON"),
    ({"guided_json": "[" * 5000}, "guided_json", "nested"),
    ({"guided_json": nested(MAX_DEPTH)}, "guided_json", "nested"),
    ({"guided_json": {"enum": list(range(MAX_VALUES))}}, "guided_json", str(MAX_VALUES)),
    ({"guided_json": {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES + 1)}}}, "guided_json", "one object"),
    ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex", "guided_regex has"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "guided_json"),
    ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "guided_decoding_backend", "xgrammar"),
    ({"structural_tag": "x"}, "structural_tag", "supported"),
    ({"ebnf": "root ::= nothing"}, "ebnf", "nothing"),
    ({"ebnf": 'root ::= "a'}, "ebnf", "line 1"),
    ({"ebnf": 'root = "a"'}, "ebnf", "::="),
    ({"ebnf": "root ::= " + "(" * 5000}, "ebnf", "EBNF"),
    ({"ebnf": "root ::= a\n" * 5000}, "ebnf", "limit"),
    ({"ebnf": 'root ::= "\\'}, "ebnf", "EBNF"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), [COMPLETIONS, CHAT])
def test_what_cannot_be_served_is_refused_by_name(engine: FakeEngine, path: str, body: dict) -> None:
    with TestClient(create_app(engine, ServerConfig()), raise_server_exceptions=False) as client:
        for extra, param, says in REFUSED_ON_BOTH:
            reply = client.post(path, json=body | extra)
            assert reply.status_code == 400, (extra, reply.text)
            error = reply.json()["error"]
            assert error["param"] == param, error
            assert says in error["message"]
    assert not engine.submitted


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"regex": "a", "ebnf": EBNF}, "sampling_params.ebnf"),
        ({"json_schema": "{"}, "sampling_params.json_schema"),
        ({"json_schema": []}, "sampling_params.json_schema"),
        ({"regex": ""}, "sampling_params.regex"),
        ({"ebnf": "x"}, "sampling_params.ebnf"),
    ],
)
def test_sglangs_spellings_are_refused_by_name(client: TestClient, sampling: dict, param: str) -> None:
    path, body = GENERATE
    error = client.post(path, json=body | {"sampling_params": sampling}).json()["error"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("place", "extra", "engine_name", "param"),
    [
        (CHAT, {"response_format": FORMAT}, "json", "response_format"),
        (CHAT, {"guided_regex": "("}, "regex", "guided_regex"),
        (COMPLETIONS, {"guided_grammar": "x"}, "grammar", "guided_grammar"),
        (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "regex", "structured_outputs.regex"),
        (GENERATE, {"sampling_params": {"json_schema": "{}"}}, "json", "sampling_params.json_schema"),
    ],
)
def test_what_the_engine_refuses_is_called_by_the_clients_name(
    engine: FakeEngine, client: TestClient, place: tuple, extra: dict, engine_name: str, param: str
) -> None:
    name = f"structured_outputs.{engine_name}"

    def refuse(*_: object, **__: object) -> str:
        raise InvalidRequest(f"{name} does not parse: line 3, column 4", parameter=name)

    for method in ("submit", "compile_grammar"):
        setattr(engine, method, refuse)
        reply = client.post(place[0], json=place[1] | extra)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["param"], error["message"]) == (param, f"{param} does not parse: line 3, column 4")


def test_constraints_are_compiled_before_they_reach_the_event_loop(client: TestClient, engine: FakeEngine) -> None:
    path, body = CHAT
    client.post(path, json=body | {"response_format": FORMAT})
    assert engine.compiled == [engine.submitted[-1][1].structured_outputs]
    client.post(path, json=body)
    assert len(engine.compiled) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_constraint_that_cannot_be_followed_is_the_requests_fault(
    client: TestClient, engine: FakeEngine, stream: bool
) -> None:
    engine.allow(2)
    stopper = threading.Timer(0.1, engine.give_up, ["grammar: too complex"])
    stopper.start()
    path, body = CHAT
    reply = client.post(path, json=body | {"response_format": FORMAT, "stream": stream})
    assert reply.status_code == (200 if stream else 400)
    error = json.loads(reply.text.split("data: ")[-1])["error"]
    assert (error["param"], error["code"]) == ("response_format", "constraint_failed")
    assert "grammar: too complex" in error["message"]
    stopper.join()


def test_generate_shows_why_a_constraint_could_not_be_followed(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    stopper = threading.Timer(0.1, engine.give_up, ["grammar: too complex"])
    stopper.start()
    path, body = GENERATE
    reply = client.post(path, json=body | {"sampling_params": {"regex": "a"}}).json()
    assert reply["meta_info"]["finish_reason"] == {"type": "abort", "message": "grammar: too complex"}
    stopper.join()


def test_without_llguidance_the_field_is_named(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.gbnf_to_lark", None)
    path, body = CHAT
    with TestClient(create_app(engine, ServerConfig(reasoning_parser="qwen3"))) as client:
        for extra in ({"guided_regex": "a"}, {"ebnf": EBNF}):
            reply = client.post(path, json=body | extra)
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == next(iter(extra))
            assert error["message"].startswith(f"{error['param']} needs llguidance")
