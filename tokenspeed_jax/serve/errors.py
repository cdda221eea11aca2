"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, and as Anthropic's do."""

from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tokenspeed_jax.errors import InvalidRequest

ANTHROPIC_PATH = "/v1/messages"
"""Under it, errors have Anthropic's form: `{"type": "error", "error": {"type", "message"}}`."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_RETRY_QUEUE_SECONDS = "1"
_RETRY_DRAINING_SECONDS = "5"


class ApiError(Exception):
    """A refusal with its HTTP status.

    Attributes:
        status: HTTP status code.
        kind: the `type` of the error body.
        param: the request field at fault, as the client spelled it, or None.
        code: a short machine-readable reason, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        message = self.message
        if self.param is not None and self.param not in message:
            message = f"{self.param}: {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def response(self, path: str) -> Response:
        """The reply to a request of `path`."""
        body = self.anthropic_body if speaks_anthropic(path) else self.body
        return Response(msgspec.json.encode(body), self.status, headers=self.headers, media_type="application/json")


def speaks_anthropic(path: str) -> bool:
    """Whether the clients of `path` are Anthropic's."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def model_not_found(name: str, served: str) -> ApiError:
    """404 for a model other than the one this server holds."""
    return ApiError(
        f"the model {name!r} does not exist; this server has {served!r}",
        status=404,
        param="model",
        code="model_not_found",
    )


def engine_failed() -> ApiError:
    """500: a step failed, and this request with it."""
    return ApiError(
        "the engine failed while it served this request; see the server's log",
        status=500,
        kind="server_error",
        code="engine_failed",
    )


def engine_unavailable() -> ApiError:
    """503: the engine was closed or has failed, and takes no request any more."""
    return ApiError(
        "the engine is not running; see the server's log",
        status=503,
        kind="service_unavailable_error",
        code="engine_unavailable",
    )


def engine_not_serving(reason: str) -> ApiError:
    """503: the engine is well, but sleeps or waits for weights."""
    return ApiError(reason, status=503, kind="service_unavailable_error", code="engine_not_serving")


def engine_asleep() -> ApiError:
    """503: the engine has no cache until somebody wakes it."""
    return engine_not_serving("the engine is asleep and takes no requests until it is woken")


def server_draining() -> ApiError:
    """503: the server was told to stop and only finishes what runs."""
    return ApiError(
        "the server is stopping and takes no new requests",
        status=503,
        kind="service_unavailable_error",
        code="server_draining",
        headers={"retry-after": _RETRY_DRAINING_SECONDS},
    )


def queue_full(limit: int) -> ApiError:
    """429: as many requests wait as the server was told to keep."""
    return ApiError(
        f"{limit} requests are waiting already, the limit of --max-queued-requests; try again later",
        status=429,
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": _RETRY_QUEUE_SECONDS},
    )


def too_many_connections(limit: int) -> ApiError:
    """503: as many connections are open as the server was told to keep."""
    return ApiError(
        f"{limit} connections are open already, the limit of --max-connections; try again later",
        status=503,
        kind="service_unavailable_error",
        code="too_many_connections",
        headers={"retry-after": _RETRY_QUEUE_SECONDS},
    )


def request_timed_out(seconds: float) -> ApiError:
    """504: the request was not complete within the server's limit, and was aborted."""
    return ApiError(
        f"the request was not complete after {seconds:g} s, the limit of --request-timeout",
        status=504,
        kind="timeout_error",
        code="request_timeout",
        # OpenAI's clients send it again otherwise, and what was too long once will be too long again.
        headers={"x-should-retry": "false"},
    )


def request_aborted() -> ApiError:
    """503: a healthy engine gave the request up, as it does when the server stops."""
    return ApiError(
        "the server aborted this request before it was complete",
        status=503,
        kind="service_unavailable_error",
        code="request_aborted",
    )


def refusal(error: InvalidRequest, renamed: dict[str, str]) -> ApiError:
    """400 for what the engine refuses, with the engine's parameter called by the name it has in the request."""
    message, param = str(error), error.parameter
    if param in renamed:
        if message.startswith(param):
            message = renamed[param] + message.removeprefix(param)
        param = renamed[param]
    return ApiError(message, param=param, code="invalid_value")


def constraint_failed(reason: str, field: str) -> ApiError:
    """400: the constraint that `field` of the request made turned out to be one that the text cannot follow."""
    return ApiError(f"{field} could not be followed to the end: {reason}", param=field, code="constraint_failed")


async def on_api_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for `ApiError`."""
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for what its router raises: no such route, method not allowed."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    messages = {
        HTTPStatus.NOT_FOUND: (f"no such route: {method} {path}", "not_found"),
        HTTPStatus.METHOD_NOT_ALLOWED: (f"{path} does not take {method}", "method_not_allowed"),
    }
    message, code = messages.get(HTTPStatus(error.status_code), (error.detail, None))
    headers = dict(error.headers) if error.headers else None
    return ApiError(message, status=error.status_code, code=code, headers=headers).response(path)


async def on_unexpected_error(request: Request, _error: Exception) -> Response:
    """Starlette's handler for a defect of the server; the traceback goes to the log, not to the client."""
    return ApiError(
        "internal error; see the server's log", status=500, kind="server_error", code="internal_error"
    ).response(request.url.path)
