"""GGUF files: the same model, tokens and numbers as the folder they were made from."""

import contextlib
import json
import struct
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.rope import Llama3Scaling, Rope
from tokenspeed_jax.text.tokenizer import Tokenizer
from tokenspeed_jax.weights import load_model, model_of, open_checkpoint
from tokenspeed_jax.weights.gguf_checkpoint import half_pairing
from tokenspeed_jax.weights.gguf_file import GgufFile
from tokenspeed_jax.weights.gguf_tokenizer import gguf_tokenizer, merges_by_score

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NORMS = {
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def neighbour_pairing(weight, heads):
    """llama.cpp's row order, row by row: rotary partner i + d/2 of row i comes to stand beside it."""
    dim = len(weight) // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


def exported(name, value, family):
    """A tensor's name and values as llama.cpp's exporter writes them."""
    stem = name.removesuffix(".weight")
    if stem in TOP:
        target = TOP[stem]
    else:
        _, _, layer, rest = stem.split(".", 3)
        target = f"blk.{layer}.{(LAYER | NORMS[family])[rest]}"
    if family == "llama" and "attn_q" in target:
        value = neighbour_pairing(value, 4)
    if family == "llama" and "attn_k" in target:
        value = neighbour_pairing(value, 2)
    if family == "gemma3" and "norm" in target:
        value = value + 1
    return f"{target}.weight", value


@pytest.fixture
def export(tiny_checkpoint, tmp_path):
    """`export(family, **metadata)`: a tiny model as a GGUF file; None removes a field."""

    def export(family, architecture=None, rope_freqs=None, **metadata):
        checkpoint = open_checkpoint(str(tiny_checkpoint(family)))
        config, tokenizer = checkpoint.hf_config, checkpoint.tokenizer()
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture or family)
        fields = {
            "block_count": config["num_hidden_layers"],
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "attention.key_length": config["head_dim"],
            "rope.freq_base": 1000000.0 if family == "gemma3" else config["rope_theta"],
        }
        if family == "gemma3":
            fields |= {"attention.sliding_window": 32, "attention.sliding_window_pattern": 3}
        fields = {f"{family}.{key}": value for key, value in fields.items()}
        fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"}
        fields |= {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
        for key, value in (fields | {name.replace("__", "."): value for name, value in metadata.items()}).items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                writer.add_int32(key, value)
        backend = tokenizer._backend
        writer.add_token_list([backend.id_to_token(i) for i in range(512)])
        writer.add_token_types([3] * 3 + [1] * 509)
        model = json.loads(backend.to_str())["model"]
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
        for name in checkpoint.tensors.names():
            writer.add_tensor(*exported(name, checkpoint.tensors.read(name).astype(np.float32), family))
        if rope_freqs is not None:
            writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return str(path)

    return export


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_file_is_the_model_it_was_made_from(family, export, tiny_checkpoint):
    folder, file = open_checkpoint(str(tiny_checkpoint(family))), open_checkpoint(export(family))
    assert model_of(file)[1] == model_of(folder)[1]
    one, other = (load_model(c, dtype=jnp.float32, progress=False) for c in (folder, file))
    for (path, a), (_, b) in zip(nnx.to_flat_state(nnx.state(one)), nnx.to_flat_state(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))
    assert file.dtype == jnp.bfloat16


def test_tokenizer_is_the_one_it_was_made_from(export, tiny_checkpoint):
    folder, file = (open_checkpoint(p).tokenizer() for p in (str(tiny_checkpoint("llama")), export("llama")))
    for text in ("hello world", "<bos>It's 12345 o'clock!\n\n  ok<eos>", "日本 🎉"):
        assert file.encode(text) == folder.encode(text)
        assert file.decode(file.encode(text)) == folder.decode(folder.encode(text))
    assert (file.special_ids, file.bos_token_id, file.eos_token_ids) == ({0, 1, 2}, 0, (1,))


def test_end_tokens_and_template_come_from_the_metadata(export):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = {"tokenizer.ggml.eot_token_id": 2, "tokenizer.chat_template": template}
    tokenizer = open_checkpoint(export("llama", **metadata)).tokenizer()
    assert tokenizer.eos_token_ids == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"


def test_begin_and_end_tokens_are_added_when_the_metadata_says_so(export):
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = open_checkpoint(export("llama", **metadata)).tokenizer()
    inner = tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.encode("a b") == [0, *inner, 1]


def test_rotary_row_order_is_undone():
    weight = np.random.default_rng(0).standard_normal((24, 5)).astype(np.float32)
    for heads in (1, 2, 3):
        np.testing.assert_array_equal(half_pairing(neighbour_pairing(weight, heads), heads), weight)


def test_llama3_scaling_is_recognised_by_its_divisors(export):
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    divisors = Rope(500000.0, 16).frequencies() / Rope(500000.0, 16, scaling).frequencies()
    path = export("llama", rope_freqs=divisors, **{"llama.rope.freq_base": 500000.0})
    config = model_of(open_checkpoint(path))[1]
    assert config.ropes[0].scaling.factor == pytest.approx(32.0)
    assert config.ropes[0].scaling == Llama3Scaling(config.ropes[0].scaling.factor, 1.0, 4.0, 8192)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        open_checkpoint(export("llama", rope_freqs=np.linspace(1, 5, 8)))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_named_rope_scalings_are_read(kind, export):
    metadata = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    path = export("llama", **{f"llama.{key}": value for key, value in metadata.items()})
    scaling = model_of(open_checkpoint(path))[1].ropes[0].scaling
    assert type(scaling).__name__.lower() == f"{kind}scaling"
    assert scaling.factor == 4.0


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "mamba"}, r"'mamba' is not supported \(supported: gemma3, llama\)"),
        ({"llama.expert_count": 8}, "expert_count = 8"),
        ({"llama.rope.dimension_count": 8}, "dimension_count 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.attention.head_count_kv": [2, 2, 2, 2]}, "differs by layer"),
        ({"llama.embedding_length": None}, r"no llama\.embedding_length"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_served_is_refused_by_name(metadata, message, export):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(export("llama", **metadata))


@pytest.mark.parametrize(("field", "value"), [("tokenizer.ggml.pre", "tekken"), ("tokenizer.ggml.model", "bert")])
def test_unknown_kind_of_tokenizer_is_refused_by_name(field, value, export):
    with pytest.raises(CheckpointError, match=f"{field} '{value}' is not supported"):
        open_checkpoint(export("llama", **{field: value})).tokenizer()


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " 1234", ".", " Now", "!!", "\n\n"]),
        ("smollm", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", " Now", "!!", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " pay", " ", "123", "4", ".", " Now", "!!\n\n"]),
        ("qwen2", ["I", "'ll", " pay", " ", "1", "2", "3", "4", ".", " Now", "!!\n\n"]),
        ("default", ["I", "'", "ll", " pay", " ", "123", "4", ".", " Now", "!!", "\n\n"]),
    ],
)
def test_text_is_cut_into_words_as_the_name_says(kind, pieces, export):
    tokenizer = open_checkpoint(export("llama", **{"tokenizer.ggml.pre": kind})).tokenizer()
    cut = tokenizer._backend.pre_tokenizer.pre_tokenize_str("I'll pay 1234. Now!!\n\n")
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in cut] == pieces


