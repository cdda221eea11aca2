"""`echo`: a completion's prompt in front of its text, with the log-probabilities of the prompt's tokens."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, completion_lists


class PromptEcho:
    """One prompt as its choices show it: a text as it was sent, token ids decoded.

    Args:
        prompt: what the client sent.
        token_ids: the same as the engine got it.
    """

    def __init__(
        self, prompt: str | Sequence[int], token_ids: Sequence[int], params: SamplingParams, names: TokenNames
    ) -> None:
        self._token_ids = token_ids
        self._params = params
        self._names = names
        self.text = prompt if isinstance(prompt, str) else names.tokenizer.decode(prompt, params.skip_special_tokens)

    def logprobs(self, prompt: PromptLogprobs) -> dict[str, Any]:
        """The prompt's part of the completions format's lists."""
        count = self._params.top_logprobs
        tops = prompt.limited(count).top_logprobs() if count else None
        return completion_lists(self._names, self._token_ids, prompt.token_logprobs(), tops, self._offsets)

    @cached_property
    def _offsets(self) -> list[int]:
        tokenizer = self._names.tokenizer
        stream, offset, offsets = tokenizer.piece_stream(), 0, []
        for token_id in self._token_ids:
            offsets.append(min(offset, len(self.text)))
            piece = tokenizer.piece(token_id, skip_special_tokens=False)
            # A special token stands in the text if it was written there, not if the tokenizer added it.
            is_hidden = token_id in self._names.special_ids and not self.text.startswith(piece or "", offset)
            if piece is not None and not is_hidden:
                offset += len(stream.push(piece))
        return offsets


def joined_lists(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Two parts of the completions format's lists, one behind the other."""
    if first is None or second is None:
        return second
    return {name: None if part is None else [*part, *second[name]] for name, part in first.items()}
