"""What MiniMax-01's golden does not show: its decay constants are computed, and its residual factors are not all 1."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tokenspeed_jax.models.norms import Residual
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.weights import load_model, open_checkpoint
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource

DECAYS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def all_tensors(folder):
    source = SafetensorsSource([folder / "model.safetensors"])
    return {name: source.read(name).astype(np.float32) for name in source.names()}


def test_decay_rates_are_those_that_checkpoints_store(tiny_checkpoint):
    tensors = all_tensors(tiny_checkpoint("minimax"))
    config = resolve_model(json.loads((tiny_checkpoint("minimax") / "config.json").read_text()))[1]
    for layer in (0, 1, 3):
        stored = tensors[f"model.layers.{layer}.self_attn.slope_rate"].ravel()
        np.testing.assert_allclose(config.decay_rates(layer), stored, rtol=1e-5)


def test_a_checkpoint_need_not_store_them(tiny_checkpoint, tmp_path):
    folder = Path(shutil.copytree(tiny_checkpoint("minimax"), tmp_path / "minimax"))
    kept = {name: value for name, value in all_tensors(folder).items() if not name.endswith(DECAYS)}
    assert len(kept) == len(all_tensors(folder)) - 3 * len(DECAYS)
    save_file(kept, folder / "model.safetensors")
    load_model(open_checkpoint(str(folder)), dtype=jnp.float32, progress=False)


@pytest.mark.parametrize(("layer_id", "alpha", "beta"), [(0, 4.0, 5.0), (2, 2.0, 3.0)])
def test_a_layer_adds_to_its_normed_input_with_the_factors_of_its_kind(layer_id, alpha, beta, tiny_checkpoint):
    fields = json.loads((tiny_checkpoint("minimax") / "config.json").read_text())
    factors = {"full_attn": (2.0, 3.0), "linear_attn": (4.0, 5.0), "mlp": (6.0, 7.0)}
    for block, pair in factors.items():
        fields |= {f"{block}_alpha_factor": pair[0], f"{block}_beta_factor": pair[1]}
    family, config = resolve_model(fields)
    model = family.build(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer, positions = model.layers[layer_id], jnp.arange(6)
    step, rotate = PlainStep(jnp.zeros(6, int), positions, num_segments=1), config.ropes[0].at(positions)
    x = np.random.default_rng(0).normal(size=(6, config.hidden_size)).astype(np.float32)

    def normed(x):
        return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + config.rms_norm_eps)

    first = normed(x)
    second = normed(alpha * first + beta * np.asarray(layer.mixer(jnp.asarray(first), rotate, step)))
    expected = 6.0 * second + 7.0 * np.asarray(layer.mlp(jnp.asarray(second)))
    np.testing.assert_allclose(layer(Residual(jnp.asarray(x)), rotate, step).total, expected, atol=1e-4)
