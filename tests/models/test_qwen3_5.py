"""What the goldens of Qwen3.5 and its relatives do not show: released layouts, and blocks by hand."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.models.gated_attention import GatedAttention
from tokenspeed_jax.models.gated_delta_net import DeltaNetShape, GatedDeltaNet
from tokenspeed_jax.models.norms import unit_vectors
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.rope import Rope
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource

SHAPE = DeltaNetShape(key_heads=1, value_heads=1, key_dim=2, value_dim=2, convolution_width=2)


def all_tensors(folder):
    source = SafetensorsSource([folder / "model.safetensors"])
    return {name: source.read(name).astype(np.float32) for name in source.names()}


def load(folder):
    return load_model(open_checkpoint(str(folder)), dtype=jnp.float32, progress=False)


def stacked_experts(tensors):
    """The same tensors with a layer's experts in two of them, as multimodal checkpoints have it."""
    kept = {name: value for name, value in tensors.items() if ".experts." not in name}
    for block in sorted({name.split(".experts.")[0] for name in tensors if ".experts." in name}):

        def each(projection, block=block):
            return np.stack([tensors[f"{block}.experts.{expert}.{projection}.weight"] for expert in range(8)])

        kept[f"{block}.experts.gate_up_proj"] = np.concatenate([each("gate_proj"), each("up_proj")], axis=1)
        kept[f"{block}.experts.down_proj"] = each("down_proj")
    return kept


@pytest.fixture(params=["qwen3_5", "qwen3_5_moe"])
def multimodal(request, tiny_checkpoint, tmp_path) -> tuple[Path, Path]:
    """(folder of a text model, folder of a released checkpoint that holds it)."""
    text = tiny_checkpoint(request.param)
    folder = Path(shutil.copytree(text, tmp_path / "multimodal"))
    config = json.loads((text / "config.json").read_text())
    architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    parts = {"architectures": [architecture], "text_config": config, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(parts))
    tensors = {
        name if name == "lm_head.weight" else name.replace("model.", "model.language_model.", 1): value
        for name, value in stacked_experts(all_tensors(text)).items()
    }
    extra = {name: np.zeros(3, np.float32) for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight")}
    save_file(tensors | extra, folder / "model.safetensors")
    return text, folder


def test_a_multimodal_checkpoint_holds_the_text_model(multimodal):
    text, folder = multimodal
    assert open_checkpoint(str(folder)).dtype == open_checkpoint(str(text)).dtype == jnp.bfloat16
    states = (nnx.to_flat_state(nnx.state(load(path))) for path in (text, folder))
    for (path, expected), (_, value) in zip(*states, strict=True):
        np.testing.assert_array_equal(value[...], expected[...], err_msg=str(path))


def test_only_vision_and_further_prediction_are_left_out(multimodal):
    _, folder = multimodal
    save_file(all_tensors(folder) | {"model.audio.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unknown: model\.audio\.weight"):
        load(folder)


def test_a_text_checkpoint_has_no_vision_but_may_predict_further(tiny_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tiny_checkpoint("qwen3_next"), tmp_path / "qwen3_next"))
    tensors = all_tensors(folder)
    save_file(tensors | {"mtp.norm.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    load(folder)
    save_file(tensors | {"model.visual.norm.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="unknown"):
        load(folder)


def test_decay_of_a_delta_net_is_that_of_the_model_facts():
    """F3 of the model facts."""
    layer = GatedDeltaNet(4, SHAPE, SHAPE.spec(0), 1e-6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.log_rate[...], layer.decay_bias[...] = jnp.array([-0.5]), jnp.array([0.1])
    assert float(layer.log_decay(jnp.array([[0.2]]))[0, 0]) == pytest.approx(-0.518193, abs=1e-6)


def test_unit_vectors_have_length_one_and_nothing_stays_nothing():
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]], jnp.bfloat16)
    np.testing.assert_allclose(unit_vectors(x), [[0.6, 0.8], [0.0, 0.0]], atol=1e-6)
    assert unit_vectors(x).dtype == jnp.float32


def test_a_heads_gate_scales_what_that_head_gives():
    spec = AttentionSpec(0, num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
    layer = GatedAttention(8, spec, 1e-6, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.out.weight[...] = jnp.eye(8)
    x, positions = jax.random.normal(jax.random.key(0), (5, 8)), jnp.arange(5)
    step, rotate = PlainStep(jnp.zeros(5, int), positions), Rope(1e4, 2).at(positions)
    weight = layer.proj.weight[...]
    layer.proj.weight[...] = weight.at[16:24].set(0)
    half_open = layer(x, rotate, step)
    layer.proj.weight[...] = weight.at[16:20].set(0).at[20:24].set(jnp.eye(8)[:1] * 1e4)
    second = layer(x, rotate, step)
    np.testing.assert_allclose(second[:, :4], half_open[:, :4], atol=1e-6)
    np.testing.assert_allclose(second[:, 4:], 2 * half_open[:, 4:] * (x[:, :1] > 0), atol=1e-6)
