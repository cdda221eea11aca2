"""MXFP4 weights are expanded to exactly the values that their bytes encode, and a checkpoint of them is served."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.mxfp4 import dequantize
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource


def encode(weights):
    """Blocks, scales and the values that they stand for, of [..., in] weights; the nearest of steps up to 6."""
    cut = np.ascontiguousarray(weights).reshape(*weights.shape[:-1], -1, 32)  # safetensors writes memory as it lies
    exponents = np.floor(np.log2(np.abs(cut).max(-1))).astype(int) - 2
    steps = np.ldexp(cut, -exponents[..., None])
    grid = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    codes = np.abs(steps[..., None] - grid).argmin(-1)
    values = np.ldexp(grid[codes], exponents[..., None]).reshape(weights.shape)
    packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return packed, (exponents + 127).astype(np.uint8), values.astype(np.float32)


def test_every_code_and_scale_is_the_value_of_the_format():
    """Against the formats of `ml_dtypes`, which are others' work."""
    blocks = np.tile(np.arange(16, dtype=np.uint8) * 0x10 + np.arange(15, -1, -1, dtype=np.uint8), (256, 1, 1))
    scales = np.arange(256, dtype=np.uint8)[:, None]
    nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(256, 32)
    exact = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    exact *= scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    out = np.asarray(dequantize(blocks, scales, jnp.float32))
    # The lowest scales reach what XLA flushes to zero, the highest what float32 cannot hold; weights are far from both.
    np.testing.assert_array_equal(out[2:253], exact[2:253].astype(np.float32))
    assert np.isnan(out[255]).all()
    np.testing.assert_array_equal(dequantize(blocks, scales, jnp.bfloat16)[2:253], out[2:253])


@pytest.fixture
def checkpoints(tiny_checkpoint, tmp_path):
    """The tiny gpt-oss with its experts packed, and with the values that they encode, as two folders."""
    source = SafetensorsSource([tiny_checkpoint("gpt_oss") / "model.safetensors"])
    packed = {name: np.array(source.read(name)) for name in source.names()}
    plain = dict(packed)
    for name in [name for name in packed if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, values = encode(packed.pop(name).astype(np.float64).swapaxes(1, 2))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(values.swapaxes(1, 2))
    folders = {}
    for kind, tensors in (("packed", packed), ("plain", plain)):
        folders[kind] = shutil.copytree(tiny_checkpoint("gpt_oss"), tmp_path / kind)
        save_file(tensors, folders[kind] / "model.safetensors")
    config = json.loads((folders["packed"] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folders["packed"] / "config.json").write_text(json.dumps(config))
    return folders


def load(folder, dtype):
    return load_model(open_checkpoint(str(folder)), dtype=dtype, progress=False)


@nnx.jit
def logits(model, token_ids):
    positions = jnp.arange(token_ids.shape[0])
    return model.logits(model(token_ids, positions, PlainStep(jnp.zeros_like(positions), positions)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_packed_checkpoint_is_the_model_of_the_values_it_encodes(dtype, checkpoints):
    packed, plain = load(checkpoints["packed"], dtype), load(checkpoints["plain"], dtype)
    for (path, a), (_, b) in zip(
        nnx.to_flat_state(nnx.state(packed)), nnx.to_flat_state(nnx.state(plain)), strict=True
    ):
        assert a[...].dtype == dtype
        np.testing.assert_array_equal(a[...], b[...], err_msg=str(path))
    token_ids = jnp.arange(3, 63)
    out = logits(packed, token_ids)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_array_equal(out, logits(plain, token_ids))


def test_packed_experts_of_another_dtype_or_with_another_shape_are_named(checkpoints):
    file = checkpoints["packed"] / "model.safetensors"
    source = SafetensorsSource([file])
    tensors = {name: np.array(source.read(name)) for name in source.names()}
    first, second = (f"model.layers.{i}.mlp.experts.down_proj_scales" for i in (0, 1))
    tensors[first] = tensors[first].astype(np.int32)
    tensors[second] = np.ascontiguousarray(tensors[second][:, :-1])
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as error:
        load(checkpoints["packed"], jnp.float32)
    assert f"1 of the wrong dtype: {first} int32 where uint8 is expected" in str(error.value)
    assert f"1 of the wrong shape: {second}" in str(error.value)


def test_a_size_that_is_no_whole_number_of_blocks_is_named(checkpoints):
    config = json.loads((checkpoints["packed"] / "config.json").read_text())
    with pytest.raises(UnsupportedConfig, match=r"intermediate_size 48.*32"):
        resolve_model(config | {"intermediate_size": 48})
