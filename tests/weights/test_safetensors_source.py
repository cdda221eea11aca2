"""The safetensors reader agrees with the format's own library, and notices damage."""

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.weights.safetensors_source import SafetensorsSource, weight_files

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
        {"dtype": "F32", "shape": [-3, -4], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": ["12"], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [12.0], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [12], "data_offsets": [0.0, 48.0]},
        {"dtype": "F32", "shape": [1] * 40 + [12], "data_offsets": [0, 48]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 2**66]},
        {"dtype": [], "shape": [12], "data_offsets": [0, 48]},
        [],
    ],
)
def test_header_that_does_not_add_up_is_refused(entry, tmp_path):
    header = json.dumps({"a": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsSource([file])


def test_tensors_that_overlap_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    whole, tail = ({"dtype": "U8", "shape": [size], "data_offsets": [8 - size, 8]} for size in (8, 1))
    header = json.dumps({"whole": whole, "tail": tail}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match="whole and tail overlap"):
        SafetensorsSource([file])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "U8", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=6,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "U8", "BF16"]) | json_values,
        "shape": st.lists(st.integers(-2, 4) | st.integers(), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-4, 40) | st.integers(), min_size=2, max_size=2) | json_values,
    },
)


@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), entries | json_values, max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_header_is_refused_or_can_be_read_whole(header, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(32))
    with contextlib.suppress(CheckpointError):
        source = SafetensorsSource([file])
        assert sum(source.read(name).nbytes for name in source.names()) <= 32


def test_header_nested_beyond_all_measure_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    header = b'{"a":' * 100_000
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsSource([file])


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "folder/part.safetensors", 5])
def test_index_that_names_files_elsewhere_is_refused(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="no name of a file beside it"):
        weight_files(tmp_path)


def test_tensor_in_two_files_is_refused(written, tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(written.read_bytes())
    with pytest.raises(CheckpointError, match="tensor a is in"):
        SafetensorsSource([written, other])
