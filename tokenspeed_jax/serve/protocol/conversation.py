"""Conversations: messages with their tool calls, and how the chat template makes a prompt of them."""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.nesting import check_nesting, check_template_variables
from tokenspeed_jax.serve.protocol.tools import Tool
from tokenspeed_jax.serve.served_engine import ServedTokenizer

_RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


class TextPart(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A part of a message's content; only text can be served."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function of an earlier tool call; `arguments` is JSON in a string, as OpenAI has it."""

    name: str
    arguments: str = ""

    def arguments_object(self) -> dict[str, Any]:
        """The arguments parsed; no text means no arguments. Raises `ApiError` for what is no JSON object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        check_nesting(value, "messages")
        if not isinstance(value, dict):
            raise ApiError(
                f"messages: the arguments of the tool call {self.name!r} are not a JSON object in a string",
                param="messages",
                code="invalid_value",
            )
        return value


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool call that the assistant made earlier. `index` is what streams add; it is ignored."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message. Which roles exist, and in which order, is the chat template's to say.

    Content may be left out where there are tool calls. `reasoning`, or `reasoning_content`, is what the assistant
    thought; most templates drop it from earlier turns.
    """

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    function_call: None = None

    def __post_init__(self) -> None:
        if self.annotations:
            raise ApiError("messages: annotations is not supported", param="messages", code="unsupported_parameter")

    @property
    def text(self) -> str:
        """The content; parts are joined by line ends."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def variables(self, *, arguments_as_text: bool) -> dict[str, Any]:
        """The message as the template sees it."""
        shown: dict[str, Any] = {"role": self.role, "content": self.text}
        for field in ("name", "tool_call_id"):
            if (value := getattr(self, field)) is not None:
                shown[field] = value
        if (reasoning := self.reasoning or self.reasoning_content) is not None:
            # The name in most templates, and vLLM's.
            shown |= {"reasoning_content": reasoning, "reasoning": reasoning}
            # gpt-oss's name; its template does not take it beside the content of a message with calls.
            if not (self.tool_calls and self.text):
                shown["thinking"] = reasoning
        if self.tool_calls:
            shown["tool_calls"] = [_call_variables(call, arguments_as_text) for call in self.tool_calls]
        return shown


def _call_variables(call: ToolCall, arguments_as_text: bool) -> dict[str, Any]:
    arguments = call.function.arguments_object()
    function = {"name": call.function.name, "arguments": call.function.arguments if arguments_as_text else arguments}
    return {"id": call.id, "type": "function", "function": function}


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise ApiError("messages must not be empty", param="messages", code="invalid_value")
    for index, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            place = f"messages[{index}].content"
            raise ApiError(
                f"{place} is missing; only a message with tool_calls may lack it", param=place, code="invalid_type"
            )


def render_chat(
    tokenizer: ServedTokenizer,
    messages: Sequence[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool = False,
    tools: Sequence[Tool] = (),
    reasoning_effort: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The prompt text of a conversation.

    Args:
        add_generation_prompt: end with the header of the assistant's turn; None for the default, which is to do so
            unless the final message is continued.
        continue_final_message: end with the text of the last message, as if its author were still writing.
        tools: what the assistant may call.
        reasoning_effort: how much it should think.
        variables: `chat_template_kwargs`, further variables of the template.

    Raises:
        ApiError: 400 for no messages, a message without content, a reserved template variable, no chat template, one
            that does not know tools or efforts, and whatever the template itself refuses (a role it does not know,
            roles out of order).
    """
    _check_messages(messages)
    if continue_final_message and add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
            code="invalid_value",
        )
    given = _own_variables(variables)
    if not tokenizer.has_chat_template:
        raise ApiError(
            "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    for name, value in (("tools", [tool.variables() for tool in tools]), ("reasoning_effort", reasoning_effort)):
        if not value:
            continue
        if not tokenizer.chat_template_mentions(name):
            raise ApiError(
                f"the chat template of this model does nothing with {name}; a chat_template.jinja in the checkpoint's "
                "folder replaces it",
                param=name,
                code="unsupported_parameter",
            )
        if name in given:
            raise ApiError(f"{name} is in chat_template_kwargs as well", param=name, code="invalid_value")
        given[name] = value
    given["add_generation_prompt"] = (
        not continue_final_message if add_generation_prompt is None else add_generation_prompt
    )
    return _rendered(tokenizer, messages, uuid.uuid4().hex if continue_final_message else None, given)


def _own_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `chat_template_kwargs`, which must not set what has a field of its own."""
    own = dict(variables or {})
    check_template_variables(own)
    if taken := _RESERVED_VARIABLES & own.keys():
        raise ApiError(
            f"chat_template_kwargs must not set {', '.join(sorted(taken))}",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return own


def _rendered(
    tokenizer: ServedTokenizer, messages: Sequence[ChatMessage], end_mark: str | None, variables: dict[str, Any]
) -> str:
    """The template's text. Some templates want the arguments of earlier calls as an object, some as its JSON text."""
    forms = (False, True) if any(message.tool_calls for message in messages) else (False,)
    failure: Exception | None = None
    for arguments_as_text in forms:
        shown = [message.variables(arguments_as_text=arguments_as_text) for message in messages]
        if end_mark is not None:
            shown[-1]["content"] += end_mark
        try:
            text = tokenizer.apply_chat_template(shown, **variables)
        except Exception as error:
            # A template is a program of the checkpoint that runs on the client's messages: anything it raises says
            # that it does not take them.
            failure = failure or error
            continue
        return text if end_mark is None else _cut_at(text, end_mark)
    raise ApiError(
        f"the chat template cannot render these messages: {failure}", param="messages", code="chat_template_error"
    )


def _cut_at(text: str, end_mark: str) -> str:
    """What stands in front of the mark; the mark, unlike the message itself, occurs once."""
    end = text.rfind(end_mark)
    if end < 0:
        raise ApiError(
            "the chat template does not show the final message as it is, so it cannot be continued",
            param="continue_final_message",
            code="chat_template_error",
        )
    return text[:end]
