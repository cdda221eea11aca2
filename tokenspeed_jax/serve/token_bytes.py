"""The bytes behind one token, which clients get with its log-probability."""

import re

from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.text.piece_decoder import BYTE_OF_CHARACTER

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"


def token_bytes(tokenizer: ServedTokenizer, token_id: int) -> bytes:
    """The bytes that a token adds in the middle of a text; for a special token its name.

    Empty for an id that the model's vocabulary has and the tokenizer does not.
    """
    piece = tokenizer.piece(token_id, skip_special_tokens=False)
    if piece is None:
        return b""
    stream = tokenizer.piece_stream()
    # What a decoder strips at the beginning of a text is part of the token everywhere else.
    stream.push("x")
    text = stream.push(piece) + stream.flush()
    if _REPLACEMENT not in text:
        return text.encode()
    # A part of a character: its bytes stand in the piece itself, in one of the two schemes of `piece_decoder`.
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    if all(character in BYTE_OF_CHARACTER for character in piece):
        return bytes(BYTE_OF_CHARACTER[character] for character in piece)
    return piece.encode()
