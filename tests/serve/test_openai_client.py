"""The real `openai` client against a socket."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pydantic
import pytest

from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import EOS, FakeEngine
from .test_lifecycle import eventually
from .test_tools import TEMPLATE, openai_served, tool_engine

TEXT = "Hello wörld €!"
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_completion_and_chat(openai_client: openai.OpenAI) -> None:
    completion = openai_client.completions.create(model="fake/model", prompt="abc")
    assert completion.choices[0].text == TEXT
    assert completion.usage.prompt_tokens_details.cached_tokens == 3
    chat = openai_client.chat.completions.create(model="fake/model", messages=MESSAGES)
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert [model.id for model in openai_client.models.list()] == ["fake/model"]
    assert openai_client.models.retrieve("fake/model").id == "fake/model"


def test_streams(openai_client: openai.OpenAI) -> None:
    chunks = openai_client.completions.create(model="fake/model", prompt="abc", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    chat = list(
        openai_client.chat.completions.create(
            model="fake/model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chat[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices) == TEXT
    assert chat[-1].usage.total_tokens == chat[-1].usage.prompt_tokens + chat[-1].usage.completion_tokens


def test_stop_n_and_logprobs(openai_client: openai.OpenAI) -> None:
    chat = openai_client.chat.completions.create(
        model="fake/model", messages=MESSAGES, stop=["d"], n=2, logprobs=True, top_logprobs=2, temperature=0
    )
    assert [choice.message.content for choice in chat.choices] == ["Hello wörl"] * 2
    entry = chat.choices[1].logprobs.content[0]
    assert (entry.token, entry.logprob, bytes(entry.bytes)) == ("Hello", -0.5, b"Hello")
    assert entry.top_logprobs[0].token == "Hello"
    completion = openai_client.completions.create(model="fake/model", prompt=[5, 6], logprobs=1)
    assert completion.choices[0].logprobs.tokens[0] == "Hello"


def test_leaving_a_stream_frees_the_request(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.allow(3)
    stream = openai_client.chat.completions.create(model="fake/model", messages=MESSAGES, stream=True)
    assert next(iter(stream)).choices[0].delta.role == "assistant"
    assert engine.stats().running == 1
    stream.close()
    eventually(lambda: engine.stats().running == 0)


def test_errors_become_the_clients_exceptions(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        openai_client.completions.create(model="fake/model", prompt="abc", temperature=-1)
    assert error.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="abc")
    engine.allow(2)
    stream = openai_client.completions.create(model="fake/model", prompt="abc", stream=True)
    assert next(stream).choices[0].text == "Hello"
    engine.die()
    with pytest.raises(openai.APIError, match="engine failed"):
        list(stream)


def test_many_clients_at_once_get_their_own_replies(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.script = lambda prompt, index: [*prompt, 1]

    def ask(number: int) -> str:
        text = f"prompt {number} é"
        if number % 2:
            return openai_client.completions.create(model="fake/model", prompt=text, max_tokens=50).choices[0].text
        chunks = openai_client.completions.create(model="fake/model", prompt=text, max_tokens=50, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(100))) == [f"prompt {number} é" for number in range(100)]
    assert engine.stats().running == 0


class City(pydantic.BaseModel):
    """A reply with a structure, and the arguments of a tool."""

    name: str
    people: int


KOELN = '{"name": "Köln", "people": 1087353}'
HERMES_CALL = f'<tool_call>\n{{"name": "City", "arguments": {KOELN}}}\n</tool_call>'
CITY = City(name="Köln", people=1087353)


def test_replies_with_a_structure_are_parsed() -> None:
    engine = tool_engine(KOELN)
    with openai_served(engine, ServerConfig(port=0)) as client:
        parsed = client.chat.completions.parse(model="fake/model", messages=MESSAGES, response_format=City)
        assert parsed.choices[0].message.parsed == CITY
        schema = json.loads(engine.submitted[-1][1].structured_outputs.json)
        assert list(schema["properties"]) == ["name", "people"]
        assert schema["additionalProperties"] is False

        with client.chat.completions.stream(model="fake/model", messages=MESSAGES, response_format=City) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_completion().choices[0].message.parsed == CITY
        assert "content.done" in kinds

        free = client.chat.completions.create(
            model="fake/model", messages=MESSAGES, response_format={"type": "json_object"}
        )
        assert json.loads(free.choices[0].message.content) == json.loads(KOELN)
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model="fake/model", messages=MESSAGES, response_format={"type": "json_schema"}
            )
        assert error.value.param == "response_format.json_schema"


@pytest.mark.parametrize("parser", ["hermes", None])
def test_forced_and_strict_tools_are_parsed(parser: Any) -> None:
    engine = tool_engine("x", template=TEMPLATE)
    config = ServerConfig(port=0, enable_auto_tool_choice=parser is not None, tool_call_parser=parser)
    texts = {
        "auto": HERMES_CALL,
        "required": HERMES_CALL if parser else f'[{{"name": "City", "parameters": {KOELN}}}]',
        "named": HERMES_CALL if parser else KOELN,
    }
    with openai_served(engine, config) as client:
        for choice in ("auto", "required", "named") if parser else ("required", "named"):
            engine.script = lambda _prompt, _index, text=texts[choice]: [*engine.tokenizer.encode(text), EOS]
            tool = openai.pydantic_function_tool(City)
            tool_choice = {"type": "function", "function": {"name": "City"}} if choice == "named" else choice
            request = {"model": "fake/model", "messages": MESSAGES, "tools": [tool], "tool_choice": tool_choice}
            parsed = client.chat.completions.parse(**request).choices[0]
            (call,) = parsed.message.tool_calls
            assert call.function.parsed_arguments == CITY
            assert parsed.finish_reason == ("stop" if choice == "named" else "tool_calls")
            assert engine.submitted[-1][1].structured_outputs is not None
            with client.chat.completions.stream(**request) as stream:
                done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
                final = stream.get_final_completion().choices[0]
            assert final.message.tool_calls[0].function.parsed_arguments == CITY
            assert [event.parsed_arguments for event in done] == [CITY]
            assert final.finish_reason == parsed.finish_reason
