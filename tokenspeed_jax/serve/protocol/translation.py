"""Requests of other protocols, each served as the chat request that it means."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.bodies import convert_object
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.chat import ChatRequest
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.served_engine import ServedTokenizer


class TranslatedRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A body whose meaning is a chat request; that one's checks, template and tools are the only ones there are.

    `chat_template_kwargs` (vLLM's extension) are more variables for the chat template.
    """

    chat_names: ClassVar[Mapping[str, str]] = {}
    """Fields of chat by the names that this protocol has for them, where they differ; the longest ones first."""
    includes_usage: ClassVar[bool] = False

    model: str
    chat_template_kwargs: dict[str, Any] | None = None

    def chat_body(self) -> dict[str, Any]:
        """The chat request's body. Raises `ApiError` for what has no translation, in this protocol's names."""
        raise NotImplementedError

    @cached_property
    def chat(self) -> ChatRequest:
        """The request as chat knows it. Raises `ApiError` as its parts do, in chat's names."""
        body = {name: value for name, value in self.chat_body().items() if value is not None}
        return convert_object(body, ChatRequest)

    def fit(self, tokenizer: ServedTokenizer, reply_format: ReplyFormat) -> None:
        """Settles what depends on the model and on how the server reads it; called once, before the prompt is made.

        Raises:
            ApiError: the model, or the server as it was started, cannot do it.
        """

    @property
    def names(self) -> dict[str, str]:
        """Engine parameters by the names this protocol has for them."""
        names = {engine: self._own_name(chat) for engine, chat in self.chat.names.items()}
        return dict(self.chat_names) | names

    def params(self) -> SamplingParams:
        """Sampling parameters of the chat request."""
        return self.chat.params()

    def prompt_token_ids(self, tokenizer: ServedTokenizer) -> list[list[int]]:
        """The conversation as one prompt."""
        return self.chat.prompt_token_ids(tokenizer)

    @contextmanager
    def own_names(self) -> Iterator[None]:
        """Errors raised within call chat's fields by this protocol's names."""
        try:
            yield
        except ApiError as error:
            theirs, own = error.param, self._own_name(error.param or "")
            if theirs and own != theirs:
                error.param = own
                if error.message.startswith(theirs):
                    error.message = own + error.message.removeprefix(theirs)
            raise

    def _own_name(self, name: str) -> str:
        for theirs, own in self.chat_names.items():
            if name == theirs or name.startswith((f"{theirs}.", f"{theirs}[")):
                # A message of chat is not at the place at which the client sent it.
                return own if theirs == "messages" else own + name.removeprefix(theirs)
        return name


@dataclass
class AssistantTurn:
    """What the assistant said and did in one turn, gathered from the pieces in which other protocols send it."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Adds a tool call; `arguments` is JSON in a string."""
        self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def message(self) -> dict[str, Any]:
        """The turn as a message of chat."""
        message: dict[str, Any] = {"role": "assistant", "content": text_parts(self.texts)}
        if self.reasoning:
            message["reasoning"] = "\n".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def text_parts(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Texts as the content of a message of chat."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def function_tool(name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Any:
    """A tool as chat has it."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {
        "type": "function",
        "function": {name: value for name, value in function.items() if value is not None},
    }


def named_function(name: Any) -> dict[str, Any]:
    """Chat's `tool_choice` for one function."""
    return {"type": "function", "function": {"name": name}}
