"""Log-probabilities in the two formats of OpenAI: parallel lists for completions, entries for chat."""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed_jax.engine.outputs import TopLogprobs
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.serve.token_bytes import token_bytes

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say; the number OpenAI uses."""

MAX_PROMPT_LOGPROBS = 2**21
"""Most log-probabilities of prompts in one reply, every choice's own copy included: about 100 MB of JSON."""


class TokenNames:
    """Text and bytes of single tokens of a tokenizer, remembered."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}
        self.special_ids = tokenizer.special_ids

    def of(self, token_id: int) -> tuple[str, bytes]:
        """The token's text and bytes; a token that is a part of a character is named by its escaped bytes."""
        if token_id not in self._known:
            raw = token_bytes(self.tokenizer, token_id)
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

    def __init__(self, names: TokenNames, params: SamplingParams, *, begin: int = 0) -> None:
        """`begin` is where the offsets begin: the length of the text in front of what was generated."""
        self._names = names
        self._hidden_ids = names.special_ids if params.skip_special_tokens else frozenset[int]()
        self._has_top = params.top_logprobs > 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = begin

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[float], top_logprobs: Sequence[TopLogprobs] | None
    ) -> dict[str, Any]:
        """The entry of the choice's next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if token_id not in self._hidden_ids:
                self._offset += len(self._characters.decode(self._names.of(token_id)[1]))
        tops = (top_logprobs or []) if self._has_top else None
        return completion_lists(self._names, token_ids, logprobs, tops, offsets)


def completion_lists(
    names: TokenNames,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    top_logprobs: Sequence[TopLogprobs | None] | None,
    offsets: list[int],
) -> dict[str, Any]:
    """The parallel lists of the completions format."""
    tops = None
    if top_logprobs is not None:
        rows = zip(token_ids, logprobs, top_logprobs, strict=True)
        tops = [None if top is None else _named_top(names, token_id, logprob, top) for token_id, logprob, top in rows]
    return {
        "tokens": [_completion_name(names, token_id) for token_id in token_ids],
        "token_logprobs": [finite(value) for value in logprobs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _completion_name(names: TokenNames, token_id: int) -> str:
    text = names.of(token_id)[0]
    return f"bytes:{text}" if names.is_partial(token_id) else text


def _named_top(
    names: TokenNames, token_id: int, logprob: float | None, top: Mapping[int, float]
) -> dict[str, float | None]:
    named: dict[str, float | None] = {}
    for other, value in top.items():
        # Two ids may have the same text; the more probable one, which comes first, keeps it.
        named.setdefault(_completion_name(names, other), finite(value))
    named.setdefault(_completion_name(names, token_id), finite(logprob))
    return named


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can say it; None stays what it is."""
    return None if logprob is None else max(logprob, LOWEST_LOGPROB)


def check_num_prompt_logprobs(prompts: Sequence[Sequence[int]], params: SamplingParams, param: str) -> None:
    """Refuses, with a 400 that names `param`, what would make a reply out of all proportion to its request."""
    if params.prompt_logprobs is None:
        return
    count = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if count > MAX_PROMPT_LOGPROBS:
        raise ApiError(
            f"the reply would hold {count} log-probabilities of prompts (tokens x n x alternatives and the token "
            f"itself); the limit is {MAX_PROMPT_LOGPROBS}: send fewer prompts at once",
            param=param,
            code="invalid_value",
        )


def prompt_entries(names: TokenNames, prompt: PromptLogprobs | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """vLLM's `prompt_logprobs`: per token, by their ids, itself and its alternatives; null for the first token."""
    if prompt is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": names.of(token_id)[0]}
            for token_id, (logprob, rank) in entry.items()
        }
        for entry in prompt
    ]


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
