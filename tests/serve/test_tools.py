"""Tool calls and reasoning over HTTP, as the real `openai` client sees them."""

# ruff: noqa: RUF001 - DeepSeek's markers have these bars

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn
from starlette.testclient import TestClient

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.cli import bind
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.text import Detokenizer
from tokenspeed_jax.text.transcripts import CallBegun, TranscriptFormat

from .fake_engine import FakeEngine, byte_tokenizer
from .sse import events, joined

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% for call in m.tool_calls %}<call>{{ call.id }} {{ call.function.name }} "
    "{{ call.function.arguments | tojson }}</call>{% endfor %}"
    "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if thinking %}<think>\n{% endif %}{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"model": "fake/model", "messages": [{"role": "user", "content": "Rain?"}], "tools": [WEATHER, NOW]}
HERMES = (
    "<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Köln", "days": 3}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>'
)
DEEPSEEK = (
    "<think>Hm.</think>I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Köln", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
KIMI = (
    "<think>Hm.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Köln", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.now:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
)
MINIMAX = (
    '<think>Hm.</think>I look.<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Köln</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>'
)
REPLIES = {
    "hermes": (HERMES, "qwen3", []),
    "openai": (
        HARMONY,
        "openai_gptoss",
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
    ),
    "deepseek_v31": (
        DEEPSEEK,
        "deepseek_v3",
        [
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
    ),
    "kimi_k2": (
        KIMI,
        "kimi_k2",
        [
            "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ],
    ),
    "minimax_m2": (MINIMAX, "minimax_m2", []),
}  # fmt: skip


def tool_engine(reply: str, special: list[str] | None = None, template: str = TEMPLATE) -> FakeEngine:
    engine = FakeEngine(reply, template=template, special=special or [])
    engine.max_model_len = 4096
    return engine


def tool_config(calls: Any = "hermes", reasoning: Any = "qwen3") -> ServerConfig:
    return ServerConfig(enable_auto_tool_choice=True, tool_call_parser=calls, reasoning_parser=reasoning, port=0)


@contextmanager
def served(engine: FakeEngine, config: ServerConfig) -> Iterator[TestClient]:
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        yield client
    engine.close()


@contextmanager
def openai_served(engine: FakeEngine, config: ServerConfig) -> Iterator[openai.OpenAI]:
    listener = bind(config)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, config), log_config=None, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    host, port = listener.getsockname()[:2]
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", max_retries=9) as client:
        yield client
    server.should_exit = True
    thread.join(30)
    engine.close()


def prompt_text(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1][0], skip_special_tokens=False)


def streamed(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning"] += getattr(delta, "reasoning", None) or ""
        for call in delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(message["calls"])
                message["calls"].append([call.id, call.function.name, ""])
            message["calls"][call.index][2] += call.function.arguments or ""
    return message


@pytest.mark.parametrize("calls", REPLIES)
def test_calls_and_reasoning_whole_and_streamed(calls: str) -> None:
    reply, reasoning, special = REPLIES[calls]
    engine = tool_engine(reply, special)
    with openai_served(engine, tool_config(calls, reasoning)) as client:
        whole = client.chat.completions.create(**ASK).choices[0]
        assert whole.finish_reason == "tool_calls"
        message = whole.message
        assert (message.content, message.reasoning, message.reasoning_content) == ("I look.", "Hm.", "Hm.")
        functions = [call.function for call in message.tool_calls]
        assert [function.name for function in functions] == ["weather", "now"]
        assert [json.loads(function.arguments) for function in functions] == [{"city": "Köln", "days": 3}, {}]
        ids = [call.id for call in message.tool_calls]
        assert len(set(ids)) == 2
        assert (ids == ["functions.weather:0", "functions.now:1"]) == (calls == "kimi_k2")

        chunks = list(client.chat.completions.create(**ASK, stream=True))
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        parts = streamed(chunks)
        assert (parts["content"], parts["reasoning"]) == ("I look.", "Hm.")
        assert [part[1:] for part in parts["calls"]] == [[call.name, call.arguments] for call in functions]
    # The parser saw the markers although they are special tokens, and a server without them hides such tokens.
    assert all(params.skip_special_tokens == (not special) for _, params in engine.submitted)


@pytest.mark.parametrize("calls", REPLIES)
def test_parsers_read_what_the_detokenizer_writes_of_special_tokens(calls: str) -> None:
    reply, reasoning, special = REPLIES[calls]
    tokenizer = byte_tokenizer(special=special)
    ids = tokenizer.encode(reply)
    assert sum(token in tokenizer.special_ids for token in ids) == sum(map(reply.count, special))

    def called(*, skips: bool) -> list[str]:
        parser = TranscriptFormat(reasoning, calls).parser({}, reasoning_is_open=False)
        assert parser is not None
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skips)
        found = [event for token in ids for event in parser.feed(detokenizer.push([token]))]
        found += [*parser.feed(detokenizer.flush()), *parser.finish()]
        return [event.name for event in found if isinstance(event, CallBegun)]

    assert called(skips=False) == ["weather", "now"]
    assert called(skips=True) == ([] if special else ["weather", "now"])


def test_the_reply_can_be_sent_back_with_its_results() -> None:
    engine = tool_engine(HERMES)
    with openai_served(engine, tool_config()) as client:
        message = client.chat.completions.create(**ASK).choices[0].message
        ids = [call.id for call in message.tool_calls]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "wet"} for call_id in ids]
        client.chat.completions.create(**ASK | {"messages": [*ASK["messages"], message.model_dump(), *results]})
    said = prompt_text(engine)
    assert said.startswith(
        "<tools>" + json.dumps(WEATHER) + json.dumps(NOW) + "</tools>[user]Rain?\n[assistant]I look."
    )
    assert "<think>Hm.</think>" in said
    assert f'<call>{ids[0]} weather {{"city": "Köln", "days": 3}}</call><call>{ids[1]} now {{}}</call>' in said
    assert said.endswith(f"[tool]wet({ids[0]})\n[tool]wet({ids[1]})\n[assistant]")


