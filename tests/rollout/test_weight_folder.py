"""A folder of weights becomes the served model's parameters, or an error that says what does not fit."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tokenspeed_jax import CheckpointError, EngineConfig
from tokenspeed_jax.rollout.weight_folder import WeightFolderReader
from tokenspeed_jax.weights import load_model, open_checkpoint

SERVED = Path(__file__).parents[1] / "golden" / "tiny" / "llama"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def reader() -> WeightFolderReader:
    return WeightFolderReader.of_served(EngineConfig(model=str(SERVED), dtype="float32"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    source = open_checkpoint(str(SERVED)).tensors
    return {name: source.read(name).astype(np.float32) for name in source.names()}


def written(folder: Path, tensors: dict[str, np.ndarray]) -> str:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_weights_alone_are_enough_and_are_cast_and_joined(reader, tensors, tmp_path: Path) -> None:
    changed = {name: value + 1 for name, value in tensors.items()}
    state = reader.read(written(tmp_path, changed))
    served = nnx.state(load_model(open_checkpoint(str(SERVED)), dtype="float32", progress=False))
    assert jax.tree.structure(state) == jax.tree.structure(served)
    for new, old in zip(jax.tree.leaves(state), jax.tree.leaves(served), strict=True):
        assert new.dtype == old.dtype
        np.testing.assert_array_equal(new, old + 1)


def test_what_does_not_fit_is_named(reader, tensors, tmp_path: Path) -> None:
    missing = {name: value for name, value in tensors.items() if name != NORM}
    with pytest.raises(CheckpointError, match=f"1 missing: {NORM}"):
        reader.read(written(tmp_path, missing))
    with pytest.raises(CheckpointError, match=rf"wrong shape: {NORM} \(2,\) where \(64,\)"):
        reader.read(written(tmp_path, tensors | {NORM: np.zeros(2, np.float32)}))
    with pytest.raises(CheckpointError, match=r"1 unknown: model\.extra"):
        reader.read(written(tmp_path, tensors | {"model.extra": np.zeros(2, np.float32)}))
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(CheckpointError, match="cut short or no safetensors file"):
        reader.read(str(tmp_path))
    with pytest.raises(CheckpointError, match="no such folder"):
        reader.read(str(tmp_path / "absent"))
    shutil.copy(SERVED / "config.json", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors"):
        reader.read(str(tmp_path))
