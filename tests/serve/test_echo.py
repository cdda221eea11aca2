"""`echo`, `prompt_logprobs` and `/generate`'s input log-probabilities: a prompt's own tokens in replies."""

import pytest
import tokenizers
from starlette.testclient import TestClient

from tokenspeed_jax.serve.protocol import logprobs as logprobs_module

from .fake_engine import BOS, EOS, FakeEngine
from .sse import events, joined
from .test_bad_input import refused

PATH = "/v1/completions"
TEXT = "Hello wörld €!"
BODY = {"model": "fake/model", "prompt": "ä He", "max_tokens": 100, "echo": True}
PROMPT_TOKENS = ["bytes:\\xc3", "bytes:\\xa4", " ", "He"]


def test_the_prompt_stands_in_front_with_logprobs_and_offsets_of_its_own(client: TestClient) -> None:
    choice = client.post(PATH, json=BODY | {"logprobs": 2}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "ä He" + TEXT
    assert logprobs["tokens"][:6] == [*PROMPT_TOKENS, "Hello", " w"]
    assert logprobs["token_logprobs"][:5] == [None, -1.0, -2.0, -3.0, -0.5]
    assert logprobs["text_offset"][:6] == [0, 0, 1, 2, 4, 9]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"&": -0.25, "'": -0.5, "He": -3.0}
    assert len({len(part) for part in logprobs.values()}) == 1
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


def test_a_stream_joins_to_the_whole_reply_choice_by_choice(client: TestClient) -> None:
    body = BODY | {"prompt": ["ab", "He"], "n": 2, "logprobs": 1, "max_tokens": 3, "return_token_ids": True}
    whole = client.post(PATH, json=body).json()
    assert [choice["text"][:2] for choice in whole["choices"]] == ["ab", "ab", "He", "He"]
    chunks = [chunk["choices"][0] for chunk in events(client, PATH, body)[:-1]]
    for choice in whole["choices"]:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        assert own[0]["text"] in ("ab", "He")
        parts = [chunk["logprobs"] for chunk in own if chunk["logprobs"]]
        assert {name: joined(part[name] for part in parts) for name in parts[0]} == choice["logprobs"]
        assert joined(chunk.get("token_ids", []) for chunk in own) == choice["token_ids"]
        assert [chunk["prompt_token_ids"] for chunk in own if "prompt_token_ids" in chunk] == [
            choice["prompt_token_ids"]
        ]


def test_nothing_is_generated_for_max_tokens_0(client: TestClient, engine: FakeEngine) -> None:
    for extra in ({"logprobs": 1}, {}):
        body = client.post(PATH, json=BODY | {"max_tokens": 0} | extra).json()
        choice = body["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ä He", "length")
        assert body["usage"]["completion_tokens"] == 0
    assert choice["logprobs"] is None
    stream = [chunk["choices"][0] for chunk in events(client, PATH, BODY | {"max_tokens": 0, "logprobs": 0})[:-1]]
    assert [(chunk["text"], chunk["finish_reason"]) for chunk in stream] == [("ä He", None), ("", "length")]
    assert stream[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -3.0]
    assert stream[0]["logprobs"]["top_logprobs"] is None
    refused(client.post(PATH, json=BODY | {"max_tokens": 0, "echo": False}), 400, "max_tokens")


def test_an_echo_without_logprobs_scores_nothing(client: TestClient, engine: FakeEngine) -> None:
    assert client.post(PATH, json=BODY).json()["choices"][0]["logprobs"] is None
    assert engine.submitted[0][1].prompt_logprobs is None


@pytest.mark.parametrize("skip", [True, False])
def test_token_ids_are_echoed_as_their_text(client: TestClient, skip: bool) -> None:
    body = BODY | {"prompt": [BOS, 258, EOS, 258], "logprobs": 0, "max_tokens": 0, "skip_special_tokens": skip}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert choice["text"] == ("HeHe" if skip else "<bos>He<eos>He")
    assert choice["logprobs"]["text_offset"] == ([0, 0, 2, 2] if skip else [0, 5, 7, 12])


