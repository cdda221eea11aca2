"""JSON schemas of clients: read with limits, and made to say how the grammar writer is to take them."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed_jax.serve.errors import ApiError

MAX_DEPTH = 64
"""Deepest nesting of objects and arrays in a schema."""

MAX_VALUES = 20_000
"""Most values (objects, arrays, strings, numbers) in a schema."""

JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between two tokens of JSON: without an end to it, small models write nothing else any more."""

MAX_PROPERTIES = 500
"""Most properties of one object in a schema: the time to compile them grows with their square."""

type Schema = Mapping[str, Any] | bool


def read_schema(value: str | Schema, field: str) -> Schema:
    """A schema that stands in a request as JSON or as text with JSON in it.

    Raises:
        ApiError: 400 naming `field` for what is no schema or exceeds a limit.
    """
    schema: Any = value
    if isinstance(value, str):
        try:
            schema = msgspec.json.decode(value)
        except RecursionError:
            raise _refusal(field, f"{field} is nested deeper than {MAX_DEPTH} levels") from None
        except (msgspec.DecodeError, UnicodeError) as error:
            raise _refusal(field, f"{field} is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise _refusal(field, f"{field} must be a JSON schema: an object, true or false")
    check_limits(schema, field, field)
    return schema


def check_limits(schema: Any, what: str, field: str) -> None:
    """Raises `ApiError` 400 of `what`, with the name of its field, for a schema that is too deep or too large."""
    level, depth, values = [schema], 0, 0
    while level:
        depth += 1
        values += len(level)
        if depth > MAX_DEPTH:
            raise _refusal(field, f"{what} is nested deeper than {MAX_DEPTH} levels")
        if values > MAX_VALUES:
            raise _refusal(field, f"{what} has more than {MAX_VALUES} values")
        if any(len(value) > MAX_PROPERTIES for value in level if isinstance(value, dict)):
            raise _refusal(field, f"{what} has more than {MAX_PROPERTIES} entries in one object")
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inner(outer)]


def _inner(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def with_guidance(schema: Schema, **options: Any) -> dict[str, Any]:
    """The schema with llguidance's own options in it; what the client chose there stays."""
    own: dict[str, Any] = dict(schema) if isinstance(schema, Mapping) else {} if schema else {"not": {}}
    chosen = own.get("x-guidance")
    return own | {"x-guidance": options | (chosen if isinstance(chosen, dict) else {})}


def text_of(schema: Schema) -> str:
    """The schema as JSON, its properties in the client's order: the model writes them in it."""
    return json.dumps(schema, ensure_ascii=False)


def _refusal(field: str, message: str) -> ApiError:
    return ApiError(message, param=field, code="invalid_value")
