"""The reply of `/v1/responses`: a list of items, or the events by which it comes about."""

import itertools
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.chat import message_deltas
from tokenspeed_jax.serve.protocol.logprobs import TokenNames
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.reply_parts import Begun, Ended, Grown, Part, PartEvent, ReplyParts
from tokenspeed_jax.serve.protocol.responses import ResponsesRequest
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.streaming import named_event

_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_TEXT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
_CALL_EVENT = "response.function_call_arguments"


class ResponsesReply:
    """Turns the deltas of one request into its body or its events."""

    keeps_choices: ClassVar[bool] = False

    def __init__(
        self,
        head: ReplyHead,
        request: ResponsesRequest,
        params: SamplingParams,
        names: TokenNames,
        reply_format: ReplyFormat,
    ) -> None:
        self._head = head
        self._request = request
        self._params = params
        self._names = names if params.logprobs else None
        self._format = reply_format
        self._parts: ReplyParts | None = None
        self._item_ids: list[str] = []
        self._sequence = itertools.count()

    def take(self, index: int, delta: RequestDelta) -> None:
        """One delta of a whole reply."""
        self._events(delta)

    def body(self, choices: list[Choice]) -> bytes:
        """The whole reply as JSON: what the events of a stream would have made."""
        return msgspec.json.encode(self._complete(choices[0]))

    def opening(self) -> bytes:
        """The response before it has anything."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._encoded(kind, {"response": response}) for kind in kinds)

    def growth(self, index: int, delta: RequestDelta) -> bytes:
        """The events that one delta becomes."""
        return b"".join(self._encoded(kind, fields) for kind, fields in self._events(delta))

    def closing(self, choices: list[Choice]) -> bytes:
        """The whole response."""
        response = self._complete(choices[0])
        return self._encoded(f"response.{response['status']}", {"response": response})

    def failure(self, error: ApiError) -> bytes:
        """The response as far as it came, with the error."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        return self._encoded("response.failed", {"response": response})

    def _encoded(self, kind: str, fields: dict[str, Any]) -> bytes:
        return named_event(kind, {"type": kind, "sequence_number": next(self._sequence)} | fields)

    def _events(self, delta: RequestDelta) -> list[tuple[str, dict[str, Any]]]:
        if self._parts is None:
            deltas = message_deltas(self._request.chat, self._format, delta.prompt_token_ids)
            self._parts = ReplyParts(deltas, self._names)
        events = self._parts.push(delta)
        if delta.finish_reason is not None and not self._parts.parts:
            events = self._parts.empty_text()
        return [named for event in events for named in self._named(event)]

    def _named(self, event: PartEvent) -> list[tuple[str, dict[str, Any]]]:
        """An event of a part by its names in this protocol."""
        part = event.part
        if isinstance(event, Begun):
            self._item_ids.append(_ID_PREFIXES[part.kind] + uuid.uuid4().hex)
        place: dict[str, Any] = {"item_id": self._item_ids[part.index], "output_index": part.index}
        name = _TEXT_EVENTS.get(part.kind, _CALL_EVENT)
        if part.kind != "call":
            place["content_index"] = 0
        match event:
            case Begun():
                item = {"output_index": part.index, "item": self._item(part)}
                added = ("response.output_item.added", item)
                return [added, *_content_part("response.content_part.added", part, place)]
            case Grown(part, text, logprobs):
                extra = {"logprobs": logprobs} if part.kind == "text" else {}
                return [(f"{name}.delta", place | {"delta": text} | extra)]
            case Ended(part):
                item = {"output_index": part.index, "item": self._item(part)}
                return [
                    (f"{name}.done", place | _end_of(part)),
                    *_content_part("response.content_part.done", part, place),
                    ("response.output_item.done", item),
                ]

    def _item(self, part: Part) -> dict[str, Any]:
        item = {"id": self._item_ids[part.index], "status": part.status}
        if part.kind == "call":
            call = {"type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": part.text}
            return item | call
        # A client adds the content itself when it is told of it.
        content = [] if part.status == "in_progress" else [_content(part)]
        if part.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _complete(self, choice: Choice) -> dict[str, Any]:
        is_cut = choice.finish_reason == "length"
        prompt, output = len(choice.prompt_token_ids), choice.num_tokens
        reasoning = self._parts.reasoning_tokens if self._parts is not None else 0
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": choice.cached_tokens},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": prompt + output,
            },
            "weight_version": choice.weight_version,
        }

    def _response(self, status: str) -> dict[str, Any]:
        """The response object: what was asked for, and the items that are there."""
        request, params, chat = self._request, self._params, self._request.chat
        effort = request.reasoning.effort if request.reasoning is not None else None
        form = request.text.format if request.text is not None else None
        parts = self._parts.parts if self._parts is not None else []
        return {
            "id": self._head.reply_id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head.model,
            "output": [self._item(part) for part in parts],
            "usage": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.top_logprobs,
            "tools": request.tools or [],
            "tool_choice": request.tool_choice or "auto",
            "parallel_tool_calls": chat.parallel_tool_calls is not False,
            "text": {"format": form or {"type": "text"}},
            "reasoning": {"effort": effort, "summary": None},
            "metadata": request.metadata or {},
            "user": request.user,
            "safety_identifier": request.safety_identifier,
            "prompt_cache_key": request.prompt_cache_key,
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }


def _content(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": part.logprobs}


def _content_part(kind: str, part: Part, place: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [] if part.kind == "call" else [(kind, {**place, "part": _content(part)})]


def _end_of(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        return {"name": part.name, "arguments": part.text}
    return {"text": part.text} | ({"logprobs": part.logprobs} if part.kind == "text" else {})
