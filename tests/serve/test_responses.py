"""`/v1/responses` against a scripted model."""

import json
from typing import Any

import pytest
from openai.types.responses.response_create_params import ResponseCreateParamsBase, ResponseCreateParamsStreaming
from starlette.testclient import TestClient

from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine
from .sse import named_events
from .test_tools import HERMES, WEATHER, prompt_text, served, tool_config, tool_engine

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
TEXT = "Hello wörld €!"
BODY = {"model": "fake/model", "input": "Hi"}
TOOL = {"type": "function", **WEATHER["function"]}
NOW = {"type": "function", "name": "now"}
ASK = {"model": "fake/model", "input": "Rain?", "tools": [TOOL, NOW]}


def texts(body: dict[str, Any]) -> list[str]:
    return [part["text"] for item in body["output"] for part in item.get("content", ())]


def test_a_reply_is_an_assistant_message_with_what_was_asked_for(client: TestClient, engine: FakeEngine) -> None:
    asked = {"instructions": "Be brief.", "metadata": {"a": "b"}, "max_output_tokens": 50, "temperature": 0.5}
    reply = client.post(PATH, json=BODY | asked)
    body = reply.json()
    assert body["id"] == reply.headers["x-request-id"]
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["error"], body["incomplete_details"]) == (
        "response", "completed", None, None,
    )  # fmt: skip
    (item,) = body["output"]
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    }
    tokens = len(engine.reply_ids) + 1
    prompt = len(engine.submitted[0][0])
    assert body["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + tokens,
    }
    assert {name: body[name] for name in asked} == asked
    assert (body["store"], body["tool_choice"], body["tools"], body["top_p"]) == (False, "auto", [], 1.0)
    assert prompt_text(engine) == "[system]Be brief.\n[user]Hi\n[assistant]"


def test_every_event_of_a_stream_comes_in_its_place(client: TestClient) -> None:
    events = named_events(client, PATH, BODY)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [events[0]["response"][name] for name in ("status", "output", "usage")] == ["in_progress", [], None]
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == TEXT
    item = events[2]["item"]
    assert (item["status"], item["content"]) == ("in_progress", [])
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert events[-1]["response"]["output"] == [events[-2]["item"]]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        body = client.post(PATH, json=ASK).json()
        events = named_events(client, PATH, ASK)
    assert [item["type"] for item in body["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert texts(body) == ["Hm.", "I look."]
    calls = body["output"][2:]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("weather", {"city": "Köln", "days": 3}), ("now", {}),
    ]  # fmt: skip
    assert len({call["call_id"] for call in calls} | {call["id"] for call in calls}) == 4
    assert body["tools"] == [TOOL, NOW]
    # The marks of the reasoning are written in single bytes here, and count for it.
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nHm.")
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for index, kind in enumerate(kinds) if kind != kinds[index - 1]] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip


