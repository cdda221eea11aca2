"""Checkpoint folders: what is missing, extra or misshapen is named; what is there is loaded as it stands."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource


@pytest.fixture
def folder(tiny_checkpoint, tmp_path) -> Callable[[str], Path]:
    def copy(family):
        return Path(shutil.copytree(tiny_checkpoint(family), tmp_path / family))

    return copy


def all_tensors(folder):
    source = SafetensorsSource([folder / "model.safetensors"])
    return {name: source.read(name).astype(np.float32) for name in source.names()}


def rewrite(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def load(folder, dtype=jnp.float32):
    return load_model(open_checkpoint(str(folder)), dtype=dtype, progress=False)


def assert_same_parameters(one, other):
    for (path, a), (_, b) in zip(nnx.to_flat_state(nnx.state(one)), nnx.to_flat_state(nnx.state(other)), strict=True):
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))


def test_fused_parameters_are_rows_of_the_checkpoints_tensors(folder):
    path = folder("llama")
    tensors, model = all_tensors(path), load(path, jnp.bfloat16)
    qkv = model.layers[2].attention.qkv.proj.weight[...]
    assert qkv.dtype == jnp.bfloat16
    parts = [tensors[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv"]
    np.testing.assert_array_equal(qkv.astype(jnp.float32), np.concatenate(parts))
    gate_up = [tensors[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up")]
    np.testing.assert_array_equal(load(path).layers[0].mlp.gate_up.weight[...], np.concatenate(gate_up))
    np.testing.assert_array_equal(load(path).head.weight[...], tensors["lm_head.weight"])


def test_missing_extra_and_misshapen_tensors_are_all_named(folder):
    path = folder("llama")
    tensors = all_tensors(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    # As many rows in all, but not the right ones to q and to k.
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((32, 64), np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 64), np.float32)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int32)
    rewrite(path, tensors)
    with pytest.raises(CheckpointError) as error:
        load(path)
    message = str(error.value)
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 unknown: model.layers.9.mlp.up_proj.weight" in message
    assert "model.layers.0.self_attn.q_proj.weight (32, 64) where (64, 64) is expected" in message
    assert "model.layers.0.self_attn.k_proj.weight (64, 64) where (32, 64) is expected" in message
    assert "1 not floating-point: model.norm.weight (int32)" in message


def test_long_lists_of_names_are_cut(folder):
    path = folder("llama")
    rewrite(path, {"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match="38 missing: ") as error:
        load(path)
    assert str(error.value).count("model.layers") + str(error.value).count("embed_tokens") <= 10


def test_computed_and_tied_tensors_are_ignored(folder):
    path = folder("qwen3")
    before, tensors = load(path), all_tensors(path)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(16, np.float32)
    tensors["lm_head.weight"] = np.ones((512, 64), np.float32)
    rewrite(path, tensors)
    assert_same_parameters(load(path), before)
    # Without the tie the head is the model's own.
    config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    assert (load(path).head.weight[...] == 1).all()


def test_shards_load_as_one_file_does(folder):
    path = folder("gemma3")
    before, tensors = load(path), all_tensors(path)
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, path / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_parameters(load(path), before)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        open_checkpoint(str(path))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_missing_file_is_named(file, folder):
    path = folder("llama")
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {file}"):
        open_checkpoint(str(path))


def test_empty_folder_lists_all_that_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json, tokenizer.json, model.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_configuration_that_is_no_json_object_is_refused(text, folder):
    path = folder("llama")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(path))


def test_unknown_architecture_is_named_with_the_supported_ones(folder):
    path = folder("llama")
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["BertModel"]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'BertModel'.*LlamaForCausalLM"):
        load(path)


def test_path_that_is_nothing_is_no_download(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("tried to download"))
    for name, message in (
        (str(tmp_path / "absent"), "no such folder"),
        ("absent", "no such folder"),
        (str(tmp_path / "absent.gguf"), "no such file"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(name)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(str(tmp_path / "weights.bin"))


def test_hub_id_is_fetched_at_its_revision(folder, monkeypatch):
    path, asked = folder("llama"), []

    def snapshot_download(hub_id, *, revision, allow_patterns, ignore_patterns):
        asked.append((hub_id, revision))
        assert "*.safetensors" in allow_patterns
        return str(path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("owner/name", revision="v2", progress=False)
    assert asked == [("owner/name", "v2")]
    assert checkpoint.name == "owner/name"
    assert checkpoint.dtype == jnp.bfloat16


def test_failed_fetch_says_what_was_tried(monkeypatch):
    def snapshot_download(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"'owner/name' is no folder.*no route to host"):
        open_checkpoint("owner/name", progress=False)


def test_torch_is_never_imported(tiny_checkpoint):
    code = f"""
import sys
import jax.numpy as jnp
import tokenspeed_jax.models.registry, tokenspeed_jax.weights, tokenspeed_jax.text
checkpoint = tokenspeed_jax.weights.open_checkpoint({str(tiny_checkpoint("llama"))!r})
tokenspeed_jax.weights.load_model(checkpoint, dtype=jnp.float32, progress=False)
checkpoint.tokenizer().encode("hello")
import tokenspeed_jax.weights.gguf_checkpoint
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
