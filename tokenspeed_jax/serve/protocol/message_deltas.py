"""An assistant's message as it grows: the events of its transcript in OpenAI's shape."""

import uuid
from collections.abc import Sequence
from typing import Any

from tokenspeed_jax.text.transcripts import (
    Arguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Reasoning,
    TranscriptParser,
)


class MessageDeltas:
    """The deltas of one choice. Reasoning is sent as `reasoning` (vLLM's name now) and `reasoning_content` (before).

    Args:
        parser: None when all of the text is content.
        allows_parallel: False keeps the first call and drops the others, as vLLM does.
        is_named: the request named the function to call, and then OpenAI's finish reason stays "stop".
    """

    def __init__(self, parser: TranscriptParser | None, *, allows_parallel: bool, is_named: bool = False) -> None:
        self._parser = parser
        self._is_named = is_named
        self._allows_parallel = allows_parallel
        self._calls = 0

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's reason, but "tool_calls" where the model stopped to wait for tools."""
        return "tool_calls" if reason == "stop" and self._calls and not self._is_named else reason

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that this text makes certain."""
        if self._parser is None:
            return [{"content": text}] if text else []
        events = self._parser.feed(text) if text else []
        if is_last:
            events = [*events, *self._parser.finish()]
        deltas: list[dict[str, Any]] = []
        for event in events:
            delta = self._delta(event)
            if delta is not None and not (deltas and _merged(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    def _delta(self, event: Event) -> dict[str, Any] | None:
        match event:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning": text, "reasoning_content": text}
            case CallEnded():
                return None
            case CallBegun():
                self._calls += 1
        if self._calls > 1 and not self._allows_parallel:
            return None
        call: dict[str, Any] = {"index": self._calls - 1}
        match event:
            case CallBegun(name, call_id):
                call |= {"id": call_id or f"call_{uuid.uuid4().hex}", "type": "function"}
                call["function"] = {"name": name, "arguments": ""}
            case Arguments(text):
                call["function"] = {"arguments": text}
        return {"tool_calls": [call]}


def _merged(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Adds `delta` to the delta before it, if it goes on with the same thing."""
    if last.keys() != delta.keys():
        return False
    if "tool_calls" not in delta:
        for field, text in delta.items():
            last[field] += text
        return True
    (call,) = delta["tool_calls"]
    if "id" in call:
        return False
    last["tool_calls"][0]["function"]["arguments"] += call["function"]["arguments"]
    return True


def whole_message(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a whole reply make.

    Content is null where there is none beside reasoning or calls. Fields for these are there only if they are.
    """
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning", "") for delta in deltas)
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    if not content and (reasoning or calls):
        message["content"] = None
    return message
