"""`POST /v1/responses`: the request. Nothing is stored: what a conversation has so far comes with every request."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.serve.bodies import Neutral, convert_typed
from tokenspeed_jax.serve.protocol.chat import Effort
from tokenspeed_jax.serve.protocol.responses_input import chat_messages
from tokenspeed_jax.serve.protocol.sampling import empty, equals
from tokenspeed_jax.serve.protocol.tools import ToolChoice
from tokenspeed_jax.serve.protocol.translation import TranslatedRequest, function_tool, named_function
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.served_engine import ServedTokenizer


def _never(_value: Any, _body: Mapping[str, Any]) -> bool:
    return False


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call, without chat's object around it."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "allowed_callers": equals(["direct"]),
        "async": equals(False),
        "defer_loading": equals(False),
        "output_schema": _never,
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`reasoning`: how much the model should think, where its chat template takes that. There are no summaries."""

    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """`text.format`: chat's `response_format` without the object around the schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None

    def chat_form(self) -> dict[str, Any]:
        """The same for chat, whose checks are the ones there are."""
        fields = {"name": self.name, "description": self.description, "schema": self.schema, "strict": self.strict}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"type": self.type} | ({"json_schema": given} if given or self.type == "json_schema" else {})


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`text`; there is no say in the verbosity."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(TranslatedRequest, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body. `top_k`, `seed`, `stop`, `priority` and `cache_salt` are vLLM's extensions."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "store": equals(False),
        "background": equals(False),
        "truncation": equals("disabled"),
        "service_tier": equals("auto", "default"),
        "stream_options": equals({}, {"include_obfuscation": False}),
        "prompt_cache_retention": equals("in_memory"),
        "context_management": empty,
        **dict.fromkeys(("previous_response_id", "conversation", "prompt", "max_tool_calls", "moderation"), _never),
    }
    chat_names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice.function": "tool_choice",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def chat_body(self) -> dict[str, Any]:
        """The chat request that this one is."""
        same = (
            "model temperature top_p top_k seed stop top_logprobs parallel_tool_calls stream priority cache_salt "
            "chat_template_kwargs"
        )
        form = self.text.format if self.text is not None else None
        return {name: getattr(self, name) for name in same.split()} | {
            "messages": chat_messages(self.input, self.instructions),
            "max_completion_tokens": self.max_output_tokens,
            # The number of alternatives asks for the log-probabilities as well.
            "logprobs": bool(self.include or self.top_logprobs),
            "tools": self._chat_tools(),
            "tool_choice": _chat_choice(self.tool_choice),
            "response_format": form and form.chat_form(),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
        }

    def _chat_tools(self) -> list[Any] | None:
        if self.tools is None:
            return None
        kinds = {"function": ResponseTool}
        tools = [convert_typed(raw, kinds, f"tools[{index}]") for index, raw in enumerate(self.tools)]
        return [function_tool(tool.name, tool.description, tool.parameters, tool.strict) for tool in tools]

    def fit(self, tokenizer: ServedTokenizer, reply_format: ReplyFormat) -> None:
        """Calls the developer the system where the template has no word for a developer, and might drop it."""
        if not tokenizer.chat_template_mentions("developer"):
            for message in self.chat.messages:
                if message.role == "developer":
                    message.role = "system"


def _chat_choice(choice: ToolChoice | None) -> ToolChoice | None:
    """The choice in chat's form, which has an object more around names; what is unknown is left to chat's checks."""
    match choice:
        case {"type": "function", "name": name, **rest} if not rest:
            return named_function(name)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools], **rest} if not rest:
            allowed = [_chat_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    return choice
