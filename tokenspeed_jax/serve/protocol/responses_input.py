"""`input` of `/v1/responses`: items, and the messages of chat that they are."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.serve.bodies import Neutral, convert_typed
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.sampling import empty, equals
from tokenspeed_jax.serve.protocol.translation import AssistantTurn, text_parts

Status = Literal["in_progress", "completed", "incomplete"]
_DIRECT = equals({"type": "direct"})


def _anything(_value: Any, _body: Mapping[str, Any]) -> bool:
    return True


class InputText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text that the model reads."""

    type: Literal["input_text"]
    text: str


class OutputText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text that the model wrote earlier, with or without what its reply said about it."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {"annotations": empty, "logprobs": _anything}

    type: Literal["output_text"]
    text: str


class Refusal(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the assistant said instead of an answer; here it is text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it said."""
        return self.refusal


class SummaryText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Reasoning itself."""

    type: Literal["reasoning_text"]
    text: str


class MessageItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message. `id` and `status`, here and below, are what replies have; they are ignored."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {"phase": lambda _value, _body: False}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant made earlier; `arguments` is JSON in a string."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "caller": _DIRECT,
        "async": equals(False),
        "namespace": lambda _value, _body: False,
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a function returned."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "caller": _DIRECT,
        "namespace": lambda _value, _body: False,
    }

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Any]
    name: str | None = None
    id: str | None = None
    status: Status | None = None


class ReasoningItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the assistant thought; the content if there is one, else the summary."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {"encrypted_content": empty}

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        """The reasoning."""
        return "\n".join(part.text for part in self.content or self.summary or ())


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem

_ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}
_INPUT_PARTS: Mapping[str, type[InputText]] = {"input_text": InputText}
_ASSISTANT_PARTS: Mapping[str, type[OutputText | Refusal | InputText]] = {
    "output_text": OutputText,
    "refusal": Refusal,
    "input_text": InputText,
}


def chat_messages(given: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of chat: the instructions first, each turn of the assistant as one message.

    Raises:
        ApiError: 400 that names the item or part that is not served.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise ApiError("input must not be empty", param="input", code="invalid_value")
    turn: AssistantTurn | None = None
    for index, raw in enumerate(given):
        place = f"input[{index}]"
        item = convert_typed(raw, _ITEMS, place, default="message")
        if message := _message_of_others(item, place):
            if turn is not None:
                messages.append(turn.message())
                turn = None
            messages.append(message)
        else:
            turn = turn or AssistantTurn()
            _add(turn, item, place)
    return messages if turn is None else [*messages, turn.message()]


def _message_of_others(item: Item, place: str) -> dict[str, Any] | None:
    """The message of an item that is not the assistant's."""
    match item:
        case MessageItem(role=role) if role != "assistant":
            return {"role": role, "content": text_parts(_texts(item.content, _INPUT_PARTS, f"{place}.content"))}
        case FunctionCallOutputItem():
            content = text_parts(_texts(item.output, _INPUT_PARTS, f"{place}.output"))
            name = {} if item.name is None else {"name": item.name}
            return {"role": "tool", "tool_call_id": item.call_id, "content": content} | name
    return None


def _add(turn: AssistantTurn, item: Item, place: str) -> None:
    match item:
        case MessageItem():
            turn.texts += _texts(item.content, _ASSISTANT_PARTS, f"{place}.content")
        case FunctionCallItem():
            turn.add_call(item.call_id, item.name, item.arguments)
        case ReasoningItem():
            turn.reasoning.append(item.text)


def _texts(content: str | list[Any], kinds: Mapping[str, type[Any]], place: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [convert_typed(part, kinds, f"{place}[{index}]").text for index, part in enumerate(content)]
