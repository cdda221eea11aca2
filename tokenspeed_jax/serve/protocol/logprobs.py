"""Log-probabilities in the two formats of OpenAI: parallel lists for completions, entries for chat."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_jax.engine.outputs import TopLogprobs
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.serve.token_bytes import token_bytes

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the number OpenAI uses."""


class TokenNames:
    """Text and bytes of single tokens, remembered."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self.special_ids = tokenizer.special_ids

    def of(self, token_id: int) -> tuple[str, bytes]:
        """The token's text and bytes; a token that is a part of a character is named by its escaped bytes."""
        if token_id not in self._known:
            raw = token_bytes(self._tokenizer, token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "".join(f"\\x{byte:02x}" for byte in raw)
            self._known[token_id] = (text, raw)
        return self._known[token_id]

    def is_partial(self, token_id: int) -> bool:
        """Whether the token is not a whole number of characters."""
        text, raw = self.of(token_id)
        return text.encode() != raw


class CompletionLogprobs:
    """The completions format of one choice. `text_offset` counts characters of the choice's text."""

    def __init__(self, names: TokenNames, params: SamplingParams) -> None:
        self._names = names
        self._hidden_ids = names.special_ids if params.skip_special_tokens else frozenset[int]()
        self._has_top = params.top_logprobs > 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs] | None
    ) -> dict[str, Any]:
        """The entry of the choice's next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden_ids:
                self._offset += len(self._characters.decode(self._names.of(token_id)[1]))
        tops = None
        if self._has_top:
            rows = zip(token_ids, logprobs, top_logprobs or [], strict=True)
            tops = [self._top(token_id, logprob, top) for token_id, logprob, top in rows]
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [max(value, LOWEST_LOGPROB) for value in logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        text = self._names.of(token_id)[0]
        return f"bytes:{text}" if self._names.is_partial(token_id) else text

    def _top(self, token_id: int, logprob: float, top: Mapping[int, float]) -> dict[str, float]:
        named: dict[str, float] = {}
        for other, value in top.items():
            # Two ids may have the same text; the more probable one, which comes first, keeps it.
            named.setdefault(self._name(other), max(value, LOWEST_LOGPROB))
        named.setdefault(self._name(token_id), max(logprob, LOWEST_LOGPROB))
        return named


def chat_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    top_logprobs: Sequence[TopLogprobs] | None,
) -> dict[str, Any]:
    """The chat format: one entry per token, with its bytes and its alternatives."""
    tops = top_logprobs or [{}] * len(token_ids)
    content = []
    for token_id, logprob, top in zip(token_ids, logprobs, tops, strict=True):
        entry = _entry(names, token_id, logprob)
        entry["top_logprobs"] = [_entry(names, other, value) for other, value in top.items()]
        content.append(entry)
    return {"content": content, "refusal": None}


def _entry(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    text, raw = names.of(token_id)
    return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": list(raw)}