def test_merges_of_sentence_piece_follow_scores():
    tokens = ["<unk>", "a", "b", "ab", "aba", "ba", "<0x41>"]
    types, scores = [2, 1, 1, 1, 1, 1, 6], [0.0, -9.0, -9.0, -2.0, -3.0, -1.0, 0.0]
    assert merges_by_score(tokens, types, scores) == [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer(gguf_tokenizer(metadata))
    assert tokenizer.encode("abab") == [4, 2]  # "ba" joins first, then "a" and "ba"
    assert tokenizer.encode("A") == [6]
    with pytest.raises(CheckpointError, match="6 tokenizer"):
        merges_by_score(tokens, types, scores[:-1])


def test_reader_agrees_with_the_gguf_package(export):
    path = export("gemma3", **{"some.flag": True, "some.list": [1.5, 2.5], "some.number": -3, "some.text": "é"})
    ours, theirs = GgufFile(Path(path)), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        values = ours.dequantized(mine, 0, mine.rows)
        np.testing.assert_array_equal(values, gguf.dequantize(tensor.data, tensor.tensor_type).reshape(values.shape))


@pytest.mark.parametrize("name", ["smollm2_path", "gemma3_270m_path"])
def test_rows_out_of_the_middle_are_those_of_the_whole(name, request):
    """On the real files: every type of quantisation in them."""
    file = GgufFile(request.getfixturevalue(name))
    tensors = {tensor.kind: tensor for tensor in file.tensors.values()}
    assert len(tensors) >= 3
    raw = np.memmap(file.path, np.uint8, "r")
    for kind, tensor in tensors.items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = tensor.rows * tensor.shape[-1] // block * block_bytes
        whole = raw[tensor.start : tensor.start + size].reshape(tensor.rows, -1)[:20]
        expected = gguf.dequantize(np.asarray(whole), kind).reshape(len(whole), -1)
        first, last = (3, 9) if tensor.rows > 9 else (0, 1)
        np.testing.assert_array_equal(file.dequantized(tensor, first, last), expected[first:last])
        assert np.isfinite(expected).all()
        assert np.abs(expected).max() > 0


def test_file_that_is_cut_short_is_refused(export, tmp_path):
    whole = Path(export("llama")).read_bytes()
    short = tmp_path / "short.gguf"
    for size in (0, 3, 10, 100, 5000, len(whole) // 2, len(whole) - 64):
        short.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"short\.gguf"):
            open_checkpoint(str(short))
    short.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(CheckpointError, match="no GGUF file"):
        open_checkpoint(str(short))
    short.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(CheckpointError, match="version 9"):
        open_checkpoint(str(short))


def gguf_header(*fields: bytes, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(fields)) + b"".join(fields) + tensors


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def floats(name: str, *shape: int, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)


@pytest.mark.parametrize(
    "header",
    [
        gguf_header(text("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000),
        gguf_header(text("a") + struct.pack("<IIQ", 9, 0, 2**64 - 1)),
        gguf_header(text("a") + struct.pack("<IIQ", 9, 8, 2**64 - 1)),
        gguf_header(text("a") + struct.pack("<IQ", 8, 2**64 - 1)),
        gguf_header(text("a") + struct.pack("<I", 99)),
        gguf_header(*[text("a") + struct.pack("<IB", 0, 1)] * 2),
        gguf_header(text("general.alignment") + struct.pack("<II", 4, 0)),
        gguf_header(text("general.alignment") + struct.pack("<I", 8) + text("x")),
        gguf_header(tensors=floats("t", 2**63, 2**63), num_tensors=1),
        gguf_header(tensors=floats("t", 8, 0), num_tensors=1),
        gguf_header(tensors=floats("t", 8, offset=2**63), num_tensors=1),
        gguf_header(tensors=floats("t", 8) * 2, num_tensors=2),
        gguf_header(tensors=floats("t", 8) + floats("u", 8, offset=16), num_tensors=2),
        gguf_header(num_tensors=2**64 - 1),
    ],
)
def test_header_that_lies_is_refused(header, tmp_path):
    path = tmp_path / "lying.gguf"
    path.write_bytes(header + bytes(64))
    with pytest.raises(CheckpointError, match=r"lying\.gguf"):
        GgufFile(path)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_header_is_refused_or_can_be_read_whole(data, tmp_path_factory):
    header = gguf_header(
        text("general.alignment") + struct.pack("<II", 4, 32),
        text("list") + struct.pack("<IIQ3H", 9, 2, 3, 1, 2, 3),
        tensors=floats("t", 4, 2) + floats("u", 8, offset=32),
        num_tensors=2,
    )
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(4, len(header) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(bytes(damaged) + bytes(96))
    with contextlib.suppress(CheckpointError):
        file = GgufFile(path)
        assert sum(file.dequantized(item, 0, item.rows).size for item in file.tensors.values()) <= 1024
