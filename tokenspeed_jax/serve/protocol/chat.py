"""`POST /v1/chat/completions`: the request, and the reply whole or in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.bodies import Neutral
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.conversation import ChatMessage, render_chat
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, chat_logprobs, prompt_entries
from tokenspeed_jax.serve.protocol.message_deltas import MessageDeltas, whole_message
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.sampling import COMMON_NEUTRAL_FIELDS, SamplingFields, empty, equals
from tokenspeed_jax.serve.protocol.structured_outputs import engine_names
from tokenspeed_jax.serve.protocol.tools import ForcedCall, Tool, ToolChoice, forced_call, offered_tools
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.serve.streaming import ChunkedReply

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body. `chat_template_kwargs` (vLLM's extension) are more variables for the chat template."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        **COMMON_NEUTRAL_FIELDS,
        "best_of": lambda value, body: type(value) is int and value == (body.get("n") or 1),
        "echo": equals(False),
        "functions": empty,
        "function_call": equals("none", "auto"),
        "modalities": equals(["text"]),
        "prediction": lambda _value, _body: False,
        "audio": lambda _value, _body: False,
        "verbosity": lambda _value, _body: False,
        "web_search_options": lambda _value, _body: False,
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Effort | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> Sequence[Tool]:
        """The tools that the model may call. Raises `ApiError` as `tools.offered_tools` does."""
        return offered_tools(self.tools, self.tool_choice)

    @property
    def forced_call(self) -> ForcedCall | None:
        """What the model has to call. Raises `ApiError` as `tools.forced_call` does."""
        return forced_call(self.tools, self.tool_choice)

    @property
    def allows_parallel(self) -> bool:
        """Whether a reply may have more than one call."""
        return self.parallel_tool_calls is not False

    @property
    def continued(self) -> str | None:
        """Text of the message that the reply continues, None when it begins one."""
        return self.messages[-1].text if self.continue_final_message else None

    @property
    def names(self) -> dict[str, str]:
        """Engine parameters by the names this request used for them."""
        names = {"prompt_token_ids": "messages", "prompt": "messages"}
        names |= engine_names("tools") if self.forced_call else self.constraint_names() or engine_names("tools")
        return names | {"max_tokens": "max_completion_tokens"} if self.max_completion_tokens is not None else names

    def params(self) -> SamplingParams:
        """Sampling parameters; without a limit the reply may fill the model's context."""
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                f"max_tokens ({self.max_tokens}) and max_completion_tokens ({self.max_completion_tokens}) differ; "
                "send one of them",
                param="max_tokens",
                code="invalid_value",
            )
        return self.sampling_params(
            renamed=self.names,
            max_tokens=limits.pop() if limits else None,
            logprobs=bool(self.logprobs),
            top_logprobs=self.top_logprobs or 0,
            prompt_logprobs=self.prompt_logprobs,
        )

    def prompt_token_ids(self, tokenizer: ServedTokenizer) -> list[list[int]]:
        """The conversation as one prompt; the template writes the special tokens itself."""
        text = render_chat(
            tokenizer,
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            tools=self.offered_tools,
            reasoning_effort=self.reasoning_effort,
            variables=self.chat_template_kwargs,
        )
        return [tokenizer.encode(text, False)]


def message_deltas(request: ChatRequest, reply_format: ReplyFormat, prompt_token_ids: Sequence[int]) -> MessageDeltas:
    """The assistant's message of one reply, before its first token."""
    forced = request.forced_call
    parser = reply_format.parser(request.offered_tools, prompt_token_ids, request.continued, forced)
    return MessageDeltas(
        parser, allows_parallel=request.allows_parallel, is_named=forced is not None and forced.is_named
    )


class ChatReply(ChunkedReply):
    """Turns the deltas of one chat request into its body or its chunks."""

    def __init__(
        self,
        head: ReplyHead,
        request: ChatRequest,
        params: SamplingParams,
        names: TokenNames,
        reply_format: ReplyFormat,
    ) -> None:
        self._head = head
        self._request = request
        self._returns_ids = bool(request.return_token_ids)
        self._params = params
        self._names = names
        self._format = reply_format
        self._open: dict[int, MessageDeltas] = {}

    def _deltas(self, prompt_token_ids: Sequence[int]) -> MessageDeltas:
        return message_deltas(self._request, self._format, prompt_token_ids)

    def body(self, choices: list[Choice]) -> bytes:
        """The whole reply as JSON."""
        body = self._head.envelope("chat.completion") | {
            "choices": [self._whole(choice) for choice in choices],
            **self._head.totals(choices),
        }
        if self._returns_ids:
            body["prompt_token_ids"] = choices[0].prompt_token_ids
        if self._request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_entries(self._names, choices[0].prompt_logprobs)
        return msgspec.json.encode(body)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        deltas = self._deltas(choice.prompt_token_ids)
        whole = {
            "index": choice.index,
            "message": whole_message(deltas.push(choice.text, is_last=True)),
            "logprobs": self._logprobs_of(choice),
            "finish_reason": deltas.finish_reason(choice.finish_reason),
        }
        return whole | {"token_ids": choice.token_ids} if self._returns_ids else whole

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The chunks that one delta of choice `index` becomes: the role first, then text and calls, then the reason."""
        chunks = []
        if index not in self._open:
            self._open[index] = self._deltas(delta.prompt_token_ids)
            first = self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)
            if self._returns_ids:
                first["prompt_token_ids"] = delta.prompt_token_ids
            chunks.append(first)
        grown = self._open[index].push(delta.text, is_last=delta.finish_reason is not None)
        if not grown and delta.token_ids and (self._params.logprobs or self._returns_ids):
            grown = [{"content": ""}]
        for position, piece in enumerate(grown):
            # What tokens bring beside their text is sent once, with the first that became of it.
            chunk = self._chunk(index, piece, self._logprobs_of(delta) if position == 0 else None, None)
            if self._returns_ids and position == 0:
                chunk["choices"][0]["token_ids"] = delta.token_ids
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, {}, None, self._open[index].finish_reason(delta.finish_reason)))
        return [chunk | {"weight_version": delta.weight_version} for chunk in chunks]

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head.chunk("chat.completion.chunk", [choice])

    def _logprobs_of(self, part: RequestDelta | Choice) -> dict[str, Any] | None:
        if not self._params.logprobs:
            return None
        return chat_logprobs(self._names, part.token_ids, part.logprobs or [], part.top_logprobs)

    def usage_chunk(self, choices: list[Choice]) -> dict[str, Any]:
        """The last chunk of a stream with `stream_options.include_usage`."""
        return self._head.usage_chunk("chat.completion.chunk", choices)
