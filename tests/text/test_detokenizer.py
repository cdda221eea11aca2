"""Streaming a sequence in any pieces gives the text of the whole, and never half a character."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.text import Detokenizer
from tokenspeed_jax.text.piece_decoder import stream_factory
from tokenspeed_jax.text.tokenizer import Tokenizer, TokenizerFiles
from tokenspeed_jax.weights.gguf_tokenizer import gguf_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["\u2581", "a", "b", "\u2581a", "\u2581\u2581b", "é", "日本", "\ufffd", "<0x4", "x y"]


def sentence_piece(prefixed):
    """Llama 2's kind of tokenizer (a space put in front, taken off when decoding) or Gemma's."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *WORDS]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.add_space_prefix": prefixed,
        "tokenizer.ggml.bos_token_id": 1,
    }
    return Tokenizer(gguf_tokenizer(metadata))


@pytest.fixture(scope="module")
def tokenizers(tiny_checkpoint):
    byte_level = Tokenizer(TokenizerFiles.read(tiny_checkpoint("llama")))
    return {"byte-level": byte_level, "gemma": sentence_piece(False), "llama2": sentence_piece(True)}


@st.composite
def streams(draw, size):
    """Ids, cut into pushes; bytes are frequent, so that runs of them meet other tokens."""
    ids = draw(st.lists(st.one_of(st.integers(0, size - 1), st.integers(3, 258)), max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    bounds = [0, *cuts, len(ids)]
    return ids, [ids[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("kind", ["byte-level", "gemma", "llama2"])
@pytest.mark.parametrize("skip", [True, False])
def test_pushes_add_up_to_the_whole(kind, skip, tokenizers):
    tokenizer = tokenizers[kind]

    @given(stream=streams(tokenizer.vocab_size))
    @settings(max_examples=300, deadline=None)
    def check(stream):
        ids, pushes = stream
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        texts = [detokenizer.push(push) for push in pushes]
        whole = "".join(texts) + detokenizer.flush()
        assert whole == tokenizer.decode(ids, skip_special_tokens=skip)
        # What was given out stays: each prefix of the stream is a prefix of the whole.
        assert whole.startswith("".join(texts))
        whole.encode()

    check()


@pytest.mark.parametrize("kind", ["byte-level", "gemma"])
def test_no_push_holds_half_a_character(kind, tokenizers):
    tokenizer = tokenizers[kind]
    text = "a日本é🎉b"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # characters do span tokens
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.push([token_id]) for token_id in ids]
    assert "\ufffd" not in "".join(texts)
    assert "".join(texts) + detokenizer.flush() == text
    assert sum(map(bool, texts)) > 2  # and it did stream


def test_unfinished_character_appears_only_at_the_end(tokenizers):
    tokenizer = tokenizers["byte-level"]
    ids = tokenizer.encode("🎉", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_outputs_stream_to_their_text(name, real_golden, real_tokenizer):
    tokenizer = real_tokenizer(name)
    for prompt in real_golden(name)["prompts"]:
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        text = "".join(detokenizer.push([token_id]) for token_id in prompt["output_ids"]) + detokenizer.flush()
        assert text == prompt["output_text"]


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "CTC"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}]},
        {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "Strip", "content": " ", "start": 1, "stop": 1},
            ],
        },
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}]},
    ],
    ids=json.dumps,
)
def test_decoder_that_would_stream_wrongly_is_refused(decoder):
    with pytest.raises(CheckpointError, match="decoder"):
        stream_factory(decoder)
