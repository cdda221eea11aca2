"""`/v1/completions` against a scripted model: fields reach the engine, replies have OpenAI's form."""

import pytest
from starlette.testclient import TestClient

from .fake_engine import BOS, EOS, FakeEngine
from .sse import events, joined

TEXT = "Hello wörld €!"
BODY = {"model": "fake/model", "prompt": "abc", "max_tokens": 100}


def test_text_prompt_is_answered_with_text_usage_and_reason(client: TestClient, engine: FakeEngine) -> None:
    reply = client.post("/v1/completions", json=BODY)
    assert reply.status_code == 200
    body = reply.json()
    assert body["object"] == "text_completion"
    assert body["model"] == "fake/model"
    assert body["id"].startswith("cmpl-")
    assert reply.headers["x-request-id"] == body["id"]
    assert body["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    prompt, generated = len(engine.tokenizer.encode("abc")), len(engine.reply_ids) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("He", ["He"]),
        (["He", "llo"], ["He", "llo"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine(client: TestClient, engine: FakeEngine, prompt, expected) -> None:
    body = client.post("/v1/completions", json=BODY | {"prompt": prompt}).json()
    ids = [engine.tokenizer.encode(item) if isinstance(item, str) else item for item in expected]
    assert [submitted for submitted, _ in engine.submitted] == ids
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_every_sampling_field_reaches_the_engine(client: TestClient, engine: FakeEngine) -> None:
    given = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.25,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "seed": 11, "stop": ["a", "b"],
        "stop_token_ids": [4], "ignore_eos": True, "n": 2, "skip_special_tokens": False,
    }  # fmt: skip
    reply = client.post("/v1/completions", json=BODY | given | {"logit_bias": {"5": -1.5}, "logprobs": 2, "user": "u"})
    assert reply.status_code == 200
    params = engine.submitted[0][1]
    assert {name: getattr(params, name) for name in given} == given | {"stop": ("a", "b"), "stop_token_ids": (4,)}
    assert dict(params.logit_bias) == {5: -1.5}
    assert (params.logprobs, params.top_logprobs) == (True, 2)


def test_defaults_are_those_of_openai(client: TestClient, engine: FakeEngine) -> None:
    nulls = dict.fromkeys(("max_tokens", "temperature", "n", "stop", "logprobs", "seed", "stream", "logit_bias"))
    assert client.post("/v1/completions", json=BODY | nulls).status_code == 200
    params = engine.submitted[0][1]
    assert (params.max_tokens, params.temperature, params.n, params.stop, params.logprobs) == (16, 1.0, 1, (), False)


def test_special_tokens_are_added_unless_refused(client: TestClient, engine: FakeEngine) -> None:
    engine.tokenizer._backend.post_processor = __import__("tokenizers").processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    for flag in (None, False):
        client.post("/v1/completions", json=BODY | {"prompt": "a", "add_special_tokens": flag})
    assert [prompt[0] == BOS for prompt, _ in engine.submitted] == [True, False]


def test_neutral_fields_of_clients_are_accepted(client: TestClient) -> None:
    neutral = {
        "best_of": 2, "n": 2, "echo": False, "suffix": None, "service_tier": "auto", "store": False, "metadata": {},
        "response_format": {"type": "text"}, "length_penalty": 1.0, "use_beam_search": False, "prompt_logprobs": None,
    }  # fmt: skip
    assert client.post("/v1/completions", json=BODY | neutral).status_code == 200


def test_stream_joins_to_the_whole_reply(client: TestClient) -> None:
    *chunks, last = events(client, "/v1/completions", BODY)
    assert last == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "text_completion" and "usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == TEXT
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert not any("\ufffd" in choice["text"] for choice in choices)


def test_stream_of_several_samples_keeps_them_apart(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda prompt, index: [2 + ord("a") + index + 10 * len(prompt)]
    chunks = events(client, "/v1/completions", BODY | {"prompt": [[9], [9, 9]], "n": 2, "max_tokens": 3})[:-1]
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert len(set(texts.values())) == 4
    whole = client.post("/v1/completions", json=BODY | {"prompt": [[9], [9, 9]], "n": 2, "max_tokens": 3}).json()
    assert [choice["text"] for choice in whole["choices"]] == list(texts.values())
    assert whole["usage"]["prompt_tokens"] == 3
    assert whole["usage"]["completion_tokens"] == 12


def test_usage_chunk_comes_only_when_asked_for(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=BODY).json()
    *chunks, usage, last = events(client, "/v1/completions", BODY | {"stream_options": {"include_usage": True}})
    assert last == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_stop_strings_and_limits_end_a_reply(client: TestClient) -> None:
    stopped = client.post("/v1/completions", json=BODY | {"stop": " w"}).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == ("Hello", "stop")
    cut = client.post("/v1/completions", json=BODY | {"max_tokens": 1}).json()["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == ("Hello", "length")


def test_token_ids_are_returned_when_asked_for(client: TestClient, engine: FakeEngine) -> None:
    body = BODY | {"prompt": [7, 8], "return_token_ids": True}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [*engine.reply_ids, EOS]
    assert choice["prompt_token_ids"] == [7, 8]
    choices = [chunk["choices"][0] for chunk in events(client, "/v1/completions", body)[:-1]]
    assert joined(choice.get("token_ids", []) for choice in choices) == [*engine.reply_ids, EOS]
    assert [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice] == [[7, 8]]
