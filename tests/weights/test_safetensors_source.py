"""The safetensors reader agrees with the format's own library, and notices damage."""

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int8, np.uint8, np.bool_]
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(described=st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_reads_what_the_library_wrote(described, seed, tmp_path_factory):
    rng = np.random.default_rng(seed)
    tensors = {f"tensor {i}": rng.integers(0, 100, shape).astype(dtype) for i, (shape, dtype) in enumerate(described)}
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    source = SafetensorsSource([file])
    assert set(source.names()) == set(tensors)
    for name, expected in tensors.items():
        assert source.shape(name) == expected.shape
        assert source.dtype(name) == expected.dtype
        np.testing.assert_array_equal(source.read(name), expected)


@pytest.fixture
def written(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32)}, file)
    return file


def test_file_cut_anywhere_is_refused(written):
    whole = written.read_bytes()
    for size in range(len(whole)):
        written.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsSource([written])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [13], "data_offsets": [0, 48]},
        {"dtype": "Q4", "shape": [12], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [12], "data_offsets": [-48, 0]},
        {"dtype": "F32", "shape": [12], "data_offsets": [48, 96]},
        {"dtype": "F32", "shape": [12]},
    ],
)
def test_header_that_does_not_add_up_is_refused(entry, tmp_path):
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsSource([file])


def test_tensor_in_two_files_is_refused(written, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(written.read_bytes())
    with pytest.raises(CheckpointError, match="tensor a is in"):
        SafetensorsSource([written, other])