def test_templates_that_want_the_arguments_as_text_get_them() -> None:
    template = "{{ tools }}{% for m in messages %}{{ '<' + m.tool_calls[0].function.arguments + '>' }}{% endfor %}"
    engine = tool_engine("x", template=template)
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a":1}'}}]}
    with served(engine, ServerConfig()) as client:
        assert client.post(PATH, json=ASK | {"messages": [message], "tools": None}).status_code == 200
        assert '<{"a":1}>' in prompt_text(engine)


def test_arguments_stream_while_they_are_written() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        chunks = [chunk for chunk in events(client, PATH, ASK) if chunk != "[DONE]"]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len([call for call in calls if call["index"] == 0]) > 10
    assert {key for call in calls for key in call if "id" not in call} == {"index", "function"}


def test_tools_are_hidden_and_calls_are_text_with_tool_choice_none() -> None:
    engine = tool_engine(HERMES)
    with served(engine, tool_config()) as client:
        choice = client.post(PATH, json=ASK | {"tool_choice": "none"}).json()["choices"][0]
    assert "<tools>" not in prompt_text(engine)
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == HERMES.partition("</think>\n\n")[2]


def test_without_parallel_calls_the_first_is_kept() -> None:
    body = ASK | {"parallel_tool_calls": False}
    with served(tool_engine(HERMES), tool_config()) as client:
        (call,) = client.post(PATH, json=body).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        deltas = [chunk["choices"][0]["delta"] for chunk in events(client, PATH, body)[:-1]]
    assert {call["index"] for delta in deltas for call in delta.get("tool_calls", ())} == {0}


def test_a_reply_cut_short_says_length() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        choice = client.post(PATH, json=ASK | {"max_tokens": 90}).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        assert client.post(PATH, json=ASK | {"max_tokens": 10}).json()["choices"][0]["message"] == {
            "role": "assistant", "content": None, "refusal": None, "reasoning": "Hm", "reasoning_content": "Hm",
        }  # fmt: skip


def test_reasoning_that_the_prompt_opened() -> None:
    body = {key: value for key, value in ASK.items() if key != "tools"}
    with served(tool_engine("Hm.\n</think>\n\nYes."), ServerConfig(reasoning_parser="qwen3")) as client:

        def ask(**extra: Any) -> dict[str, Any]:
            return client.post(PATH, json=body | extra).json()["choices"][0]["message"]

        opened = ask(chat_template_kwargs={"thinking": True})
        assert (opened["reasoning"], opened["content"]) == ("Hm.", "Yes.")
        assert "reasoning" not in ask()
        begun = [*ASK["messages"], {"role": "assistant", "content": "<think>\nWell"}]
        continued = ask(messages=begun, continue_final_message=True)
        assert (continued["reasoning"], continued["content"]) == ("Hm.", "Yes.")


