"""`POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's protocol: the requests."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from tokenspeed_jax.serve.bodies import Neutral, convert_typed
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.chat import Effort
from tokenspeed_jax.serve.protocol.messages_input import CacheControl, InputMessage, chat_messages
from tokenspeed_jax.serve.protocol.sampling import empty, equals
from tokenspeed_jax.serve.protocol.translation import TranslatedRequest, function_tool, named_function
from tokenspeed_jax.serve.reply_format import ReplyFormat
from tokenspeed_jax.serve.served_engine import ServedTokenizer


def _never(_value: Any, _body: Mapping[str, Any]) -> bool:
    return False


class ClientTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that the client runs. `eager_input_streaming` is how all calls stream here."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "allowed_callers": equals(["direct"]),
        "defer_loading": equals(False),
        "input_examples": empty,
    }

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def __post_init__(self) -> None:
        if (self.name is None) == (self.type == "tool"):
            raise ApiError(
                'tool_choice.name is needed for the type "tool", and for no other',
                param="tool_choice.name",
                code="invalid_value",
            )

    def chat_form(self) -> str | dict[str, Any]:
        """The same for chat."""
        return named_function(self.name) if self.type == "tool" else {"any": "required"}.get(self.type, self.type)


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`thinking`. A model cannot be held to a budget, so the type "enabled", which needs one, is refused."""

    type: Literal["adaptive", "disabled", "enabled"]
    budget_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.budget_tokens is not None or self.type == "enabled":
            raise ApiError(
                'thinking.budget_tokens is not supported; send the type "adaptive" and no budget',
                param="thinking.budget_tokens",
                code="unsupported_parameter",
            )


class JsonFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What the text has to look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`output_config`: how much to think, where the chat template takes that, and the form of the text."""

    effort: Effort | None = None
    format: JsonFormat | None = None


class CountTokensRequest(TranslatedRequest, forbid_unknown_fields=True, kw_only=True, dict=True):
    """What makes the prompt; the whole body of `/v1/messages/count_tokens`."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "speed": equals("standard"),
        "mcp_servers": empty,
        "context_management": empty,
    }
    chat_names: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "reasoning_effort": "output_config.effort",
        "tool_choice.function": "tool_choice",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    }

    messages: list[InputMessage]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    def chat_body(self) -> dict[str, Any]:
        """The chat request that this one is. A last message of the assistant's is continued."""
        choice = self.tool_choice
        config = self.output_config or OutputConfig()
        body: dict[str, Any] = {
            "model": self.model,
            "messages": chat_messages(self.messages, self.system),
            "tools": self._chat_tools(),
            "tool_choice": choice and choice.chat_form(),
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
            "reasoning_effort": config.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if config.format is not None:
            schema = {"name": "output", "schema": config.format.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        last = body["messages"][-1]
        if last["role"] == "assistant":
            if "tool_calls" in last:
                raise ApiError(
                    "messages: the last one calls tools whose results are missing",
                    param="messages",
                    code="invalid_value",
                )
            body["continue_final_message"] = True
        return body

    def _chat_tools(self) -> list[Any] | None:
        if self.tools is None:
            return None
        kinds = {"custom": ClientTool}
        tools = [
            convert_typed(_without_null_type(raw), kinds, f"tools[{index}]", default="custom")
            for index, raw in enumerate(self.tools)
        ]
        return [function_tool(tool.name, tool.description, tool.input_schema, tool.strict) for tool in tools]

    def fit(self, tokenizer: ServedTokenizer, reply_format: ReplyFormat) -> None:
        """Turns the thinking on or off, by the variable that the chat template has for it."""
        if self.thinking is None:
            return
        wanted = self.thinking.type == "adaptive"
        if wanted and not reply_format.separates_reasoning:
            raise ApiError(
                "thinking: this server does not tell reasoning from text; start it with --reasoning-parser",
                param="thinking",
                code="unsupported_parameter",
            )
        switches = [name for name in reply_format.reasoning_switches if tokenizer.chat_template_mentions(name)]
        given = self.chat.chat_template_kwargs or {}
        if taken := given.keys() & set(switches):
            raise ApiError(
                f"thinking: {min(taken)} is in chat_template_kwargs as well", param="thinking", code="invalid_value"
            )
        if switches:
            self.chat.chat_template_kwargs = given | dict.fromkeys(switches, wanted)
        elif not wanted and reply_format.separates_reasoning:
            raise ApiError(
                'thinking = "disabled": the chat template of this model has no switch for it',
                param="thinking",
                code="unsupported_parameter",
            )


class Metadata(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`metadata`; it is ignored."""

    user_id: str | None = None


class MessagesRequest(CountTokensRequest, forbid_unknown_fields=True, kw_only=True, dict=True):
    """The body. `priority` and `cache_salt` are vLLM's extensions."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        **CountTokensRequest.neutral_fields,
        "service_tier": equals("auto", "standard_only"),
        **dict.fromkeys(("container", "diagnostics", "inference_geo", "user_profile_id"), _never),
    }

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Metadata | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def chat_body(self) -> dict[str, Any]:
        """The chat request that this one is."""
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream", "priority", "cache_salt")
        return super().chat_body() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}


def _without_null_type(raw: Any) -> Any:
    """Null is how some clients write that a tool is the client's own."""
    if isinstance(raw, dict) and raw.get("type", "") is None:
        return {name: value for name, value in raw.items() if name != "type"}
    return raw
