"""`POST /v1/completions`: the request, and the reply whole or in chunks."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.bodies import Neutral
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.echo import PromptEcho, joined_lists
from tokenspeed_jax.serve.protocol.logprobs import CompletionLogprobs, TokenNames, prompt_entries
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.sampling import COMMON_NEUTRAL_FIELDS, SamplingFields, empty
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.serve.streaming import ChunkedReply

_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body. `logprobs` is a number here: that many alternatives per token, and always the token's own; with `echo`
    also for the prompt's tokens."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        **COMMON_NEUTRAL_FIELDS,
        "best_of": lambda value, body: type(value) is int and value == (body.get("n") or 1),
        "suffix": empty,
    }
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def names(self) -> dict[str, str]:
        """Engine parameters by the names this request used for them."""
        return {"prompt_token_ids": "prompt", "top_logprobs": "logprobs"} | self.constraint_names()

    def params(self) -> SamplingParams:
        """Sampling parameters; 16 tokens unless said otherwise, as OpenAI has it."""
        alternatives = self.prompt_logprobs
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            alternatives = max(alternatives or 0, self.logprobs or 0)
        return self.sampling_params(
            renamed=self.names,
            max_tokens=_DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs is not None,
            top_logprobs=self.logprobs or 0,
            prompt_logprobs=alternatives,
        )

    def prompt_token_ids(self, tokenizer: ServedTokenizer) -> list[list[int]]:
        """The prompts as token ids, one list each. Raises `ApiError` for an empty or mixed prompt."""
        prompts = self.prompts()
        for index, prompt in enumerate(prompts):
            if not prompt:
                place = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
                raise ApiError(f"{place} must not be empty", param="prompt", code="invalid_value")
        special = True if self.add_special_tokens is None else self.add_special_tokens
        return [tokenizer.encode(prompt, special) if isinstance(prompt, str) else prompt for prompt in prompts]

    def prompts(self) -> list[str | list[int]]:
        """The prompts as they were sent, one text or list of token ids each. Raises `ApiError` for a mixture."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise ApiError("prompt must not be empty", param="prompt", code="invalid_value")
        kinds = {type(item) for item in prompt}
        if len(kinds) > 1:
            raise ApiError(
                "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, "
                "and not a mixture",
                param="prompt",
                code="invalid_type",
            )
        return [prompt] if kinds == {int} else prompt  # pyright: ignore[reportReturnType]


class CompletionReply(ChunkedReply):
    """Turns the deltas of one completions request into its body or its chunks."""

    def __init__(self, head: ReplyHead, request: CompletionRequest, params: SamplingParams, names: TokenNames) -> None:
        self._head = head
        self._request = request
        self._returns_ids = bool(request.return_token_ids)
        self._params = params
        self._names = names
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._echoes: dict[int, PromptEcho] = {}
        self._opened: set[int] = set()

    def body(self, choices: list[Choice]) -> bytes:
        """The whole reply as JSON."""
        return msgspec.json.encode(
            self._head.envelope("text_completion")
            | {"choices": [self._whole(choice) for choice in choices], **self._head.totals(choices)}
        )

    def _whole(self, choice: Choice) -> dict[str, Any]:
        echo = self._echo_of(choice.index, choice.prompt_token_ids)
        whole = {
            "index": choice.index,
            "text": choice.text if echo is None else echo.text + choice.text,
            "logprobs": joined_lists(
                self._echoed_logprobs(echo, choice.prompt_logprobs), self._logprobs_of(choice.index, choice)
            ),
            "finish_reason": choice.finish_reason,
        }
        if self._request.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            asked = choice.prompt_logprobs.limited(self._request.prompt_logprobs)
            whole["prompt_logprobs"] = prompt_entries(self._names, asked)
        if self._returns_ids:
            whole |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt_token_ids}
        return whole

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The chunks that one delta of choice `index` becomes: text, and the reason once it ended. With `echo` a
        choice's first chunk is its prompt."""
        chunks = []
        if index not in self._opened and (echo := self._echo_of(index, delta.prompt_token_ids)) is not None:
            logprobs = self._echoed_logprobs(echo, delta.prompt_logprobs)
            chunks.append(self._chunk(index, echo.text, logprobs, None, dataclasses.replace(delta, token_ids=[])))
        is_silent = not delta.text and not (delta.token_ids and (self._params.logprobs or self._returns_ids))
        if not is_silent:
            chunks.append(self._chunk(index, delta.text, self._logprobs_of(index, delta), None, delta))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, "", None, delta.finish_reason, None))
        return [chunk | {"weight_version": delta.weight_version} for chunk in chunks]

    def _chunk(
        self, index: int, text: str, logprobs: Any, finish_reason: str | None, delta: RequestDelta | None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
        if delta is not None:
            if self._returns_ids:
                choice["token_ids"] = delta.token_ids
                if index not in self._opened:
                    choice["prompt_token_ids"] = delta.prompt_token_ids
            self._opened.add(index)
        return self._head.chunk("text_completion", [choice])

    def _logprobs_of(self, index: int, part: RequestDelta | Choice) -> dict[str, Any] | None:
        if not self._params.logprobs:
            return None
        if index not in self._logprobs:
            echo = self._echo_of(index, part.prompt_token_ids)
            begin = 0 if echo is None else len(echo.text)
            self._logprobs[index] = CompletionLogprobs(self._names, self._params, begin=begin)
        return self._logprobs[index].push(part.token_ids, part.logprobs or [], part.top_logprobs)

    def _echo_of(self, index: int, token_ids: Sequence[int]) -> PromptEcho | None:
        """The prompt of choice `index`, where the request asks to see it."""
        if not self._request.echo:
            return None
        place = index // self._params.n
        if place not in self._echoes:
            sent = self._request.prompts()[place]
            self._echoes[place] = PromptEcho(sent, token_ids, self._params, self._names)
        return self._echoes[place]

    def _echoed_logprobs(self, echo: PromptEcho | None, prompt: PromptLogprobs | None) -> dict[str, Any] | None:
        return None if echo is None or prompt is None or not self._params.logprobs else echo.logprobs(prompt)

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with `stream_options.include_usage`."""
        return self._head.usage_chunk("text_completion", choices)
