"""The reply of `/v1/messages`: a message of content blocks, or the events by which it comes about."""

from typing import Any, ClassVar

import msgspec

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.chat import message_deltas
from tokenspeed_jax.serve.protocol.logprobs import TokenNames
from tokenspeed_jax.serve.protocol.messages import MessagesRequest
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.reply_parts import Begun, Ended, Grown, Part, PartEvent, ReplyParts
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.streaming import named_event

_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesReply:
    """Turns the deltas of one request into its body or its events."""

    keeps_choices: ClassVar[bool] = False

    def __init__(
        self,
        head: ReplyHead,
        request: MessagesRequest,
        params: SamplingParams,
        names: TokenNames,
        reply_format: ReplyFormat,
    ) -> None:
        self._head = head
        self._request = request
        self._format = reply_format
        self._parts: ReplyParts | None = None

    def take(self, index: int, delta: RequestDelta) -> None:
        """One delta of a whole message."""
        self._parts_for(delta.prompt_token_ids).push(delta)

    def body(self, choices: list[Choice]) -> bytes:
        """The whole message as JSON: what the events of a stream would have made."""
        (choice,) = choices
        parts = self._parts_for(choice.prompt_token_ids).parts
        message = self._message([_whole_block(part) for part in parts], self._usage(choice))
        return msgspec.json.encode(message | self._end(choice) | {"weight_version": choice.weight_version})

    def opening(self) -> bytes:
        """Nothing: the first event says how much of the prompt was cached, which the first token tells."""
        return b""

    def growth(self, index: int, delta: RequestDelta) -> bytes:
        """The events that one delta becomes."""
        opening = b""
        if self._parts is None:
            seen = Choice(index, delta.sample_index, delta.prompt_token_ids, False, cached_tokens=delta.cached_tokens)
            opening = _encoded("message_start", message=self._message([], self._usage(seen))) + _encoded("ping")
        events = self._parts_for(delta.prompt_token_ids).push(delta)
        return opening + b"".join(_named(event) for event in events)

    def closing(self, choices: list[Choice]) -> bytes:
        """Why the message ended, with the final counts."""
        (choice,) = choices
        usage, version = self._usage(choice), choice.weight_version
        ended = _encoded("message_delta", delta=self._end(choice), usage=usage, weight_version=version)
        return ended + _encoded("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The error, in this protocol's form."""
        return named_event("error", error.anthropic_body)

    def _parts_for(self, prompt_token_ids: list[int]) -> ReplyParts:
        if self._parts is None:
            self._parts = ReplyParts(message_deltas(self._request.chat, self._format, prompt_token_ids), None)
        return self._parts

    def _message(self, content: list[Any], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head.reply_id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Which of its sequences stopped the message, or what else did."""
        if isinstance(choice.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_reason}
        has_calls = any(part.kind == "call" for part in self._parts_for(choice.prompt_token_ids).parts)
        reason = "max_tokens" if choice.finish_reason == "length" else "tool_use" if has_calls else "end_turn"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Token counts; those of the input add up to the prompt."""
        thinking = self._parts.reasoning_tokens if self._parts is not None else 0
        return {
            "input_tokens": len(choice.prompt_token_ids) - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.num_tokens,
            "output_tokens_details": {"thinking_tokens": thinking},
        }


def _encoded(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind} | fields)


def _named(event: PartEvent) -> bytes:
    """An event of a part by its name in this protocol."""
    index = event.part.index
    match event:
        case Begun(part):
            block = _EMPTY_BLOCKS.get(part.kind) or _call_block(part, {})
            return _encoded("content_block_start", index=index, content_block=block)
        case Grown(part, text, _):
            kind, name = _DELTAS[part.kind]
            return _encoded("content_block_delta", index=index, delta={"type": kind, name: text})
        case Ended():
            return _encoded("content_block_stop", index=index)


def _whole_block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": part.text}
        case "reasoning":
            return {"type": "thinking", "thinking": part.text, "signature": ""}
    return _call_block(part, _input_of(part.text))


def _call_block(part: Part, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _input_of(arguments: str) -> Any:
    """The arguments as they stand if they are an object; anything else in one, under the name Anthropic suggests."""
    try:
        is_object = isinstance(msgspec.json.decode(arguments or "{}"), dict)
    except (msgspec.DecodeError, RecursionError):
        is_object = False
    return msgspec.Raw((arguments or "{}").encode()) if is_object else {"INVALID_JSON": arguments}
