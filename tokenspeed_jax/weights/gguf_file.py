"""The GGUF container: metadata and quantised tensors of one mapped file.

The container is read here because the `gguf` package's own reader makes an array of every string of a vocabulary, which
takes many seconds for 262,144 of them; the package's tables and its dequantisation are used.
"""

import dataclasses
import itertools
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tokenspeed_jax.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MOST_DIMENSIONS = 4
_DEEPEST_ARRAY = 8


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor stands.

    Attributes:
        shape: slowest axis first, as NumPy has it.
        start: byte within the file.
        row_bytes: bytes of one row, the last axis.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufFile:
    """One GGUF file, its header parsed.

    Attributes:
        metadata: as stored; strings, numbers, booleans and lists of these.
        tensors: by name.
    """

    def __init__(self, path: Path) -> None:
        """Parses the header; raises `CheckpointError` when the file is no GGUF file, or cut short."""
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._parse(_Cursor(data), len(data))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} is cut short or malformed: {error}") from error
        except (OSError, ValueError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def dequantized(self, tensor: GgufTensor, first: int, last: int) -> np.ndarray:
        """Rows [first, last) of a tensor as float32 [last - first, columns]."""
        start = tensor.start + first * tensor.row_bytes
        shape = (last - first, tensor.row_bytes)
        raw = np.memmap(self.path, dtype=np.uint8, mode="r", offset=start, shape=shape)
        try:
            return dequantize(np.asarray(raw), tensor.kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {tensor.name} is of the type {tensor.kind.name}, which is not supported"
            ) from error

    def _parse(self, cursor: "_Cursor", size: int) -> None:
        if cursor.take(4) != _MAGIC:
            raise CheckpointError(f"{self.path} is no GGUF file")
        if (version := cursor.scalar("I")) not in _VERSIONS:
            raise CheckpointError(f"{self.path}: GGUF version {version} is not supported (served: 2, 3)")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_fields):
            if (key := cursor.string()) in self.metadata:
                raise CheckpointError(f"{self.path}: the field {key} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        described = [self._describe(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment must be a positive number, got {alignment!r}")
        base = -(-cursor.position // alignment) * alignment
        for tensor in described:
            placed = dataclasses.replace(tensor, start=base + tensor.start)
            end = placed.start + placed.rows * placed.row_bytes
            if end > size:
                raise CheckpointError(f"{self.path} is cut short: tensor {placed.name} ends at byte {end} of {size}")
            if placed.name in self.tensors:
                raise CheckpointError(f"{self.path}: tensor {placed.name} is there twice")
            self.tensors[placed.name] = placed
        self._check_overlaps()

    def _check_overlaps(self) -> None:
        """Two tensors that share bytes are a header that lies about one of them."""
        placed = sorted(self.tensors.values(), key=lambda tensor: tensor.start)
        for tensor, other in itertools.pairwise(placed):
            if other.start < tensor.start + tensor.rows * tensor.row_bytes:
                raise CheckpointError(f"{self.path}: the bytes of tensors {tensor.name} and {other.name} overlap")

    def _describe(self, cursor: "_Cursor") -> GgufTensor:
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise CheckpointError(f"{self.path}: tensor {name} has {dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
        if not all(shape):
            raise CheckpointError(f"{self.path}: tensor {name} has no values: its shape is {shape}")
        number, offset = cursor.scalar("I"), cursor.scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: tensor {name} is of the unknown type {number}") from error
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise CheckpointError(
                f"{self.path}: rows of tensor {name} have {shape[-1]} values, not a multiple of {block}"
            )
        return GgufTensor(name, shape, kind, offset, shape[-1] // block * block_bytes)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, size: int) -> bytes:
        # Compared before anything is copied: a size out of a hostile header may be that of the whole file.
        if size > len(self._data) - self.position:
            left = len(self._data) - self.position
            raise IndexError(f"wanted {size} bytes at byte {self.position}, found {left}")
        chunk = self._data[self.position : self.position + size]
        self.position += size
        return chunk

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(int.from_bytes(self.take(8), "little")).decode()

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, count = self.scalar("I"), self.scalar("Q")
            if inner in _SCALARS:
                form = f"<{count}{_SCALARS[inner]}"
                return list(struct.unpack(form, self.take(struct.calcsize(form))))
            if depth == _DEEPEST_ARRAY:
                raise IndexError(f"arrays within arrays at byte {self.position}")
            return [self.value(inner, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise IndexError(f"value type {kind} at byte {self.position}")
        return self.scalar(_SCALARS[kind])
