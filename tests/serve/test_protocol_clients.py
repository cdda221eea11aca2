"""The real clients of `/v1/responses` and `/v1/messages` against a socket."""

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from .fake_engine import FakeEngine
from .listening import listening
from .test_lifecycle import eventually
from .test_messages import NOW as MESSAGES_NOW
from .test_messages import TOOL as MESSAGES_TOOL
from .test_responses import NOW, TOOL
from .test_tools import HERMES, prompt_text, tool_config, tool_engine

MODEL = "fake/model"
CALLS = [("weather", {"city": "Köln", "days": 3}), ("now", {})]
SENT_BACK = '<call>{0} weather {{"city": "Köln", "days": 3}}</call><call>{1} now {{}}</call>\n'


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return tool_engine(HERMES)


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with listening(engine, tool_config()) as url:
        yield url


@pytest.fixture(scope="module")
def openai_client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=9) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=9) as client:
        yield client


def test_responses_whole_and_streamed(openai_client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "input": "Rain?", "tools": [TOOL, NOW]}
    whole = openai_client.responses.create(**ask)
    assert (whole.status, whole.output_text) == ("completed", "I look.")
    assert whole.usage.input_tokens_details.cached_tokens == 3
    reasoning, message, *calls = whole.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS

    with openai_client.responses.stream(**ask) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.reasoning_text.delta", "response.function_call_arguments.delta"} <= kinds
    assert final.output_text == "I look."
    assert [item.to_dict().keys() for item in final.output if item.type == "message"] == [message.to_dict().keys()]
    assert [(item.name, json.loads(item.arguments)) for item in final.output[2:]] == CALLS
    assert final.usage == whole.usage


def test_responses_can_be_sent_back_with_results(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    ask = {"model": MODEL, "tools": [TOOL, NOW]}
    output = openai_client.responses.create(**ask, input="Rain?").output
    ids = [item.call_id for item in output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "wet"} for call_id in ids]
    openai_client.responses.create(**ask, input=[{"role": "user", "content": "Rain?"}, *output, *results])
    said = prompt_text(engine).partition("[user]")[2]
    assert said == (
        "Rain?\n[assistant]I look.<think>Hm.</think>" + SENT_BACK.format(*ids)
        + "".join(f"[tool]wet({call_id})\n" for call_id in ids) + "[assistant]"
    )  # fmt: skip


def test_errors_become_openais_exceptions(openai_client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        openai_client.responses.create(model=MODEL, input="x", tools=[{"type": "web_search"}])
    assert error.value.param == "tools[0].type"
    with pytest.raises(openai.BadRequestError) as error:
        openai_client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert error.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        openai_client.responses.retrieve("resp_1")


def test_messages_whole_and_streamed(anthropic_client: anthropic.Anthropic) -> None:
    ask = {
        "model": MODEL,
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [MESSAGES_TOOL, MESSAGES_NOW],
    }
    whole = anthropic_client.messages.create(**ask)
    assert whole._request_id == whole.id
    assert whole.stop_reason == "tool_use"
    thinking, text, *calls = whole.content
    assert (thinking.thinking, text.text) == ("Hm.", "I look.")
    assert [(call.name, call.input) for call in calls] == CALLS

    with anthropic_client.messages.stream(**ask) as stream:
        assert "".join(stream.text_stream) == "I look."
        final = stream.get_final_message()
    assert [(block.name, block.input) for block in final.content[2:]] == CALLS
    assert [block.to_dict() for block in final.content[:2]] == [block.to_dict() for block in whole.content[:2]]
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)

    counted = anthropic_client.messages.count_tokens(
        model=MODEL, messages=ask["messages"], tools=ask["tools"], system="Be brief."
    )
    assert counted.input_tokens > whole.usage.input_tokens


def test_messages_can_be_sent_back_with_results(anthropic_client: anthropic.Anthropic, engine: FakeEngine) -> None:
    ask = {"model": MODEL, "max_tokens": 500, "tools": [MESSAGES_TOOL, MESSAGES_NOW]}
    question = {"role": "user", "content": "Rain?"}
    reply = anthropic_client.messages.create(**ask, messages=[question])
    ids = [block.id for block in reply.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call_id, "content": "wet"} for call_id in ids]
    anthropic_client.messages.create(
        **ask,
        messages=[question, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}],
    )
    assert SENT_BACK.format(*ids) in prompt_text(engine)
    assert prompt_text(engine).endswith(f"[tool]wet({ids[0]})\n[tool]wet({ids[1]})\n[assistant]")


def test_errors_become_anthropics_exceptions(anthropic_client: anthropic.Anthropic, engine: FakeEngine) -> None:
    ask = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "Rain?"}]}
    with pytest.raises(anthropic.BadRequestError, match="top_p") as error:
        anthropic_client.messages.create(**ask, extra_body={"top_p": 2.0})
    assert error.value.type == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(**ask | {"model": "other"})


def test_leaving_a_stream_frees_the_request(anthropic_client: anthropic.Anthropic, engine: FakeEngine) -> None:
    engine.allow(3)
    ask = {"model": MODEL, "max_tokens": 500, "messages": [{"role": "user", "content": "Rain?"}]}
    stream = anthropic_client.messages.create(**ask, stream=True)
    assert next(iter(stream)).type == "message_start"
    assert engine.stats().running == 1
    stream.close()
    eventually(lambda: engine.stats().running == 0)
    engine.allow(10**9)
