"""From vocabulary pieces to text, one token at a time.

A tokenizer's decoder works on whole sequences. For streaming we need the same text in steps, so this file reads the
decoder's description in `tokenizer.json` and gives a stream with state. Two schemes are in use: byte-level BPE, where
each character of a piece stands for a byte, and SentencePiece, where a piece is text with U+2581 for a space, or one
byte written `<0xNN>`.
"""

import codecs
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tokenspeed_jax.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


class PieceStream(Protocol):
    """Text of one sequence as its pieces arrive."""

    def push(self, piece: str) -> str:
        """The text that is certain after this piece; what may still change is held back."""
        ...

    def flush(self) -> str:
        """The rest, when no more pieces come."""
        ...


def stream_factory(decoder: Mapping[str, Any] | None) -> Callable[[], PieceStream]:
    """Reads the `decoder` of a `tokenizer.json`; the result makes one fresh stream per call.

    Raises:
        CheckpointError: a decoder that cannot be streamed, by its name.
    """
    steps = _flattened(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevelStream
    replacements: list[tuple[str, str]] = []
    byte_fallback, leading = False, ("", 0)
    for position, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not byte_fallback:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if (
                position == len(steps) - 1 and "Fuse" in kinds and len(char) == 1
            ):
                leading = (char, start)
            case _:
                raise CheckpointError(f"tokenizer.json: the decoder {step.get('type')!r} here is not supported: {step}")
    if not replacements:
        raise CheckpointError(
            f"tokenizer.json: the decoder {kinds} is not supported (served: byte-level, SentencePiece)"
        )
    return lambda: SentencePieceStream(tuple(replacements), byte_fallback, leading)


def _flattened(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flattened(inner)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for the 256 bytes: printable Latin-1 stands for itself, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


class ByteLevelStream:
    """Byte-level BPE: bytes are gathered until they are whole characters; bytes that never are become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str) -> str:
        try:
            data = bytes([BYTE_OF_CHARACTER[char] for char in piece])
        except KeyError:  # an added token, whose text is plain
            data = piece.encode()
        return self._decoder.decode(data)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class SentencePieceStream:
    """SentencePiece: a run of byte pieces is held until it ends.

    The whole run decides what it means (`ByteFallback` writes U+FFFD for each byte of a run that is not UTF-8), so
    nothing of it is certain before. Runs are a few bytes long: one rare character.
    """

    def __init__(
        self, replacements: tuple[tuple[str, str], ...], byte_fallback: bool, leading: tuple[str, int]
    ) -> None:
        self._replacements = replacements
        self._byte_fallback = byte_fallback
        self._run = bytearray()
        self._strip_char, self._strip_left = leading

    def push(self, piece: str) -> str:
        byte = _BYTE_PIECE.fullmatch(piece) if self._byte_fallback else None
        if byte is not None:
            self._run.append(int(byte[1], 16))
            return ""
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return self._stripped(self._run_text() + piece)

    def flush(self) -> str:
        return self._stripped(self._run_text())

    def _run_text(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        """Drops the sequence's first few spaces: they were added by the tokenizer, not written by the user."""
        while self._strip_left and text:
            if not text.startswith(self._strip_char):
                self._strip_left = 0
                break
            text, self._strip_left = text[1:], self._strip_left - 1
        return text
