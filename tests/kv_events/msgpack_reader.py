"""A reader of msgpack, from its specification: what the encoder under test writes is not read by the same library."""

import struct
from typing import Any

_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h",
    0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
_LENGTHS = {  # type byte -> kind and format of the length behind it
    0xD9: (str, ">B"), 0xDA: (str, ">H"), 0xDB: (str, ">I"), 0xDC: (list, ">H"), 0xDD: (list, ">I"),
    0xDE: (dict, ">H"), 0xDF: (dict, ">I"),
}  # fmt: skip
_SHORT = ((0x80, 0x90, dict), (0x90, 0xA0, list), (0xA0, 0xC0, str))  # type bytes that hold a length


def read(data: bytes) -> Any:
    """The one value that `data` holds."""
    value, end = _value(data, 0)
    assert end == len(data)
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    kind = data[at]
    at += 1
    if kind < 0x80 or kind >= 0xE0:
        return (kind if kind < 0x80 else kind - 256), at
    if kind in _CONSTANTS:
        return _CONSTANTS[kind], at
    if kind in _NUMBERS:
        return _unpack(_NUMBERS[kind], data, at)
    for low, high, container in _SHORT:
        if low <= kind < high:
            return _container(container, kind - low, data, at)
    container, length_format = _LENGTHS[kind]
    length, at = _unpack(length_format, data, at)
    return _container(container, length, data, at)


def _unpack(number_format: str, data: bytes, at: int) -> tuple[Any, int]:
    size = struct.calcsize(number_format)
    return struct.unpack(number_format, data[at : at + size])[0], at + size


def _container(kind: type, length: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind is str:
        return data[at : at + length].decode(), at + length
    values = []
    for _ in range(length * (2 if kind is dict else 1)):
        value, at = _value(data, at)
        values.append(value)
    return (values if kind is list else dict(zip(values[::2], values[1::2], strict=True))), at
