"""The tools that a request offers, and whether the model may call them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from tokenspeed_jax.serve.errors import ApiError

ToolChoice = str | dict[str, Any]


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ApiError("tools: a function needs a name", param="tools", code="invalid_value")
        if self.strict:
            raise ApiError(
                "tools: strict = true needs constrained decoding, which this server does not have; leave it out",
                param="tools",
                code="unsupported_parameter",
            )


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


def offered_tools(tools: Sequence[Tool] | None, choice: ToolChoice | None) -> Sequence[Tool]:
    """The tools that the model gets to see: all of them, or none with `tool_choice` "none".

    Raises:
        ApiError: 400 for two tools of one name, and for a choice that would force a call.
    """
    offered = tools or ()
    names: set[str] = set()
    for tool in offered:
        if tool.function.name in names:
            raise ApiError(
                f"tools: two functions have the name {tool.function.name!r}", param="tools", code="invalid_value"
            )
        names.add(tool.function.name)
    if choice is None or choice == "auto":
        return offered
    if choice == "none":
        return ()
    kind = choice if isinstance(choice, str) else choice.get("type")
    if kind not in ("required", "function", "allowed_tools"):
        raise ApiError(
            f'tool_choice must be "auto" or "none", got {msgspec.json.encode(choice).decode()[:100]}',
            param="tool_choice",
            code="invalid_value",
        )
    raise ApiError(
        f"tool_choice {kind!r} needs constrained decoding, which this server does not have; "
        'send "auto" or "none", or leave it out',
        param="tool_choice",
        code="unsupported_parameter",
    )


def schemas_of(tools: Sequence[Tool]) -> Mapping[str, Mapping[str, Any]]:
    """The JSON schema of each tool's arguments, by the tool's name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