def test_items_become_the_messages_of_chat() -> None:
    engine = tool_engine("x")
    items = [
        {"role": "developer", "content": "Rules."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                        {"type": "input_text", "text": "b"}], "status": "completed"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city": "Köln"}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "wet"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "assistant", "content": "Wet."},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    with served(engine, ServerConfig()) as client:
        reply = client.post(PATH, json=BODY | {"input": items, "instructions": "Be kind."})
    assert reply.status_code == 200, reply.text
    assert prompt_text(engine) == (
        "[system]Be kind.\n[system]Rules.\n[user]a\nb\n"
        '[assistant]I look.<think>Hm.</think><call>c1 weather {"city": "Köln"}</call><call>c2 now {}</call>\n'
        "[tool]wet(c1)\n[tool]noon(c2)\n[assistant]Wet.\n[user]Sure?\n[assistant]"
    )


def test_a_template_that_knows_developers_keeps_them() -> None:
    engine = tool_engine("x", template="{# developer #}{{ messages[0].role }}")
    with served(engine, ServerConfig()) as client:
        client.post(PATH, json=BODY | {"input": [{"role": "developer", "content": "x"}]})
    assert prompt_text(engine) == "developer"


def test_a_reply_cut_short_is_incomplete() -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        body = client.post(PATH, json=ASK | {"max_output_tokens": 90}).json()
        events = named_events(client, PATH, ASK | {"max_output_tokens": 90})
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in body["output"]] == ["completed", "completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"
    assert events[-2]["item"]["status"] == "incomplete"


def test_a_reply_without_anything_is_an_empty_message(client: TestClient, engine: FakeEngine) -> None:
    engine.reply_ids = []
    assert texts(client.post(PATH, json=BODY).json()) == [""]
    kinds = [event["type"] for event in named_events(client, PATH, BODY)]
    assert kinds[2:6] == [
        "response.output_item.added", "response.content_part.added", "response.output_text.done",
        "response.content_part.done",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "alternatives"),
    [({"include": ["message.output_text.logprobs"]}, 0), ({"top_logprobs": 2}, 2)],
)
def test_logprobs_are_those_of_the_tokens_that_spell_the_text(extra: dict[str, Any], alternatives: int) -> None:
    with served(tool_engine(HERMES), tool_config()) as client:
        body = client.post(PATH, json=ASK | extra).json()
        deltas = [event for event in named_events(client, PATH, ASK | extra) if event["type"].endswith("text.delta")]
    (part,) = (item["content"][0] for item in body["output"] if item["type"] == "message")
    entries = part["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == part["text"] == "I look."
    assert {(entry["logprob"], len(entry["top_logprobs"])) for entry in entries} == {(-0.5, alternatives)}
    assert [entry for event in deltas for entry in event.get("logprobs", ())] == entries


def test_a_failing_engine_ends_the_stream_with_what_there_was(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    with client.stream("POST", PATH, json=BODY | {"stream": True}) as response:
        lines = response.iter_lines()
        while "output_text.delta" not in next(lines):
            pass
        engine.die()
        last = json.loads([line for line in lines if line.startswith("data: ")][-1].removeprefix("data: "))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "engine failed" in last["response"]["error"]["message"]


def fate(client: TestClient, engine: FakeEngine, path: str, body: dict[str, Any]) -> tuple[Any, str | None]:
    """What becomes of a request: what was submitted, or the refusal; and the field that is refused."""
    before = len(engine.submitted)
    reply = client.post(path, json=body).json()
    if len(engine.submitted) > before:
        return engine.submitted[-1][1], None
    return reply["error"]["code"], reply["error"]["param"]


FORCED = [
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    ({"tool_choice": {"type": "function", "name": "now"}},
     {"tool_choice": {"type": "function", "function": {"name": "now"}}}),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NOW]}},
     {"tool_choice": {"type": "allowed_tools", "allowed_tools": {
         "mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}}}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}},
     {"response_format": {"type": "json_schema",
                          "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}}}),
    ({"tools": [TOOL | {"strict": True}]},
     {"tools": [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]}),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "chat_extra"), FORCED)
def test_what_constrains_the_reply_has_the_fate_it_has_in_chat(
    extra: dict[str, Any], chat_extra: dict[str, Any]
) -> None:
    engine = tool_engine("x")
    tools = [
        {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in (TOOL, NOW)
    ]
    chat = {"model": "fake/model", "messages": [{"role": "user", "content": "Rain?"}], "tools": tools}
    with served(engine, tool_config()) as client:
        here, param = fate(client, engine, PATH, ASK | extra)
        there, chat_param = fate(client, engine, CHAT, chat | chat_extra)
    assert here == there
    for theirs, own in ((".json_schema", ""), ("response_format", "text.format"), (".allowed_tools", "")):
        chat_param = chat_param and chat_param.replace(theirs, own)
    assert param == chat_param


HONOURED = {
    "include", "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls",
    "prompt_cache_key", "reasoning", "safety_identifier", "stream", "temperature", "text", "tool_choice", "tools",
    "top_logprobs", "top_p", "user",
}  # fmt: skip
FIELDS = {**ResponseCreateParamsBase.__annotations__, **ResponseCreateParamsStreaming.__annotations__}


def refused(client: TestClient, extra: dict[str, Any]) -> dict[str, Any]:
    reply = client.post(PATH, json=ASK | extra)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


@pytest.fixture(scope="module")
def tools_client():
    with served(tool_engine("x"), tool_config()) as client:
        yield client


@pytest.mark.parametrize("name", sorted(set(FIELDS) - HONOURED))
def test_fields_that_are_not_served_are_refused_by_name(tools_client: TestClient, name: str) -> None:
    error = refused(tools_client, {name: {"x": True}})
    assert error["param"] == name
    assert name in error["message"]


def test_fields_that_ask_for_nothing_are_accepted(tools_client: TestClient) -> None:
    neutral = {
        "background": False, "store": False, "truncation": "disabled", "service_tier": "auto", "include": [],
        "previous_response_id": None, "conversation": None, "prompt": None, "max_tool_calls": None, "moderation": None,
        "stream_options": {"include_obfuscation": False}, "context_management": [], "prompt_cache_retention": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "reasoning": {"effort": None, "summary": None},
        "metadata": {}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "top_logprobs": 0,
        "tool_choice": "auto", "parallel_tool_calls": True, "instructions": None, "stream": False,
        "seed": 1, "top_k": 4, "stop": ["z"], "priority": 1, "cache_salt": "s", "chat_template_kwargs": {"a": 1},
    }  # fmt: skip
    assert tools_client.post(PATH, json=ASK | neutral).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param", "says"),
    [
        ({"store": True}, "store", "true"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "resp_1"),
        ({"background": True}, "background", "true"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]", "reasoning.encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools[1].type", "mcp"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [NOW, NOW]}, "tools", "'now'"),
        ({"tools": [5]}, "tools[0]", "object"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice", "web_search_preview"),
        ({"input": []}, "input", "empty"),
        ({"input": [5]}, "input[0]", "object"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type", "input_image"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "tool"),
        ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input[0].colour", "colour"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]}, "input", "'f'"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "encrypted"),
        ({"input": 5}, "input", "int"),
        ({"input": "z" * 5000}, "input", "4096"),
        ({"max_output_tokens": 0}, "max_output_tokens", "0"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "1000000"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"top_logprobs": 21}, "top_logprobs", "21"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "template"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "enormous"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "summary"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "low"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type", "grammar"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "obfuscation"),
        ({"metadata": {"a": 1}}, "metadata[...]", "str"),
        ({"messages": []}, "messages", "unknown"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "tools"),
    ],
)  # fmt: skip
def test_wrong_and_unserved_values_are_refused_by_name(
    tools_client: TestClient, extra: dict[str, Any], param: str, says: str
) -> None:
    error = refused(tools_client, extra)
    assert error["param"] == param
    assert says in error["message"]


def test_another_model_and_stored_responses_are_not_found(client: TestClient) -> None:
    assert client.post(PATH, json=BODY | {"model": "other"}).status_code == 404
    assert client.get(f"{PATH}/resp_1").status_code == 404


def test_effort_reaches_a_template_that_knows_it() -> None:
    engine = tool_engine("x", template="{{ reasoning_effort }}")
    with served(engine, ServerConfig()) as client:
        body = client.post(PATH, json=BODY | {"reasoning": {"effort": "low"}}).json()
    assert prompt_text(engine) == "low"
    assert body["reasoning"] == {"effort": "low", "summary": None}
