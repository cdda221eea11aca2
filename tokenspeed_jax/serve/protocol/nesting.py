"""Bounds on JSON that is handed on as it came: to chat templates, and as schemas of tools."""

from typing import Any

import msgspec

from tokenspeed_jax.serve.errors import ApiError
from tokenspeed_jax.serve.protocol.json_schemas import MAX_DEPTH

MAX_TEMPLATE_VARIABLES_BYTES = 256 * 1024
"""Bytes of `chat_template_kwargs` as JSON."""


def check_nesting(value: Any, name: str) -> None:
    """Raises `ApiError` 400 that names the field when `value` is nested more deeply than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in _inner(outer)]
        if not level:
            return
    raise ApiError(
        f"{name} is nested more deeply than {MAX_DEPTH} levels", param=name.partition("[")[0], code="invalid_value"
    )


def _inner(value: Any) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [item for item in items if isinstance(item, dict | list)]


def check_template_variables(variables: Any) -> None:
    """Raises `ApiError` 400 for `chat_template_kwargs` that are too deep or too large."""
    check_nesting(variables, "chat_template_kwargs")
    if len(msgspec.json.encode(variables)) > MAX_TEMPLATE_VARIABLES_BYTES:
        raise ApiError(
            f"chat_template_kwargs has more than {MAX_TEMPLATE_VARIABLES_BYTES} bytes",
            param="chat_template_kwargs",
            code="invalid_value",
        )
