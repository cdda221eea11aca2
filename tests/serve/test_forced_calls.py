"""Calls that a request forces: what the engine is made to write is what the parsers read, in every format."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.text.transcripts import TranscriptFormat

from .fake_engine import EOS, FakeEngine
from .grammar_writer import NOW, WEATHER, GrammarWriter, arguments_are_valid
from .sse import events
from .test_tools import PATH, REPLIES, TEMPLATE, served, tool_engine

ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER, NOW]}
NAMED = {"type": "function", "function": {"name": "weather"}}
STRICT = {**ASK, "tools": [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}, NOW]}
SPECIAL = {
    "hermes": [], "llama3_json": ["<|python_tag|>"], "deepseek_v3": REPLIES["deepseek_v31"][2], "qwen3_coder": [],
    **{calls: special for calls, (_, _, special) in REPLIES.items()},
}  # fmt: skip
OWN_FORMAT = (
    "hermes", "llama3_json", "deepseek_v3", "deepseek_v31", "kimi_k2", "openai", "qwen3_coder", "minimax_m2",
)  # fmt: skip
FORMATS: list[Any] = [*OWN_FORMAT, None]


def configured(calls: Any, reasoning: Any = None) -> ServerConfig:
    reasoning = "openai_gptoss" if calls == "openai" else reasoning
    return ServerConfig(enable_auto_tool_choice=calls is not None, tool_call_parser=calls, reasoning_parser=reasoning)


def engine_of(calls: str | None, *more: str) -> FakeEngine:
    return tool_engine("x", [*SPECIAL.get(calls or "", []), *more])


def reply_to(client: TestClient, body: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


def streamed_calls(client: TestClient, body: dict[str, Any]) -> tuple[list[list[str]], str]:
    """Name and arguments of each call, and the finish reason."""
    calls: list[list[str]] = []
    reason = None
    for chunk in events(client, PATH, body)[:-1]:
        (choice,) = chunk["choices"]
        reason = choice["finish_reason"] or reason
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    assert reason is not None
    return calls, reason


@pytest.mark.parametrize("calls", FORMATS)
def test_whatever_the_grammar_allows_is_read_as_valid_calls(calls: str | None) -> None:
    engine = engine_of(calls)
    writer = GrammarWriter(engine.tokenizer)
    with served(engine, configured(calls)) as client:
        for choice in ("required", NAMED):
            body = ASK | {"tool_choice": choice}
            reply_to(client, body)
            constraint = engine.submitted[-1][1].structured_outputs
            for seed in range(5):
                ids = writer.written(constraint, seed)
                engine.script = lambda _prompt, _index, ids=ids: [*ids, EOS]
                whole = reply_to(client, body)
                message, text = whole["message"], engine.tokenizer.decode(ids, skip_special_tokens=False)
                assert message["content"] is None, text
                made = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
                assert made, text
                assert all(arguments_are_valid(*call) for call in made), text
                assert streamed_calls(client, body) == ([list(call) for call in made], whole["finish_reason"])
                assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
                if choice is NAMED:
                    assert [name for name, _ in made] == ["weather"]


@pytest.mark.parametrize("calls", OWN_FORMAT)
def test_the_grammar_is_the_models_own_format(calls: Any) -> None:
    own = {
        "hermes": '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "llama3_json": '{"name": "now", "parameters": {}}',
        "deepseek_v3": "{0}{2}function{4}now\n```json\n{{}}\n```{3}{1}",
        "deepseek_v31": "{0}{2}now{4}{{}}{3}{1}",
        "kimi_k2": "{0}{2}functions.now:0{4}{{}}{3}{1}",
        "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}",
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    }[calls]
    if calls in ("deepseek_v3", "deepseek_v31", "kimi_k2"):
        own = own.format(*SPECIAL[calls])
    engine = engine_of(calls)
    writer = GrammarWriter(engine.tokenizer)
    with served(engine, configured(calls)) as client:
        reply_to(client, ASK | {"tool_choice": "required"})
        constraint = engine.submitted[-1][1].structured_outputs
        assert writer.accepts(constraint, own)
        assert not writer.accepts(constraint, "It rains.")
        assert not writer.accepts(constraint, own.replace("now", "later"))
        syntax = TranscriptFormat("openai_gptoss" if calls == "openai" else None, calls).call_syntax
        call = own.removeprefix(syntax.begin).removesuffix(syntax.end)
        twice = f"{syntax.begin}{call}{syntax.separator}{call}{syntax.end}"
        assert writer.accepts(constraint, twice) == (calls != "openai"), "harmony ends with its first call"
        reply_to(client, ASK | {"tool_choice": "required", "parallel_tool_calls": False})
        constraint = engine.submitted[-1][1].structured_outputs
        assert writer.accepts(constraint, own)
        assert not writer.accepts(constraint, twice)
        reply_to(client, ASK | {"tool_choice": NAMED})
        assert not writer.accepts(engine.submitted[-1][1].structured_outputs, own)


def test_forced_calls_need_no_parser_and_are_a_list_as_in_vllm() -> None:
    arguments = '{"city": "Köln", "days": 3}'
    engine = tool_engine(f'[{{"name": "weather", "parameters": {arguments}}}, {{"name": "now", "parameters": {{}}}}]')
    with served(engine, ServerConfig()) as client:
        choice = reply_to(client, ASK | {"tool_choice": "required"})
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        assert [function["name"] for function in functions] == ["weather", "now"]
        assert [function["arguments"] for function in functions] == [arguments, "{}"]
        assert choice["finish_reason"] == "tool_calls"
        cut = reply_to(client, ASK | {"tool_choice": "required", "max_tokens": 60})
        assert cut["finish_reason"] == "length"
        engine.script = lambda _prompt, _index: [*engine.tokenizer.encode(arguments), EOS]
        named = reply_to(client, ASK | {"tool_choice": NAMED})
        assert named["message"]["tool_calls"][0]["function"] == {
            "name": "weather", "arguments": arguments,
        }  # fmt: skip
        assert named["finish_reason"] == "stop"


THINKING = TEMPLATE.replace("<think>\n", "{{ thinking }}")


@pytest.mark.parametrize("added", [[], ["<think>", "</think>", "<tool_call>", "</tool_call>"]])
@pytest.mark.parametrize("demand", ["calls", "json", "regex", "choice", "grammar"])
def test_the_constraint_begins_behind_the_reasoning(added: list[str], demand: str) -> None:
    extra, text = {
        "calls": ({**ASK, "tool_choice": "required"}, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
        "json": ({"response_format": {"type": "json_object"}}, '{\n  "a": 1\n}'),
        "regex": ({"guided_regex": r"/\d+\n"}, "/12\n"),
        "choice": ({"guided_choice": ["<yes>", 'a"b', "\u20ac"]}, 'a"b'),
        "grammar": ({"guided_grammar": 'start: pair+\npair: A "b"\nA: /a+/'}, "aabab"),
    }[demand]  # fmt: skip
    body = {name: value for name, value in ASK.items() if name != "tools"} | extra
    engine = FakeEngine("x", template=THINKING, added=added)
    engine.max_model_len = 4096
    writer = GrammarWriter(engine.tokenizer)
    with served(engine, configured("hermes", "qwen3")) as client:

        def constraint(**more: Any) -> Any:
            reply_to(client, body | more)
            return engine.submitted[-1][1].structured_outputs

        may_reason = constraint()
        assert may_reason.begins_after is None
        for lead in ("", "<think>\nHm {\n</think>\n\n", "<think></think>"):
            assert writer.accepts(may_reason, lead + text), lead
        assert not writer.accepts(may_reason, "Hm. " + text)
        assert not writer.accepts(may_reason, "<think>Hm.</think>Hm. " + text)
        assert not writer.accepts(may_reason, "<think>" + text)

        reasons = constraint(chat_template_kwargs={"thinking": "<think>\n"})
        assert reasons.begins_after == "</think>"
        does_not = constraint(chat_template_kwargs={"thinking": "<think>\n\n</think>\n\n"})
        assert does_not.begins_after is None
        for lead in ("", "\n\n"):
            assert writer.accepts(reasons, lead + text)
        assert not writer.accepts(reasons, "Hm." + text)
        if demand == "calls":
            assert writer.accepts(does_not, text)
            assert not writer.accepts(does_not, "<think></think>" + text)
        else:
            assert does_not.grammar == extra.get("guided_grammar")  # as the client wrote it
        begun = [*ASK["messages"], {"role": "assistant", "content": "<think>\nWell"}]
        assert constraint(messages=begun, continue_final_message=True).begins_after == "</think>"
        begun[-1] = {"role": "assistant", "content": "{"}
        assert constraint(messages=begun, continue_final_message=True).begins_after is None


@pytest.mark.parametrize("is_special", [True, False])
def test_harmonys_constraints_are_those_of_the_final_channel(is_special: bool) -> None:
    engine = tool_engine("x", SPECIAL["openai"] if is_special else [])
    writer = GrammarWriter(engine.tokenizer)
    aside = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    final = '<|channel|>final<|message|>{"a": [1]}'
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    with served(engine, configured("openai")) as client:
        plain = {name: value for name, value in ASK.items() if name != "tools"}
        reply_to(client, plain | {"response_format": {"type": "json_object"}})
        constraint = engine.submitted[-1][1].structured_outputs
        assert writer.accepts(constraint, final)
        assert writer.accepts(constraint, aside + final)
        assert not writer.accepts(constraint, '{"a": [1]}')
        assert not writer.accepts(constraint, aside + "<|channel|>final<|message|>Well")
        engine.script = lambda _prompt, _index: [*engine.tokenizer.encode(aside + final), EOS]
        message = reply_to(client, plain | {"response_format": {"type": "json_object"}})["message"]
        assert (message["reasoning"], message["content"]) == ("Hm {.", '{"a": [1]}')

        reply_to(client, ASK | {"response_format": {"type": "json_object"}})
        either = engine.submitted[-1][1].structured_outputs
        assert writer.accepts(either, aside + final)
        assert writer.accepts(either, aside + call)
        reply_to(client, STRICT)
        free = engine.submitted[-1][1].structured_outputs
        assert writer.accepts(free, aside + call)
        assert writer.accepts(free, "<|channel|>final<|message|>Well")


def test_who_reads_harmonys_reasoning_knows_its_calls_too() -> None:
    engine = tool_engine("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", SPECIAL["openai"])
    with served(engine, ServerConfig(reasoning_parser="openai_gptoss")) as client:
        choice = reply_to(client, ASK | {"tool_choice": "required"})
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


@pytest.mark.parametrize("calls", OWN_FORMAT)
def test_strict_functions_are_held_to_their_schemas_where_the_model_calls_them(calls: str) -> None:
    engine = engine_of(calls)
    writer = GrammarWriter(engine.tokenizer)
    with served(engine, configured(calls)) as client:
        reply_to(client, STRICT)
        free = engine.submitted[-1][1].structured_outputs
        reply_to(client, STRICT | {"tool_choice": "required"})
        forced = engine.submitted[-1][1].structured_outputs
    good = engine.tokenizer.decode(writer.written(forced, 3), skip_special_tokens=False)
    assert writer.accepts(free, good)
    bad = good.replace("days", "weeks").replace("{}", "[]").replace("now", "later")
    assert bad != good
    assert not writer.accepts(free, bad)
    if calls != "openai":
        assert writer.accepts(free, "It rains.")
        assert writer.accepts(free, "")
    if calls not in ("openai", "llama3_json"):
        assert writer.accepts(free, "I look: " + good)


def test_keywords_that_cannot_be_enforced_are_dropped_unless_the_function_is_strict() -> None:
    engine = engine_of("hermes")
    writer = GrammarWriter(engine.tokenizer)
    parameters = {"properties": {"x": {"type": "integer", "not": {"const": 3}}}}
    with served(engine, configured("hermes")) as client:
        for strict in (False, True):
            body = ASK | {"tools": function(parameters=parameters, strict=strict), "tool_choice": "required"}
            reply_to(client, body)
        loose, strict = (params.structured_outputs for _, params in engine.submitted)
    assert writer.accepts(loose, '<tool_call>\n{"name": "f", "arguments": {"x": 4}}\n</tool_call>')
    assert not writer.accepts(loose, '<tool_call>\n{"name": "f", "arguments": {"x": "4"}}\n</tool_call>')
    with pytest.raises(AssertionError, match="not"):
        writer.matcher(strict)


@pytest.mark.parametrize("calls", ["hermes", "kimi_k2", "deepseek_v3"])
def test_a_constrained_content_stands_beside_calls(calls: str) -> None:
    engine = engine_of(calls)
    writer = GrammarWriter(engine.tokenizer)
    with served(engine, configured(calls)) as client:
        reply_to(client, ASK | {"response_format": {"type": "json_object"}})
        either = engine.submitted[-1][1].structured_outputs
        reply_to(client, ASK | {"tool_choice": "required"})
        forced = engine.submitted[-1][1].structured_outputs
        reply_to(client, ASK | {"tool_choice": "required", "response_format": {"type": "json_object"}})
        assert engine.submitted[-1][1].structured_outputs == forced
    assert writer.accepts(either, '{"a": 1}')
    assert writer.accepts(either, engine.tokenizer.decode(writer.written(forced, 1), skip_special_tokens=False))
    assert not writer.accepts(either, "It rains.")


def test_a_subset_of_the_tools_can_be_required() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    engine = tool_engine('[{"name": "weather", "parameters": {"city": "x", "days": 1}}]')
    with served(engine, ServerConfig()) as client:
        assert reply_to(client, ASK | {"tool_choice": allowed})["finish_reason"] == "tool_calls"
    grammar = engine.submitted[-1][1].structured_outputs.grammar
    assert "weather" in grammar
    assert "now" not in grammar


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return {"properties": {"x": schema}}


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tool"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "no tool"),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": {}}}, "tool_choice", "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "missing"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice.name", "unknown"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "'f'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}},
         "tool_choice.allowed_tools.mode", "auto"),
        ({"tool_choice": "required", "tools": function(name="a b")}, "tools", "'a b'"),
        ({"tool_choice": "required", "tools": function(name='x": ')}, "tools", "letters"),
        ({"tool_choice": "required", "tools": function(parameters={"type": "string"})}, "tools", "object"),
        ({"tool_choice": "required", "tools": function(parameters={"type": ["array", "null"]})}, "tools", "object"),
        ({"tool_choice": "required", "tools": function(parameters={"type": {}})}, "tools", "object"),
        ({"tool_choice": "required", "tools": function(parameters=deep(100))}, "tools", "nested"),
        ({"tool_choice": "required", "tools": function(parameters={"enum": [0] * 20001})}, "tools", "20000"),
        ({"tool_choice": "required", "tools": [tool for i in range(129) for tool in function(name=f"f{i}")]},
         "tools", "128"),
        ({"tool_choice": "required", "tools": function(parameters={"description": "x" * 300_000})}, "tools", "bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_forced_is_refused_by_name(extra: dict[str, Any], param: str, says: str) -> None:
    engine = tool_engine("x")
    with served(engine, configured("hermes")) as client:
        reply = client.post(PATH, json=ASK | extra)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param, error
    assert says in error["message"]
    assert not engine.submitted


NESTED = {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}


@pytest.mark.parametrize("calls", ["qwen3_coder", "minimax_m2"])
def test_what_bare_values_cannot_be_held_to_is_forced_as_json_and_refused_otherwise(calls: str) -> None:
    engine = engine_of(calls)
    writer = GrammarWriter(engine.tokenizer)
    tools = function(parameters=NESTED)
    with served(engine, configured(calls)) as client:
        reply_to(client, ASK | {"tools": tools, "tool_choice": "required"})
        assert writer.accepts(engine.submitted[-1][1].structured_outputs, '[{"name": "f", "parameters": {"x": 5}}]')
        engine.script = lambda _prompt, _index: [*engine.tokenizer.encode('{"x": 5}'), EOS]
        named = {"type": "function", "function": {"name": "f"}}
        message = reply_to(client, ASK | {"tools": tools, "tool_choice": named})["message"]
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 5}'}

        strict = ASK | {"tools": function(parameters=NESTED, strict=True)}
        error = client.post(PATH, json=strict).json()["error"]
        assert error["param"] == "tools"
        assert "--tool-call-parser" in error["message"]
        assert "'f'" in error["message"]
        # Beside a strict function, one that is not stays free.
        reply_to(client, ASK | {"tools": [*STRICT["tools"], *tools]})
        free = engine.submitted[-1][1].structured_outputs
    call = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=x>\nanything\n</parameter>\n</function>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="x">anything</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[calls]
    assert writer.accepts(free, call)
    assert not writer.accepts(free, call.replace('f">', 'g">').replace("=f>", "=g>"))


def test_a_constrained_content_cannot_be_told_from_calls_without_a_marker() -> None:
    with served(tool_engine("x"), configured("llama3_json")) as client:
        error = client.post(PATH, json=ASK | {"response_format": {"type": "json_object"}}).json()["error"]
        assert error["param"] == "tools"
        assert "content" in error["message"]


VALUES = {
    "text": {"type": "string", "description": "any"}, "maybe": {"type": ["string", "null"]}, "what": {},
    "both": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "size": {"enum": ["S", "M"], "title": "t"},
    "count": {"type": "integer", "maximum": 9}, "parts": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "kind": {"const": "k"},
}  # fmt: skip


@pytest.mark.parametrize("calls", ["qwen3_coder", "minimax_m2"])
@pytest.mark.parametrize("added", [[], ["</parameter>", "<tool_call>", "</tool_call>"]])
def test_bare_values_have_the_types_of_their_schemas(calls: str, added: list[str]) -> None:
    engine = FakeEngine("x", template=TEMPLATE, added=added)
    engine.max_model_len = 4096
    writer = GrammarWriter(engine.tokenizer)
    parameters = {"type": "object", "properties": VALUES, "required": list(VALUES)}
    named = {"type": "function", "function": {"name": "f"}}
    body = ASK | {"tools": function(parameters=parameters), "tool_choice": named}
    with served(engine, configured(calls)) as client:
        reply_to(client, body)
        constraint = engine.submitted[-1][1].structured_outputs
        for seed in range(4):
            ids = writer.written(constraint, seed)
            engine.script = lambda _prompt, _index, ids=ids: [*ids, EOS]
            (call,) = reply_to(client, body)["message"]["tool_calls"]
            value = json.loads(call["function"]["arguments"])
            assert list(value) == list(VALUES), engine.tokenizer.decode(ids)
            assert isinstance(value["text"], str)
            assert isinstance(value["maybe"], str | None)
            assert isinstance(value["both"], str | int)
            assert value["size"] in ("S", "M")
            assert isinstance(value["count"], int)
            assert value["count"] <= 9
            assert set(value["parts"]) <= {1, 2}
            assert value["flag"] in (True, False, None)
            assert value["kind"] == "k"