def test_special_tokens_count_where_they_were_written_and_not_where_they_were_added(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.tokenizer._backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS)]
    )
    body = BODY | {"prompt": "He<eos>He", "logprobs": 0, "max_tokens": 1}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert choice["text"] == "He<eos>HeHello"
    assert choice["logprobs"]["tokens"] == ["<bos>", "He", "<eos>", "He", "Hello"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 2, 7, 9]


def test_prompt_logprobs_are_those_of_vllm(client: TestClient, engine: FakeEngine) -> None:
    body = BODY | {"prompt": [258, 260], "echo": False, "prompt_logprobs": 1, "max_tokens": 1}
    expected = [
        None,
        {
            "260": {"logprob": -1.0, "rank": 3, "decoded_token": "Hell"},
            "40": {"logprob": -0.25, "rank": 1, "decoded_token": "&"},
        },
    ]
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert (choice["text"], choice["prompt_logprobs"]) == ("Hello", expected)
    # The alternatives of an echo and of prompt_logprobs are counted apart.
    choice = client.post(PATH, json=body | {"echo": True, "logprobs": 3}).json()["choices"][0]
    assert choice["prompt_logprobs"] == expected
    assert len(choice["logprobs"]["top_logprobs"][1]) == 4
    assert engine.submitted[-1][1].prompt_logprobs == 3
    chat = {"model": "fake/model", "messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0}
    entries = client.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"]
    assert entries[0] is None
    assert [len(entry) for entry in entries[1:]] == [1] * (len(engine.submitted[-1][0]) - 1)
    for path, wrong in ((PATH, body), ("/v1/chat/completions", chat)):
        refused(client.post(path, json=wrong | {"stream": True}), 400, "prompt_logprobs")


def test_generate_tells_of_the_input_from_where_it_is_asked_to(client: TestClient) -> None:
    body = {"input_ids": [5, 6, 260], "return_logprob": True, "sampling_params": {"max_new_tokens": 1}}
    assert "input_token_logprobs" not in client.post("/generate", json=body).json()["meta_info"]
    more = {"logprob_start_len": 0, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = client.post("/generate", json=body | more).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, "\x03"], [-1.0, 6, "\x04"], [-2.0, 260, "Hell"]]
    assert meta["input_top_logprobs"] == [None, [[-0.25, 40, "&"]], [[-0.25, 40, "&"]]]
    meta = client.post("/generate", json=body | {"logprob_start_len": 1}).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 6, None], [-2.0, 260, None]]
    assert "input_top_logprobs" not in meta
    many = body | {"logprob_start_len": 1, "sampling_params": {"max_new_tokens": 0, "n": 2}}
    for reply in client.post("/generate", json=many).json():
        assert reply["output_ids"] == reply["meta_info"]["output_token_logprobs"] == []
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        assert len(reply["meta_info"]["input_token_logprobs"]) == 2
    chunks = events(client, "/generate", body | {"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 3}})[:-1]
    assert ["input_token_logprobs" in chunk["meta_info"] for chunk in chunks] == [True, False, False]


def test_a_stop_string_is_kept_when_asked_for_by_any_of_its_names(client: TestClient, engine: FakeEngine) -> None:
    client.post(PATH, json=BODY | {"stop": " w", "include_stop_str_in_output": True})
    client.post("/generate", json={"text": "a", "sampling_params": {"stop": " w", "no_stop_trim": True}})
    client.post("/generate", json={"text": "a"})
    assert [params.include_stop_str_in_output for _, params in engine.submitted] == [True, True, False]


def test_replies_out_of_proportion_are_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs_module, "MAX_PROMPT_LOGPROBS", 24)
    body = BODY | {"prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 0}
    assert client.post(PATH, json=body | {"logprobs": 2}).status_code == 200
    error = refused(client.post(PATH, json=body | {"logprobs": 3}), 400, "prompt")
    assert "32" in error["message"]
    body = {"input_ids": [1] * 25, "return_logprob": True, "logprob_start_len": 0}
    refused(client.post("/generate", json=body), 400, "input_ids")
