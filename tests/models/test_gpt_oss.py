"""What gpt-oss's goldens do not reach: where interleaved rows go, and that the config's limit arrives."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource


@pytest.fixture
def load(tiny_checkpoint, tmp_path):
    def load(**changes):
        folder = shutil.copytree(tiny_checkpoint("gpt_oss"), tmp_path / "_".join(["gpt_oss", *changes]))
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))
        return load_model(open_checkpoint(str(folder)), dtype=jnp.float32, progress=False)

    return load


@nnx.jit
def hidden(model, token_ids):
    positions = jnp.arange(token_ids.shape[0])
    return model(token_ids, positions, PlainStep(jnp.zeros_like(positions), positions))


def test_interleaved_rows_become_gate_then_up(load, tiny_checkpoint):
    source = SafetensorsSource([tiny_checkpoint("gpt_oss") / "model.safetensors"])
    experts = load().layers[1].mlp.experts
    stored = source.read("model.layers.1.mlp.experts.gate_up_proj").astype(np.float32)  # [experts, in, 2 * inner]
    bias = source.read("model.layers.1.mlp.experts.gate_up_proj_bias").astype(np.float32)
    for expert, row in ((0, 0), (3, 5), (2, 31)):
        for part in (0, 1):
            np.testing.assert_array_equal(
                experts.gate_up[...][expert, part * 32 + row], stored[expert, :, 2 * row + part]
            )
            assert experts.gate_up_bias[...][expert, part * 32 + row] == bias[expert, 2 * row + part]


def test_limit_and_slope_of_the_config_reach_the_experts(load):
    token_ids = jnp.arange(3, 43)
    released = hidden(load(), token_ids)
    assert np.abs(hidden(load(swiglu_limit=0.5), token_ids) - released).max() > 0.1
    assert np.abs(hidden(load(swiglu_alpha=1.0), token_ids) - released).max() > 0.1


def test_a_head_whose_sink_outweighs_everything_adds_nothing(load):
    model = load()
    token_ids = jnp.arange(3, 43)
    attention = model.layers[0].attention
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 64)), jnp.float32)
    positions = jnp.arange(40)
    step = PlainStep(jnp.zeros_like(positions), positions)
    attention.sinks[...] = jnp.full(4, 1e4)
    out = attention(x, model.config.ropes[0].at(positions), step)
    np.testing.assert_array_equal(out, jnp.broadcast_to(attention.out.bias[...], out.shape))
    assert np.isfinite(np.asarray(hidden(model, token_ids))).all()