def test_logprobs_and_ids_of_every_token_are_in_the_stream() -> None:
    engine = tool_engine(HERMES)
    with served(engine, tool_config()) as client:
        chunks = events(client, PATH, ASK | {"logprobs": True, "return_token_ids": True})[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert joined(choice.get("token_ids", []) for choice in choices) == [*engine.reply_ids, 1]
    assert (
        len(joined(choice["logprobs"]["content"] for choice in choices if choice["logprobs"]))
        == len(engine.reply_ids) + 1
    )


def test_final_messages_are_continued_as_they_stand() -> None:
    engine = tool_engine("x")
    messages = [*ASK["messages"], {"role": "assistant", "content": "Well, [user] "}]
    body = {"model": "fake/model", "messages": messages, "continue_final_message": True}
    with served(engine, ServerConfig()) as client:
        assert client.post(PATH, json=body).status_code == 200
        assert prompt_text(engine) == "[user]Rain?\n[assistant]Well, [user] "
        both = client.post(PATH, json=body | {"add_generation_prompt": True}).json()["error"]
        assert both["param"] == "continue_final_message"
        assert client.post(PATH, json=body | {"continue_final_message": False, "add_generation_prompt": False})
        assert prompt_text(engine).endswith("Well, [user] \n")
        tokens = client.post("/tokenize", json={"messages": messages, "continue_final_message": True}).json()["tokens"]
        assert engine.tokenizer.decode(tokens) == "[user]Rain?\n[assistant]Well, [user] "
        tokens = client.post("/tokenize", json={"messages": messages, "tools": [NOW]}).json()["tokens"]
        assert engine.tokenizer.decode(tokens).startswith("<tools>" + json.dumps(NOW))


def test_a_message_that_the_template_hides_cannot_be_continued() -> None:
    body = {"model": "fake/model", "messages": ASK["messages"], "continue_final_message": True}
    with served(tool_engine("x", template="nothing"), ServerConfig()) as client:
        assert client.post(PATH, json=body).json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"tool_choice": 5}, "tool_choice", "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools", "'now'"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "retrieval"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters", "object"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "messages", "'f'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
         "messages", "'f'"),
        ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", "content"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "template"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "enormous"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(extra: dict[str, Any], param: str, says: str) -> None:
    engine = tool_engine("x")
    with served(engine, tool_config()) as client:
        reply = client.post(PATH, json=ASK | extra)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert not engine.submitted


def test_tools_without_a_parser_say_what_to_start_the_server_with() -> None:
    with served(tool_engine("x"), ServerConfig()) as client:
        error = client.post(PATH, json=ASK).json()["error"]
        assert error["param"] == "tools"
        assert "--enable-auto-tool-choice" in error["message"]
        assert "--tool-call-parser" in error["message"]
        assert client.post(PATH, json=ASK | {"tool_choice": "none"}).status_code == 200


def test_a_template_that_shows_no_tools_is_said() -> None:
    with served(tool_engine("x", template="{{ messages[0].content }}"), tool_config()) as client:
        error = client.post(PATH, json=ASK).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
    assert "template" in error["message"]


def test_reasoning_effort_reaches_a_template_that_knows_it() -> None:
    engine = tool_engine("x", template="{{ reasoning_effort }}")
    body = {"model": "fake/model", "messages": ASK["messages"], "reasoning_effort": "low"}
    with served(engine, ServerConfig()) as client:
        assert client.post(PATH, json=body).status_code == 200
        assert prompt_text(engine) == "low"
        twice = client.post(PATH, json=body | {"chat_template_kwargs": {"reasoning_effort": "high"}}).json()["error"]
        assert twice["param"] == "reasoning_effort"


def test_special_tokens_stay_hidden_where_no_parser_needs_them() -> None:
    reply, reasoning, special = REPLIES["kimi_k2"]
    engine = tool_engine(reply, special)
    with served(engine, tool_config("kimi_k2", reasoning)) as client:
        hidden = client.post(PATH, json=ASK | {"tool_choice": "none"}).json()["choices"][0]["message"]["content"]
        assert hidden == 'I look.functions.weather:0{"city": "Köln", "days": 3}functions.now:1{}'
        assert client.post(PATH, json=ASK | {"skip_special_tokens": True}).json()["choices"][0]["message"]["tool_calls"]
