"""Token ids and chat prompts are those of the goldens; odd files and texts are refused."""

import json
import shutil
from pathlib import Path

import pytest

from tokenspeed_jax.errors import CheckpointError, InvalidRequest
from tokenspeed_jax.text.tokenizer import Tokenizer, TokenizerFiles
from tokenspeed_jax.weights import open_checkpoint


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_real_tokenizer_agrees_with_transformers(name, real_tokenizer, real_golden):
    tokenizer, golden = real_tokenizer(name), real_golden(name)
    assert list(tokenizer.eos_token_ids) == golden["eos_token_ids"]
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["text"], prompt["add_special_tokens"]) == prompt["prompt_ids"], prompt["id"]
        assert tokenizer.decode(prompt["output_ids"], skip_special_tokens=False) == prompt["output_text"]


def test_real_chat_template_agrees_with_transformers(real_tokenizer, real_golden):
    chats = [prompt for prompt in real_golden("smollm2-135m")["prompts"] if "messages" in prompt]
    assert len(chats) == 2
    for prompt in chats:
        assert real_tokenizer("smollm2-135m").apply_chat_template(prompt["messages"]) == prompt["text"]


def test_base_model_has_no_chat_template(real_tokenizer):
    assert not real_tokenizer("gemma3-270m").has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        real_tokenizer("gemma3-270m").apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("text", ["", "hello", "  two  spaces", "héllo wörld\n\n\tx", "日本語 🎉👩‍👩‍👧", "<bos>a<eos>"])
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_text_survives_the_round_trip(name, text, real_tokenizer):
    tokenizer = real_tokenizer(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


def test_begin_token_is_added_only_when_asked(real_tokenizer):
    gemma, smollm = real_tokenizer("gemma3-270m"), real_tokenizer("smollm2-135m")
    assert gemma.encode("a") == [gemma.bos_token_id, *gemma.encode("a", add_special_tokens=False)]
    assert smollm.encode("a") == smollm.encode("a", add_special_tokens=False)  # its file says so


@pytest.fixture
def folder(tiny_checkpoint, tmp_path):
    return Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "llama"))


def edit(folder, name, **changes):
    fields = json.loads((folder / name).read_text()) | changes
    (folder / name).write_text(json.dumps(fields))


def tokenizer_of(folder):
    return open_checkpoint(str(folder)).tokenizer()


def test_special_tokens_are_skipped_and_kept(folder):
    tokenizer = tokenizer_of(folder)
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (512, 0)
    ids = tokenizer.encode("<bos>hello<eos>")
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hello<eos>"


def test_end_tokens_come_from_the_first_file_that_names_them(folder):
    edit(folder, "generation_config.json", eos_token_id=[7, 8])
    assert tokenizer_of(folder).eos_token_ids == (7, 8)
    edit(folder, "generation_config.json", eos_token_id=None)
    edit(folder, "config.json", eos_token_id=9)
    assert tokenizer_of(folder).eos_token_ids == (9,)
    edit(folder, "config.json", eos_token_id=None)
    assert tokenizer_of(folder).eos_token_ids == (1,)
    edit(folder, "tokenizer_config.json", eos_token={"content": "<pad>", "special": True})
    assert tokenizer_of(folder).eos_token_ids == (2,)
    edit(folder, "tokenizer_config.json", eos_token=None)
    assert tokenizer_of(folder).eos_token_ids == ()


def test_truncation_left_by_a_training_run_is_dropped(folder):
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    edit(folder, "tokenizer.json", truncation=truncation)
    assert len(tokenizer_of(folder).encode("one two three four five")) > 3


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb"])
def test_lone_surrogates_are_refused(text, folder):
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer_of(folder).encode(text)


def test_tokenizer_that_cannot_be_read_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        tokenizer_of(folder)


def test_decoder_that_cannot_be_streamed_is_refused_by_name(folder):
    edit(folder, "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(CheckpointError, match="WordPiece"):
        tokenizer_of(folder)


def test_configuration_of_the_tokenizer_may_be_absent(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(TokenizerFiles.read(folder))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.has_chat_template) == (None, (), False)
