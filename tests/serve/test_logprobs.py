"""Log-probabilities in both formats, and the bytes behind tokens."""

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, models

from tokenspeed_jax.serve.token_bytes import token_bytes
from tokenspeed_jax.text.tokenizer import Tokenizer, TokenizerFiles

from .fake_engine import EOS, FakeEngine, byte_tokenizer
from .sse import events, joined

COMPLETION = {"model": "fake/model", "prompt": "abc", "max_tokens": 100}
CHAT = {"model": "fake/model", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}


def test_completion_lists_are_parallel_and_offsets_point_into_the_text(client: TestClient) -> None:
    choice = client.post("/v1/completions", json=COMPLETION | {"logprobs": 0}).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [
        "Hello", " w", "bytes:\\xc3", "bytes:\\xb6", "r", "l", "d", " ", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac",
        "!", "<eos>",
    ]  # fmt: skip
    # A character belongs to the token that completes it: offsets count whole characters before the token.
    assert logprobs["text_offset"] == [0, 5, 7, 7, 8, 9, 10, 11, 12, 12, 12, 13, 14]
    assert logprobs["token_logprobs"] == [-0.5] * 13
    assert logprobs["top_logprobs"] is None
    for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"].startswith(token, offset)


def test_alternatives_hold_the_token_itself_and_no_infinity(client: TestClient) -> None:
    choice = client.post("/v1/completions", json=COMPLETION | {"logprobs": 2, "max_tokens": 2}).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0]["Hello"] == -0.5
    assert min(choice["logprobs"]["top_logprobs"][0].values()) == -9999.0


def test_completion_stream_carries_the_same_logprobs(client: TestClient) -> None:
    whole = client.post("/v1/completions", json=COMPLETION | {"logprobs": 1}).json()["choices"][0]["logprobs"]
    chunks = events(client, "/v1/completions", COMPLETION | {"logprobs": 1})[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert parts.pop() is None
    assert {name: joined(part[name] for part in parts) for name in whole} == whole


def test_chat_entries_have_bytes_that_join_to_the_text(client: TestClient) -> None:
    choice = client.post("/v1/chat/completions", json=CHAT | {"top_logprobs": 2}).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    together = b"".join(bytes(entry["bytes"]) for entry in content[:-1])
    assert together.decode() == choice["message"]["content"]
    assert content[2]["token"] == "\\xc3"
    assert content[0]["top_logprobs"][0] == {"token": "Hello", "logprob": -0.5, "bytes": list(b"Hello")}
    assert content[0]["top_logprobs"][1]["logprob"] == -9999.0
    without = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in without)


def test_chat_stream_carries_the_same_logprobs(client: TestClient) -> None:
    whole = client.post("/v1/chat/completions", json=CHAT | {"top_logprobs": 1}).json()["choices"][0]["logprobs"]
    chunks = events(client, "/v1/chat/completions", CHAT | {"top_logprobs": 1})[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert joined(part["content"] for part in parts) == whole["content"]


def test_hidden_special_tokens_take_no_room_in_the_text(client: TestClient, engine: FakeEngine) -> None:
    engine.script = lambda _prompt, _index: [260, EOS, 260]
    for skip, offsets in ((True, [0, 4, 4]), (False, [0, 4, 9])):
        body = COMPLETION | {"logprobs": 0, "ignore_eos": True, "max_tokens": 3, "skip_special_tokens": skip}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["logprobs"]["text_offset"] == offsets
        assert choice["text"].rindex("Hell") == offsets[-1]


@pytest.mark.parametrize("text", ["Hello wörld €!", "a\ufffdb", "日本語 🙂", " x"])
def test_bytes_of_byte_level_tokens_join_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    assert b"".join(token_bytes(tokenizer, token) for token in tokenizer.encode(text)) == text.encode()


def test_bytes_of_sentencepiece_tokens_keep_their_spaces() -> None:
    pieces = ["<s>", "<0xE2>", "<0x41>", "▁he", "llo", "\ufffd"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(TokenizerFiles(tokenizer_json=backend.to_str(), tokenizer_config={}))
    expected = [b"<s>", b"\xe2", b"A", b" he", b"llo", "\ufffd".encode(), b""]
    assert [token_bytes(tokenizer, index) for index in range(7)] == expected
