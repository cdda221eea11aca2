"""The tools that a request offers, and whether the model may call them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tokenspeed_jax.serve.bodies import convert_object
from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.json_schemas import check_limits, with_guidance

ToolChoice = str | dict[str, Any]

MAX_CALLABLE = 128
"""Most functions of which one grammar is made; OpenAI's limit."""

_NAME = re.compile(r"[\w./-]{1,128}", re.ASCII)


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, and `strict` promises that
    they follow it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ApiError("tools: a function needs a name", param="tools", code="invalid_value")

    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments as the grammar writer takes it: of an object, on one line.

        Without `strict`, keywords that cannot be enforced are dropped instead of being errors: the schema is there to
        describe the function in the first place.

        Raises:
            ApiError: 400 for arguments that are no object, and for a schema over the limits.
        """
        if self.parameters is None:
            schema: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        else:
            check_limits(self.parameters, f"tools: the schema of {self.name!r}", "tools")
            schema = {"type": "object"} | self.parameters
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "object" not in kinds:
            raise ApiError(
                f"tools: the schema of {self.name!r} must be that of an object", param="tools", code="invalid_value"
            )
        spacing: dict[str, Any] = {"whitespace_flexible": False, "whitespace_pattern": None}
        spacing |= {"item_separator": ", ?", "key_separator": ": ?"}
        return with_guidance(schema | {"type": "object"}, **spacing, lenient=not self.strict)


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One entry of `tools`; functions are the only kind."""

    type: Literal["function"]
    function: ToolFunction

    def variables(self) -> dict[str, Any]:
        """The tool as a chat template sees it: what the client sent."""
        given = {"name": self.function.name}
        for field in ("description", "parameters"):
            if (value := getattr(self.function, field)) is not None:
                given[field] = value
        return {"type": "function", "function": given}


@dataclass(frozen=True)
class ForcedCall:
    """What `tool_choice` makes the model call.

    Attributes:
        functions: those that it may choose from.
        is_named: the request named the one function. OpenAI's reply then says "stop", and there is one call.
    """

    functions: tuple[ToolFunction, ...]
    is_named: bool

    def schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of each function's arguments, by the function's name. Raises `ApiError` for what cannot be one."""
        return call_schemas(self.functions)


def call_schemas(functions: Sequence[ToolFunction]) -> dict[str, dict[str, Any]]:
    """Schemas for a grammar of calls, by name.

    Raises:
        ApiError: 400 for names that some formats could not tell from what stands beside them, for too many functions,
            and as `ToolFunction.arguments_schema` does.
    """
    if len(functions) > MAX_CALLABLE:
        raise ApiError(
            f"tools: calls of at most {MAX_CALLABLE} functions can be constrained, got {len(functions)}",
            param="tools",
            code="invalid_value",
        )
    for function in functions:
        if not _NAME.fullmatch(function.name):
            raise ApiError(
                f"tools: to be constrained, the name {function.name!r} must be 1 to 128 letters, digits, '_', '-', '.' "
                "and '/'",
                param="tools",
                code="invalid_value",
            )
    return {function.name: function.arguments_schema() for function in functions}


def offered_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """The tools that the model gets to see: all of them, or none with `tool_choice` "none".

    Raises:
        ApiError: 400 for two tools of one name, and for a choice that is none.
    """
    offered = tools or ()
    names: set[str] = set()
    for tool in offered:
        if tool.function.name in names:
            raise ApiError(
                f"tools: two functions have the name {tool.function.name!r}", param="tools", code="invalid_value"
            )
        names.add(tool.function.name)
    if choice == "none":
        return ()
    forced_call(tools, choice)
    return offered


def forced_call(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> ForcedCall | None:
    """What the model has to call, None where it may choose.

    Raises:
        ApiError: 400 for a choice that is none, or of a function that is not among the tools.
    """
    if choice in (None, "auto", "none"):
        return None
    functions = {tool.function.name: tool.function for tool in tools or ()}
    if choice == "required":
        names, is_named = list(functions), False
    elif isinstance(choice, dict) and choice.get("type") == "function":
        names, is_named = [convert_object(choice, _Named, "tool_choice.").function.name], True
    elif isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        names, is_named = convert_object(choice, _Allowed, "tool_choice.").required_names(), False
    else:
        raise ApiError(
            'tool_choice must be "auto", "none", "required" or a function by name, got '
            + msgspec.json.encode(choice).decode()[:100],
            param="tool_choice",
            code="invalid_value",
        )
    if unknown := [name for name in names if name not in functions]:
        raise ApiError(f"tool_choice: {unknown[0]!r} is not among the tools", param="tool_choice", code="invalid_value")
    if not names:
        raise ApiError("tool_choice: there is no tool to call", param="tool_choice", code="invalid_value")
    return ForcedCall(tuple(functions[name] for name in dict.fromkeys(names)), is_named)


class _Name(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """One function by name."""

    type: Literal["function"]
    function: _Name


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[_Named]


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools

    def required_names(self) -> list[str]:
        """The names. Raises `ApiError` where the model may also answer without a call, which nothing constrains."""
        if self.allowed_tools.mode != "required":
            field = "tool_choice.allowed_tools.mode"
            raise ApiError(
                f'{field} "auto" is not supported; send these tools alone', param=field, code="unsupported_parameter"
            )
        return [tool.function.name for tool in self.allowed_tools.tools]


def schemas_of(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    """The JSON schema of each tool's arguments, by the tool's name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
