"""Request bodies: bytes off the wire with a limit, then JSON, then one protocol structure, or an `ApiError`."""

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from tokenspeed_jax.serve.errors import ApiError

Neutral = Callable[[Any, Mapping[str, Any]], bool]
"""(value, whole body) -> whether the value asks for nothing that the server does not do anyway."""

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")
_DISCARD_FACTOR = 4
BODY_SECONDS = 120.0
"""Time from the end of the headers to the end of the body."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; `ApiError` 413 for more than `limit` bytes, 408 for one that takes longer than `BODY_SECONDS`."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            return await _whole_body(request, limit)
    except TimeoutError:
        raise ApiError(
            f"the body was not complete after {BODY_SECONDS:g} s",
            status=408,
            kind="timeout_error",
            code="request_timeout",
            headers={"connection": "close"},
        ) from None


async def _whole_body(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > _DISCARD_FACTOR * limit:
                break
    except ClientDisconnect:
        raise ApiError("the client left before its body was complete", status=400, code="incomplete_body") from None
    # Most clients read the reply only after they have sent everything, so a body a little over the limit is
    # read to its end and dropped; a connection closed under the writer would lose the reply.
    if size > limit:
        raise ApiError(
            f"the request body has more than {limit} bytes, the limit of --max-body-bytes",
            status=413,
            code="request_too_large",
        )
    return b"".join(chunks)


def parse_body[T](body: bytes, kind: type[T]) -> T:
    """The body as a `kind`; every defect is a 400 that names the field.

    Raises:
        ApiError: invalid UTF-8 or JSON, not an object, an unknown field, a wrong type, a missing field, or a
            field of `kind.neutral_fields` whose value is not neutral.
    """
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError("the body is nested too deeply", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(f"the body is not valid JSON in UTF-8: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise ApiError(f"the body must be a JSON object, got {_json_type(raw)}", code="invalid_json")
    return convert_object(raw, kind)


def convert_object[T](raw: Mapping[str, Any], kind: type[T], prefix: str = "", *, strict: bool = True) -> T:
    """A decoded JSON object as a `kind`.

    Args:
        prefix: what the names of its fields begin with in errors, such as `sampling_params.`.
        strict: False where values are the text of a query, and "2" is a number.

    Raises:
        ApiError: as for `parse_body`.
    """
    raw = dict(raw)
    _drop_neutral(raw, getattr(kind, "neutral_fields", {}), prefix)
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _named(str(error), prefix) from None


def convert_typed[T](raw: Any, kinds: Mapping[str, type[T]], place: str, default: str | None = None) -> T:
    """A decoded JSON object as the kind that its field `type` names.

    Args:
        kinds: those that are served, by their type.
        place: what the object is called in errors, such as `input[0]`.
        default: the type of an object that does not say.

    Raises:
        ApiError: as for `parse_body`, and for a type that is not served.
    """
    if not isinstance(raw, dict):
        raise ApiError(f"{place} must be an object, got {_json_type(raw)}", param=place, code="invalid_type")
    name = raw.get("type", default)
    if name is None:
        raise ApiError(f"missing: {place}.type", param=f"{place}.type", code="missing_parameter")
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ApiError(
            f"{place}.type = {_shown(name)} is not supported; it must be one of {', '.join(kinds)}",
            param=f"{place}.type",
            code="unsupported_parameter",
        )
    return convert_object(raw, kind, f"{place}.")


def _drop_neutral(raw: dict[str, Any], neutral_fields: Mapping[str, Neutral], prefix: str) -> None:
    for name in [name for name in raw if name in neutral_fields]:
        value = raw[name]
        if value is not None and not neutral_fields[name](value, raw):
            raise ApiError(
                f"{prefix}{name} = {_shown(value)} is not supported; leave it out or send its neutral value",
                param=prefix + name,
                code="unsupported_parameter",
            )
        del raw[name]


def _shown(value: Any) -> str:
    shown = msgspec.json.encode(value).decode()
    return shown if len(shown) <= 100 else shown[:100] + "..."


def _named(message: str, prefix: str) -> ApiError:
    """A validation message of msgspec with its path turned into the name of the parameter."""
    path = ""
    if found := _PATH.search(message):
        path = found["path"].lstrip(".")
        message = message[: found.start()]
    for pattern, code, text in ((_UNKNOWN, "unknown_parameter", "unknown parameter"), (_MISSING, None, "missing")):
        if found := pattern.search(message):
            name = prefix + (f"{path}.{found['name']}" if path else found["name"])
            return ApiError(f"{text}: {name}", param=name, code=code or "missing_parameter")
    message = message.replace("`", "")
    message = message[:1].lower() + message[1:]
    path = prefix + path
    return ApiError(f"{path or 'body'}: {message}", param=path or None, code="invalid_type")


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "an array"}
    return "null" if value is None else names[type(value)]
