"""A model without a mind: it writes what a constraint allows, at random, with llguidance's own masks as the judge."""

import json
import random

import llguidance
import numpy as np

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.text import Tokenizer

from .fake_engine import EOS

_ENDINGS = frozenset(b'"}]')
_PHRASES = ("\n</parameter>\n", "</parameter>\n")
"""What no chance would write, and without which bare values have no end."""


class GrammarWriter:
    """Reads and writes by the constraints of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = llguidance.LLTokenizer(tokenizer._backend.to_str(), eos_token=EOS)

    def matcher(self, constraint: StructuredOutputsParams) -> llguidance.LLMatcher:
        """At the constraint's beginning, behind what it says of the text in front."""
        if constraint.json is not None:
            source = llguidance.LLMatcher.grammar_from_json_schema(constraint.json)
        else:
            assert constraint.grammar is not None
            source = llguidance.LLMatcher.grammar_from_lark(constraint.grammar)
        matcher = llguidance.LLMatcher(self._vocabulary, source)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, constraint: StructuredOutputsParams, text: str) -> bool:
        """Whether the text is all that the constraint demands."""
        matcher = self.matcher(constraint)
        ids = self._tokenizer.encode(text, False)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    def written(self, constraint: StructuredOutputsParams, seed: int, most: int = 2000) -> list[int]:
        """Ids of a random text, without the end of sequence. Where something may end it mostly does."""
        matcher, chance = self.matcher(constraint), random.Random(seed)
        ids: list[int] = []
        while len(ids) < most:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(mask)]
            assert allowed, matcher.get_error()
            phrase = self._tokenizer.encode(chance.choice(_PHRASES), False)
            if chance.random() < 0.1 and matcher.validate_tokens(phrase) == len(phrase):
                assert matcher.consume_tokens(phrase)
                ids += phrase
                continue
            likely = [token for token in allowed if token == EOS or self._ends(token)]
            token = chance.choice(likely if likely and chance.random() < 0.7 else allowed)
            if token == EOS:
                return ids
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        raise AssertionError(f"no end after {most} tokens: {self._tokenizer.decode(ids[:200])!r}")

    def _ends(self, token: int) -> bool:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return token in self._tokenizer.special_ids or (len(text) == 1 and ord(text) in _ENDINGS)


def arguments_are_valid(name: str, arguments: str) -> bool:
    """Whether they follow the schemas of `WEATHER` and `NOW`, written out by hand."""
    value = json.loads(arguments)
    if name == "now":
        return value == {}
    allowed = {"city", "days", "unit"}
    return (
        value.keys() <= allowed
        and isinstance(value["city"], str)
        and isinstance(value["days"], int)
        and 1 <= value["days"] <= 9
        and value.get("unit", "C") in ("C", "F")
    )


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
