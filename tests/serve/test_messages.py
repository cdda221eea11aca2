"""`/v1/messages` and `/v1/messages/count_tokens` against a scripted model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsBase, MessageCreateParamsStreaming
from starlette.testclient import TestClient

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine
from .sse import named_events
from .test_responses import CHAT, fate
from .test_tools import HERMES, TEMPLATE, WEATHER, prompt_text, served, tool_config, tool_engine

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TEXT = "Hello wörld €!"
BODY = {"model": "fake/model", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}
FUNCTION = WEATHER["function"]
TOOL = {"name": "weather", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
NOW = {"name": "now", "input_schema": {"type": "object"}}
ASK = {**BODY, "max_tokens": 1000, "messages": [{"role": "user", "content": "Rain?"}], "tools": [TOOL, NOW]}


def test_a_reply_is_a_message_of_blocks(client: TestClient, engine: FakeEngine) -> None:
    reply = client.post(PATH, json=BODY | {"system": "Be brief."}, headers={"anthropic-version": "2023-06-01"})
    body = reply.json()
    assert body["id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    prompt = len(engine.submitted[0][0])
    assert body == {
        "id": body["id"],
        "type": "message",
        "role": "assistant",
        "model": "fake/model",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": len(engine.reply_ids) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
        },
        "weight_version": 7,
    }
    assert prompt_text(engine) == "[system]Be brief.\n[user]Hi\n[assistant]"


def test_every_event_of_a_stream_comes_in_its_place(client: TestClient) -> None:
    whole = client.post(PATH, json=BODY).json()
    events = named_events(client, PATH, BODY)
    kinds = [event["type"] for event in events]
    deltas = kinds.count("content_block_delta")
    assert deltas > 3
    assert kinds == [
        "message_start", "ping", "content_block_start", *["content_block_delta"] * deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 3
    assert "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta") == TEXT
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == whole["usage"]


def test_thinking_text_and_calls_are_blocks_of_their_own() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        body = client.post(PATH, json=ASK).json()
        events = named_events(client, PATH, ASK)
    thinking, text, weather, now = body["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text == {"type": "text", "text": "I look."}
    assert weather.pop("id") != now.pop("id")
    assert weather == {"type": "tool_use", "name": "weather", "input": {"city": "Köln", "days": 3}}
    assert now == {"type": "tool_use", "name": "now", "input": {}}
    assert body["stop_reason"] == "tool_use"
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": len("<think>\nHm.")}
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(event["index"], event["content_block"]["type"]) for event in starts] == [
        (0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use"),
    ]  # fmt: skip
    arguments = [event["delta"]["partial_json"] for event in events if event.get("index") == 2 and "delta" in event]
    assert json.loads("".join(arguments)) == weather["input"]
    assert len(arguments) > 10


def test_a_call_cut_short_keeps_what_was_written() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        body = client.post(PATH, json=ASK | {"max_tokens": 90}).json()
    assert body["stop_reason"] == "max_tokens"
    (written,) = body["content"][-1]["input"].values()
    assert list(body["content"][-1]["input"]) == ["INVALID_JSON"]
    assert '{"city": "Köln", "days": 3}'.startswith(written)


def test_the_stop_sequence_that_matched_is_named(client: TestClient) -> None:
    body = client.post(PATH, json=BODY | {"stop_sequences": ["zzz", "d"]}).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "d")
    assert body["content"] == [{"type": "text", "text": "Hello wörl"}]


def test_blocks_become_the_messages_of_chat() -> None:
    engine = tool_engine("x")
    cached = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": "Rain?"},
        {"role": "user", "content": [{"type": "text", "text": "In Köln?", "citations": None, **cached}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Köln"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "wet"}]},
            {"type": "tool_result", "tool_use_id": "c2", "content": "no clock", "is_error": True},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be", **cached}, {"type": "text", "text": "kind."}]
    with served(engine, tool_config()) as client:
        reply = client.post(
            PATH, json=ASK | {"messages": messages, "system": system, "tools": [TOOL | cached], **cached}
        )
    assert reply.status_code == 200, reply.text
    assert prompt_text(engine) == (
        f"<tools>{json.dumps(WEATHER)}</tools>[system]Be\nkind.\n[user]Rain?\nIn Köln?\n"
        '[assistant]I look.<think>Hm.</think><call>c1 weather {"city": "Köln"}</call><call>c2 now {}</call>\n'
        "[tool]wet(c1)\n[tool]Error: no clock(c2)\n[user]Well?\n[assistant]"
    )


def test_a_last_message_of_the_assistants_is_continued(client: TestClient, engine: FakeEngine) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": "Well,"}]
    assert client.post(PATH, json=BODY | {"messages": messages}).status_code == 200
    assert prompt_text(engine) == "[user]Hi\n[assistant]Well,"


def test_the_assistants_empty_reply_may_be_sent_back(client: TestClient, engine: FakeEngine) -> None:
    messages = [*BODY["messages"], {"role": "assistant", "content": []}, {"role": "user", "content": "Hello?"}]
    assert client.post(PATH, json=BODY | {"messages": messages}).status_code == 200
    assert prompt_text(engine) == "[user]Hi\nHello?\n[assistant]"


def test_without_parallel_use_the_first_call_is_kept() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    with served(tool_engine(HERMES), tool_config()) as client:
        content = client.post(PATH, json=ASK | {"tool_choice": choice}).json()["content"]
        hidden = client.post(PATH, json=ASK | {"tool_choice": {"type": "none"}}).json()
    assert [block["name"] for block in content if block["type"] == "tool_use"] == ["weather"]
    assert (hidden["stop_reason"], len(hidden["content"])) == ("end_turn", 2)


def test_tokens_are_counted_as_a_request_would_have_them() -> None:
    engine = tool_engine("x")
    given = {name: value for name, value in ASK.items() if name != "max_tokens"}
    with served(engine, tool_config()) as client:
        assert client.post(PATH, json=ASK).status_code == 200
        assert client.post(COUNT, json=given).json() == {"input_tokens": len(engine.submitted[0][0])}
        assert client.post(COUNT, json=given | {"model": "other"}).status_code == 404
    assert len(engine.submitted) == 1


SWITCHED = TEMPLATE.replace("thinking", "enable_thinking")


@pytest.mark.parametrize(("kind", "prompt_end"), [("adaptive", "<think>\n"), ("disabled", "[assistant]")])
@pytest.mark.parametrize("template", [TEMPLATE, SWITCHED])
def test_thinking_turns_the_templates_switch(template: str, kind: str, prompt_end: str) -> None:
    engine = tool_engine("Hm.</think>Yes.", template=template)
    with served(engine, tool_config()) as client:
        content = client.post(PATH, json=BODY | {"thinking": {"type": kind}}).json()["content"]
        counted = client.post(COUNT, json={**BODY, "thinking": {"type": kind}} | {"max_tokens": None}).json()
    assert prompt_text(engine).endswith(prompt_end)
    assert [block["type"] for block in content] == (["thinking", "text"] if kind == "adaptive" else ["text"])
    assert counted["error"]["message"].count("max_tokens")


def test_thinking_needs_a_parser_and_a_switch() -> None:
    without = tool_engine("x", template="{{ messages[0].content }}")
    with served(without, ServerConfig()) as client:
        assert "--reasoning-parser" in refused(client, {"thinking": {"type": "adaptive"}})
        assert client.post(PATH, json=BODY | {"thinking": {"type": "disabled"}}).status_code == 200
    without = tool_engine("x", template="{{ messages[0].content }}")
    with served(without, ServerConfig(reasoning_parser="qwen3")) as client:
        assert "no switch" in refused(client, {"thinking": {"type": "disabled"}})
        assert client.post(PATH, json=BODY | {"thinking": {"type": "adaptive"}}).status_code == 200


def test_effort_reaches_a_template_that_knows_it() -> None:
    engine = tool_engine("x", template="{{ reasoning_effort }}")
    with served(engine, ServerConfig()) as client:
        assert client.post(PATH, json=BODY | {"output_config": {"effort": "low"}}).status_code == 200
    assert prompt_text(engine) == "low"


FORCED = [
    ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
    ({"tool_choice": {"type": "tool", "name": "now"}},
     {"tool_choice": {"type": "function", "function": {"name": "now"}}}),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
     {"response_format": {"type": "json_schema",
                          "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True}}}),
    ({"tools": [NOW | {"strict": True}]},
     {"tools": [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}, "strict": True}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "chat_extra"), FORCED)
def test_what_constrains_the_reply_has_the_fate_it_has_in_chat(
    extra: dict[str, Any], chat_extra: dict[str, Any]
) -> None:
    engine = tool_engine("x")
    now = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    chat = {name: ASK[name] for name in ("model", "max_tokens", "messages")} | {"tools": [WEATHER, now]}
    with served(engine, tool_config()) as client:
        there, param = fate(client, engine, CHAT, chat | chat_extra)
        if param is None:
            assert client.post(PATH, json=ASK | extra).status_code == 200
            assert engine.submitted[-1][1] == there
        else:
            message = refused(client, extra, ASK)
            own = param.replace(".json_schema", "").replace("response_format", "output_config.format")
            assert own in message


def refused(client: TestClient, extra: dict[str, Any], body: dict[str, Any] = BODY, status: int = 400) -> str:
    reply = client.post(PATH, json=body | extra)
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert (set(error), error["type"]) == ({"type", "error"}, "error")
    assert set(error["error"]) == {"type", "message"}
    return error["error"]["message"]


@pytest.fixture(scope="module")
def tools_client() -> Iterator[TestClient]:
    with served(tool_engine("x"), tool_config()) as client:
        yield client


HONOURED = {
    "cache_control", "max_tokens", "messages", "metadata", "model", "output_config", "stop_sequences", "stream",
    "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p",
}  # fmt: skip
COUNTED = {"cache_control", "messages", "model", "output_config", "system", "thinking", "tool_choice", "tools"}
FIELDS = {**MessageCreateParamsBase.__annotations__, **MessageCreateParamsStreaming.__annotations__}


@pytest.mark.parametrize("name", [*sorted(set(FIELDS) - HONOURED), "n", "betas"])
def test_fields_that_are_not_served_are_refused_by_name(tools_client: TestClient, name: str) -> None:
    assert name in refused(tools_client, {name: {"x": True}})


@pytest.mark.parametrize("name", sorted((set(FIELDS) | set(MessageCountTokensParams.__annotations__)) - COUNTED))
def test_counting_refuses_what_makes_no_prompt(tools_client: TestClient, name: str) -> None:
    body = {"model": "fake/model", "messages": BODY["messages"], name: {"x": True}}
    assert name in tools_client.post(COUNT, json=body).json()["error"]["message"]


def test_fields_that_ask_for_nothing_are_accepted(tools_client: TestClient) -> None:
    neutral = {
        "container": None, "diagnostics": None, "inference_geo": None, "service_tier": "auto", "speed": "standard",
        "mcp_servers": [], "context_management": None, "metadata": {"user_id": "u"}, "system": [], "stream": False,
        "tool_choice": {"type": "auto"}, "stop_sequences": [], "temperature": 1.0, "top_p": 0.9, "top_k": 5,
        "priority": 1, "cache_salt": "s", "chat_template_kwargs": {"a": 1}, "cache_control": {"type": "ephemeral"},
        "tools": [TOOL | {"type": "custom", "eager_input_streaming": True}, NOW | {"type": None, "strict": False}],
    }  # fmt: skip
    reply = tools_client.post(PATH, json=ASK | neutral)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         'messages[0].content[0].type = "image"'),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "tool_use"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}]},
         "messages[0].content[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "redacted_thinking"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}]},
         "results"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {
            "type": "ephemeral", "ttl": "1h"}}]}]}, "messages[0].content[0].cache_control.ttl"),
        ({"messages": [{"role": "user", "content": "z" * 5000}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [NOW, NOW]}, "'now'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"thinking": True}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"metadata": {"x": 1}}, "metadata.x"),
    ],
)  # fmt: skip
def test_wrong_and_unserved_values_are_refused_by_name(
    tools_client: TestClient, extra: dict[str, Any], says: str
) -> None:
    assert says in refused(tools_client, extra, ASK)


def test_max_tokens_must_be_given(tools_client: TestClient) -> None:
    assert "max_tokens" in refused(tools_client, {"max_tokens": None})
    missing = {name: value for name, value in BODY.items() if name != "max_tokens"}
    assert "max_tokens" in refused(tools_client, {}, missing)


def kind_of(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    assert reply.json()["type"] == "error"
    return reply.json()["error"]["type"]


def test_every_error_of_these_routes_has_anthropics_form(client: TestClient, engine: FakeEngine) -> None:
    assert kind_of(client.post(PATH, content=b"{"), 400) == "invalid_request_error"
    assert kind_of(client.post(PATH, json=BODY | {"model": "other"}), 404) == "not_found_error"
    assert kind_of(client.post(f"{PATH}/batches", json={}), 404) == "not_found_error"
    assert kind_of(client.get(PATH), 405) == "invalid_request_error"
    assert kind_of(client.post(COUNT, content=b" " * 40_000), 413) == "request_too_large"
    engine.num_queued_requests = 10**6
    full = client.post(PATH, json=BODY)
    assert kind_of(full, 429) == "rate_limit_error"
    assert full.headers["retry-after"]
    engine.num_queued_requests = 0

    def broken(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("secret detail")

    engine.submit = broken
    defect = client.post(PATH, json=BODY)
    assert kind_of(defect, 500) == "api_error"
    assert "secret" not in defect.text
    engine.is_healthy = False
    assert kind_of(client.post(PATH, json=BODY), 503) == "overloaded_error"
    assert "param" in client.post("/v1/messagesx", json={}).json()["error"]


def test_keys_come_in_either_header(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(api_key="sécret"))) as client:
        key = "sécret".encode()
        for headers in ({}, {"x-api-key": b"x"}, {"x-api-key": b"Bearer " + key}, {"authorization": key}):
            assert kind_of(client.post(PATH, json=BODY, headers=headers), 401) == "authentication_error"
        for headers in ({"x-api-key": key}, {"authorization": b"Bearer " + key},
                        {"x-api-key": key, "authorization": b"Bearer x"}):  # fmt: skip
            assert client.post(PATH, json=BODY, headers=headers).status_code == 200
            assert client.post(COUNT, json=BODY, headers=headers).status_code == 400
        assert client.post(CHAT, json={}, headers={"x-api-key": key}).json()["error"]["code"] == "invalid_api_key"


def test_a_failing_engine_ends_the_stream_with_an_error(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    with client.stream("POST", PATH, json=BODY | {"stream": True}) as response:
        lines = response.iter_lines()
        while "text_delta" not in next(lines):
            pass
        engine.die()
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    error = json.loads(rest[-1].removeprefix("data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
