"""Text to tokens and back: tokenizer, chat template, incremental detokenizer."""

from tokenspeed_jax.text.detokenizer import Detokenizer
from tokenspeed_jax.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
