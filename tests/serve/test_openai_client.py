"""The real `openai` client against a socket."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .fake_engine import FakeEngine
from .test_lifecycle import eventually

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
