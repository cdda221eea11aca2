"""Messages of `/v1/messages`: content blocks, and the messages of chat that they are."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.serve.bodies import Neutral, convert_typed
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.sampling import empty, equals
from tokenspeed_jax.serve.protocol.translation import AssistantTurn, text_parts

_FAILED_TOOL = "Error: "
"""Says in front of a result that the tool failed, for which chat templates have no other place."""


class CacheControl(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Asks for the prefix up to here to be cached, which is done anyway; nobody promises for how long."""

    type: Literal["ephemeral"]
    ttl: Literal["5m"] | None = None


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Text."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {"citations": empty}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the assistant thought. There is nothing that a signature could protect; it is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call that the assistant made."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "caller": equals({"type": "direct"}),
        "toolset_name": lambda _value, _body: False,
    }

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a tool returned."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {"toolset_name": lambda _value, _body: False}

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class InputMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock

_TEXT: Mapping[str, type[TextBlock]] = {"text": TextBlock}
_BLOCKS: Mapping[str, Mapping[str, type[Block]]] = {
    "system": _TEXT,
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
}


def chat_messages(messages: Sequence[InputMessage], system: str | list[Any] | None) -> list[dict[str, Any]]:
    """The messages of chat: the system's first, messages of one role in a row as one, results of tools on their own.

    Raises:
        ApiError: 400 that names the block that is not served.
    """
    translated: list[dict[str, Any]] = []
    if texts := _texts(system or [], "system"):
        translated.append({"role": "system", "content": text_parts(texts)})
    blocks = [
        (message.role, block)
        for index, message in enumerate(messages)
        for block in _blocks(message, f"messages[{index}].content")
    ]
    if not blocks:
        raise ApiError("messages must not be empty", param="messages", code="invalid_value")
    for role, turn in groupby(blocks, key=lambda entry: entry[0]):
        given = (block for _, block in turn)
        translated += [_assistant_message(given)] if role == "assistant" else _other_messages(role, given)
    return translated


def _blocks(message: InputMessage, place: str) -> list[Block]:
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    if not message.content and message.role != "assistant":  # whose reply may have been empty
        raise ApiError(f"{place} must not be empty", param=place, code="invalid_value")
    blocks: list[Block] = []
    for index, raw in enumerate(message.content):
        block = convert_typed(raw, _BLOCKS[message.role], f"{place}[{index}]")
        if isinstance(block, ToolResultBlock):
            block.content = "\n".join(_texts(block.content or [], f"{place}[{index}].content"))
        blocks.append(block)
    return blocks


def _texts(content: str | list[Any], place: str) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    return [convert_typed(raw, _TEXT, f"{place}[{index}]").text for index, raw in enumerate(content)]


def _assistant_message(blocks: Iterable[Block]) -> dict[str, Any]:
    turn = AssistantTurn()
    for block in blocks:
        match block:
            case TextBlock(text=text):
                turn.texts.append(text)
            case ThinkingBlock(thinking=thinking):
                turn.reasoning.append(thinking)
            case ToolUseBlock():
                turn.add_call(block.id, block.name, msgspec.json.encode(block.input).decode())
    return turn.message()


def _other_messages(role: str, blocks: Iterable[Block]) -> list[dict[str, Any]]:
    """Texts that stand together are one message, a result is one by itself."""
    messages: list[dict[str, Any]] = []
    for is_result, run in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if not is_result:
            texts = [block.text for block in run if isinstance(block, TextBlock)]
            messages.append({"role": role, "content": text_parts(texts)})
            continue
        for block in run:
            assert isinstance(block, ToolResultBlock)
            text = f"{_FAILED_TOOL if block.is_error else ''}{block.content}"
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
    return messages
