"""`/v1/chat/completions` against a scripted model."""

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import EOS, FakeEngine
from .sse import events, joined

PATH = "/v1/chat/completions"
TEXT = "Hello wörld €!"
BODY = {"model": "fake/model", "messages": [{"role": "user", "content": "Hi"}]}


def prompt_text(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.submitted[-1][0])


def test_reply_is_an_assistant_message(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json=BODY).json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert prompt_text(engine) == "[user]Hi\n[assistant]"


def test_limit_is_the_context_unless_given(client: TestClient, engine: FakeEngine) -> None:
    for extra in ({}, {"max_tokens": 5}, {"max_completion_tokens": 6}, {"max_tokens": 7, "max_completion_tokens": 7}):
        assert client.post(PATH, json=BODY | extra).status_code == 200
    assert [params.max_tokens for _, params in engine.submitted] == [None, 5, 6, 7]


def test_text_parts_join_and_template_variables_reach_the_template(client: TestClient, engine: FakeEngine) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    body = BODY | {"messages": messages, "chat_template_kwargs": {"mark": "!"}}
    assert client.post(PATH, json=body).status_code == 200
    assert prompt_text(engine) == "[system]s!\n[user]a\nb!\n[assistant]c!\n[user]d!\n[assistant]"


def test_stream_opens_with_the_role_and_closes_with_the_reason(client: TestClient) -> None:
    *chunks, last = events(client, PATH, BODY)
    assert last == "[DONE]"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert all(set(choice["delta"]) == {"content"} for choice in choices[1:-1])
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == TEXT


def test_every_sample_of_a_stream_opens_and_closes_once(client: TestClient) -> None:
    chunks = events(client, PATH, BODY | {"n": 3})[:-1]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [choice["finish_reason"] for choice in mine].count("stop") == 1


def test_usage_chunk_follows_the_last_choice(client: TestClient) -> None:
    whole = client.post(PATH, json=BODY).json()
    usage, last = events(client, PATH, BODY | {"stream_options": {"include_usage": True}})[-2:]
    assert (last, usage["choices"], usage["usage"]) == ("[DONE]", [], whole["usage"])


def test_token_ids_are_returned_when_asked_for(client: TestClient, engine: FakeEngine) -> None:
    body = client.post(PATH, json=BODY | {"return_token_ids": True}).json()
    assert body["prompt_token_ids"] == engine.submitted[0][0]
    assert body["choices"][0]["token_ids"] == [*engine.reply_ids, EOS]
    chunks = events(client, PATH, BODY | {"return_token_ids": True})[:-1]
    assert chunks[0]["prompt_token_ids"] == engine.submitted[0][0]
    assert joined(chunk["choices"][0].get("token_ids", []) for chunk in chunks) == [*engine.reply_ids, EOS]


def test_neutral_fields_of_clients_are_accepted(client: TestClient) -> None:
    neutral = {
        "tools": None, "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "service_tier": "auto", "store": False, "reasoning_effort": None, "functions": [],
        "echo": False, "add_generation_prompt": True, "continue_final_message": False, "metadata": None,
    }  # fmt: skip
    assert client.post(PATH, json=BODY | neutral).status_code == 200


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "tool", "content": "x"}], "unknown role tool"),
        ([], "must not be empty"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls"),
        ("hello", "messages"),
        ([{"role": "user", "content": "x", "colour": 1}], "colour"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(client: TestClient, messages, says: str) -> None:
    reply = client.post(PATH, json=BODY | {"messages": messages})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"].startswith("messages")
    assert says in error["message"]


def test_template_variables_cannot_replace_the_messages(client: TestClient) -> None:
    error = client.post(PATH, json=BODY | {"chat_template_kwargs": {"messages": []}}).json()["error"]
    assert error["param"] == "chat_template_kwargs"


def test_a_model_without_a_template_says_so() -> None:
    engine = FakeEngine(template=None)
    with TestClient(create_app(engine, ServerConfig())) as client:
        reply = client.post(PATH, json=BODY)
    engine.close()
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "no_chat_template"


def test_engine_refusals_name_the_field_the_client_sent(client: TestClient) -> None:
    long = BODY | {"messages": [{"role": "user", "content": "z" * 300}]}
    for body, param in (
        (BODY | {"max_completion_tokens": 1000}, "max_completion_tokens"),
        (BODY | {"max_tokens": 1000}, "max_tokens"),
        (long, "messages"),
    ):
        reply = client.post(PATH, json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
