"""Tensors of safetensors files, mapped into memory.

The format is read here and not by the `safetensors` package, whose NumPy interface has no bfloat16 and whose other
interfaces bring a framework: eight bytes of header length, a JSON header with dtype, shape and byte range of each
tensor, then the bytes.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tokenspeed_jax.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100 << 20
_MOST_DIMENSIONS = 32
_MOST_VALUES = 1 << 63

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class _Entry:
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int  # byte within the file


class SafetensorsSource:
    """All tensors of one or several safetensors files."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Reads the headers; raises `CheckpointError` naming the file for one that is cut short or malformed."""
        self._entries: dict[str, _Entry] = {}
        for file in files:
            for name, entry in _read_header(file).items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name} is in {self._entries[name].file} and in {file}")
                self._entries[name] = entry

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> np.dtype:
        return self._entries[name].dtype

    def read(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        if 0 in entry.shape:
            return np.empty(entry.shape, entry.dtype)
        # Mapped as bytes, since a tensor may start anywhere, and anew each time, so that used pages can go.
        size = math.prod(entry.shape) * entry.dtype.itemsize
        data = np.memmap(entry.file, dtype=np.uint8, mode="r", offset=entry.start, shape=(size,))
        return np.frombuffer(data, dtype=entry.dtype).reshape(entry.shape)


def _read_header(file: Path) -> dict[str, _Entry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _LARGEST_HEADER):
                raise CheckpointError(f"{file} is cut short or no safetensors file: {size} bytes, header of {length}")
            header = json.loads(stream.read(length))
        base = _LENGTH_BYTES + length
        header.pop("__metadata__", None)
        entries = {name: _entry(file, base, size, name, fields) for name, fields in header.items()}
        _check_overlaps(file, entries)
        return entries
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file} has a malformed header: {error}") from error


def _entry(file: Path, base: int, size: int, name: str, fields: dict[str, Any]) -> _Entry:
    if fields["dtype"] not in _DTYPES:
        raise CheckpointError(f"{file}: tensor {name} has the dtype {fields['dtype']}, which is not supported")
    dtype, shape = _DTYPES[fields["dtype"]], fields["shape"]
    if not (isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS and all(_is_count(n) for n in shape)):
        raise CheckpointError(f"{file}: the shape of tensor {name} is not a list of sizes")
    # Of the axes that are not empty: NumPy counts with them whatever the others are.
    if math.prod(n or 1 for n in shape) * dtype.itemsize >= _MOST_VALUES:
        raise CheckpointError(f"{file}: tensor {name} has a shape beyond all memory: {shape}")
    start, end = fields["data_offsets"]
    if not (_is_count(start) and _is_count(end) and end - start == math.prod(shape) * dtype.itemsize):
        raise CheckpointError(f"{file}: tensor {name} has bytes {start} to {end} for {shape} of {dtype}")
    if base + end > size:
        raise CheckpointError(f"{file} is cut short: tensor {name} ends at byte {base + end} of {size}")
    return _Entry(file, dtype, tuple(shape), base + start)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_overlaps(file: Path, entries: Mapping[str, _Entry]) -> None:
    """Two tensors that share bytes are a header that lies about one of them."""
    ranges = sorted(
        (entry.start, entry.start + math.prod(entry.shape) * entry.dtype.itemsize, name)
        for name, entry in entries.items()
        if 0 not in entry.shape
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(ranges):
        if start < end:
            raise CheckpointError(f"{file}: the bytes of tensors {name} and {other} overlap")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder; empty when it has none.

    Raises:
        CheckpointError: the index is malformed, or names a file that is not there.
    """
    index = folder / INDEX_FILE
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{index} is malformed: {error}") from error
        # A name with a folder in it would have files read that are no part of the checkpoint.
        if foreign := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
            raise CheckpointError(f"{index} is malformed: {foreign[0]!r} is no name of a file beside it")
        if missing := [name for name in names if not (folder / name).exists()]:
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which {INDEX_FILE} names")
        return [folder / name for name in names]
    single = folder / SINGLE_FILE
    return [single] if single.exists() else []
