"""Text of a growing sequence of tokens."""

from collections.abc import Iterable

from tokenspeed_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental decoding of one sequence.

    All pushes and the flush together are exactly `tokenizer.decode` of all ids. A push never ends inside a character:
    bytes that may become one with later tokens are held back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = tokenizer.piece_stream()

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these tokens, often empty."""
        pieces = (self._tokenizer.piece(token_id, self._skip_special_tokens) for token_id in ids)
        return "".join(self._stream.push(piece) for piece in pieces if piece is not None)

    def flush(self) -> str:
        """What was held back, when the sequence ends."""
        return self._stream.flush()
