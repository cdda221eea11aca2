"""`POST /v1/chat/completions`: the request, and the reply whole or in chunks."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.bodies import Neutral
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, chat_logprobs
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.sampling import COMMON_NEUTRAL_FIELDS, SamplingFields, empty, equals, is_flag
from tokenspeed_jax.serve.served_engine import ServedTokenizer

_RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content; only text can be served."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. Which roles exist, and in which order, is the chat template's to say."""

    role: str
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    tool_calls: list[Any] | None = None
    function_call: None = None

    def __post_init__(self) -> None:
        for field in ("tool_calls", "annotations"):
            if getattr(self, field):
                raise ApiError(f"messages: {field} is not supported", param="messages", code="unsupported_parameter")

    def variables(self) -> dict[str, str]:
        """The message as the template sees it; text parts are joined by line ends."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        shown = {"role": self.role, "content": content}
        return shown if self.name is None else shown | {"name": self.name}


def render_chat(
    tokenizer: ServedTokenizer,
    messages: Sequence[ChatMessage],
    add_generation_prompt: bool,
    template_variables: Mapping[str, Any] | None,
) -> str:
    """The prompt text of a conversation.

    Raises:
        ApiError: 400 for no messages, a reserved template variable, no chat template, and whatever the template
            itself refuses (a role it does not know, roles out of order).
    """
    if not messages:
        raise ApiError("messages must not be empty", param="messages", code="invalid_value")
    variables = dict(template_variables or {})
    if taken := _RESERVED_VARIABLES & variables.keys():
        raise ApiError(
            f"chat_template_kwargs must not set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    if not tokenizer.has_chat_template:
        raise ApiError(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    try:
        return tokenizer.apply_chat_template(
            [message.variables() for message in messages], add_generation_prompt=add_generation_prompt, **variables
        )
    except Exception as error:
        # A template is a program of the checkpoint that runs on the client's messages: anything it raises says
        # that it does not take them.
        raise ApiError(
            f"the chat template cannot render these messages: {error}", param="messages", code="chat_template_error"
        ) from None


class ChatRequest(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The body. `chat_template_kwargs` (vLLM's extension) are more variables for the chat template."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        **COMMON_NEUTRAL_FIELDS,
        "best_of": lambda value, body: type(value) is int and value == (body.get("n") or 1),
        "echo": equals(False),
        "tools": empty,
        "tool_choice": equals("none", "auto"),
        "parallel_tool_calls": is_flag,
        "functions": empty,
        "function_call": equals("none", "auto"),
        "response_format": equals({"type": "text"}),
        "modalities": equals(["text"]),
        "prediction": lambda _value, _body: False,
        "audio": lambda _value, _body: False,
        "reasoning_effort": lambda _value, _body: False,
        "verbosity": lambda _value, _body: False,
        "web_search_options": lambda _value, _body: False,
        "add_generation_prompt": equals(True),
        "continue_final_message": equals(False),
    }

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def names(self) -> dict[str, str]:
        """Engine parameters by the names this request used for them."""
        names = {"prompt_token_ids": "messages", "prompt": "messages"}
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
        )

    def prompt_token_ids(self, tokenizer: ServedTokenizer) -> list[list[int]]:
        """The conversation as one prompt; the template writes the special tokens itself."""
        return [tokenizer.encode(render_chat(tokenizer, self.messages, True, self.chat_template_kwargs), False)]


class ChatReply:
    """Turns the deltas of one chat request into its body or its chunks."""

    def __init__(self, head: ReplyHead, request: ChatRequest, params: SamplingParams, names: TokenNames) -> None:
        self._head = head
        self._returns_ids = bool(request.return_token_ids)
        self._params = params
        self._names = names
        self._opened: set[int] = set()

    def body(self, choices: list[Choice]) -> bytes:
        """The whole reply as JSON."""
        body = self._head.envelope("chat.completion") | {
            "choices": [self._whole(choice) for choice in choices],
            "usage": self._head.usage(choices),
        }
        if self._returns_ids:
            body["prompt_token_ids"] = choices[0].prompt_token_ids
        return msgspec.json.encode(body)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        whole = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs_of(choice),
            "finish_reason": choice.finish_reason,
        }
        return whole | {"token_ids": choice.token_ids} if self._returns_ids else whole

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The chunks that one delta of choice `index` becomes: the role first, then text, then the reason."""
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            first = self._chunk(index, {"role": "assistant", "content": "", "refusal": None}, None, None)
            if self._returns_ids:
                first["prompt_token_ids"] = delta.prompt_token_ids
            chunks.append(first)
        if delta.text or (delta.token_ids and (self._params.logprobs or self._returns_ids)):
            chunk = self._chunk(index, {"content": delta.text}, self._logprobs_of(delta), None)
            if self._returns_ids:
                chunk["choices"][0]["token_ids"] = delta.token_ids
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunks.append(self._chunk(index, {}, None, delta.finish_reason))
        return chunks

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
