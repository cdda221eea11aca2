"""`GET /openapi.json`: what the routes take, made of the routes themselves and of the structures that bodies become."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenspeed_jax import __version__
from tokenspeed_jax.serve.access import ADMIN_PATHS, OPEN_PATHS
from tokenspeed_jax.serve.admin import AbortRequest, NoFields
from tokenspeed_jax.serve.errors import speaks_anthropic
from tokenspeed_jax.serve.extension import NO_EXTENSION, Extension
from tokenspeed_jax.serve.protocol.chat import ChatRequest
from tokenspeed_jax.serve.protocol.completions import CompletionRequest
from tokenspeed_jax.serve.protocol.generate import GenerateRequest, GenerateSampling
from tokenspeed_jax.serve.protocol.messages import CountTokensRequest, MessagesRequest
from tokenspeed_jax.serve.protocol.responses import ResponsesRequest
from tokenspeed_jax.serve.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from tokenspeed_jax.serve.status_page.assets import PAGE_PATHS

PATH = "/openapi.json"

BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/generate": GenerateRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/abort_request": AbortRequest,
    "/flush_cache": NoFields,
    "/start_profile": NoFields,
    "/stop_profile": NoFields,
}
"""What each `POST` of the server's own takes; a route that is missing here fails the start."""

_REFERENCE = "#/components/schemas/{name}"
_NEUTRAL = {"description": "Not served: accepted while its value asks for nothing, such as null."}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or a wrong one.",
    404: "No such model, or a route that is turned off.",
    408: "The body did not come to an end in time.",
    409: "It cannot be done now.",
    413: "The body is too large.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The engine failed under the request, or the server has a defect.",
    503: "The server is stopping, or the engine has failed.",
    504: "The request took longer than the server allows.",
}
_GET = (401, 500)
_PROBE = (503,)
_BODY = (400, 401, 404, 408, 413, 500)
_GENERATION = (*_BODY, 429, 503, 504)
_ADMIN = (*_BODY, 409, 503)


class OpenApiRoute:
    """The description of a server's routes, and the route that serves it.

    Args:
        routes: every other route of the server, those of the extension among them.
    """

    def __init__(self, routes: Sequence[Route], extension: Extension = NO_EXTENSION) -> None:
        self.document = msgspec.json.encode(describe([*routes, *self.routes()], extension))

    def routes(self) -> list[Route]:
        """The route."""
        return [Route(PATH, self.openapi, methods=["GET"])]

    async def openapi(self, _request: Request) -> Response:
        """`GET /openapi.json`: this description."""
        return Response(self.document, media_type="application/json")


def describe(routes: Sequence[Route], extension: Extension = NO_EXTENSION) -> dict[str, Any]:
    """The OpenAPI document of these routes, those of the status page's files excepted.

    Raises:
        KeyError: a `POST` whose body is neither in `BODIES` nor in the extension's.
    """
    surface = _Surface({**BODIES, **extension.bodies}, ADMIN_PATHS | extension.paths)
    paths: dict[str, Any] = {}
    for route in routes:
        if route.path in PAGE_PATHS:
            continue
        path = route.path.replace(":path}", "}")
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = surface.operation(route, path, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "TokenSpeed-JAX", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _schemas(surface.bodies),
            "securitySchemes": {
                "apiKey": {"type": "http", "scheme": "bearer", "description": "The key of --api-key, if one is set."},
                "adminKey": {"type": "http", "scheme": "bearer", "description": "The key of --admin-api-key."},
            },
        },
    }


@dataclass(frozen=True)
class _Surface:
    """What must be known of all routes to describe one."""

    bodies: Mapping[str, type[msgspec.Struct]]
    admin_paths: frozenset[str]

    def operation(self, route: Route, path: str, method: str) -> dict[str, Any]:
        operation: dict[str, Any] = {
            "summary": (inspect.getdoc(route.endpoint) or "").split("\n\n", maxsplit=1)[0].replace("\n", " "),
            "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
            "responses": self._responses(path, method),
        }
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        if path == "/status":
            since = {"name": "since", "in": "query", "schema": {"type": "integer", "minimum": 0}}
            operation["parameters"] = [since]
        if method == "POST":
            body = self.bodies[path]
            schema = {"$ref": _REFERENCE.format(name=body.__name__)}
            required = body is not NoFields
            operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
        if path in self.admin_paths:
            operation["security"] = [{"adminKey": []}]
        elif path not in OPEN_PATHS:
            operation["security"] = [{}, {"apiKey": []}]
        return operation

    def _responses(self, path: str, method: str) -> dict[str, Any]:
        if method == "GET":
            statuses = self._of_get(path)
        elif path in self.admin_paths:
            statuses = _ADMIN
        else:
            statuses = _GENERATION if self._streams(path) else _BODY
        error = "AnthropicError" if speaks_anthropic(path) else "Error"
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=error)}}}
        failures = {str(status): {"description": _ERRORS[status], "content": content} for status in sorted(statuses)}
        return {"200": {"description": "The reply.", "content": self._success(path, method)}} | failures

    def _of_get(self, path: str) -> tuple[int, ...]:
        if path in OPEN_PATHS:
            return _PROBE
        return (*_GET, 404) if "{" in path or path in self.admin_paths else (*_GET, 400)

    def _success(self, path: str, method: str) -> dict[str, Any]:
        if path == "/metrics":
            return {"text/plain": {"schema": {"type": "string"}}}
        # Of several prompts or samples, SGLang's form is a list.
        content: dict[str, Any] = {"application/json": {"schema": {"type": ["object", "array"]}}}
        if method == "POST" and self._streams(path):
            content["text/event-stream"] = {"schema": {"type": "string"}}
        return content

    def _streams(self, path: str) -> bool:
        return hasattr(self.bodies[path], "stream")


def _schemas(bodies: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    kinds = [*dict.fromkeys(bodies.values()), GenerateSampling]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    for kind in kinds:
        properties = schemas[kind.__name__].setdefault("properties", {})
        for name in getattr(kind, "neutral_fields", {}):
            properties.setdefault(name, _NEUTRAL)
    # Taken apart later than the body, so that errors have the whole path of a field.
    sampling = {"$ref": _REFERENCE.format(name=GenerateSampling.__name__)}
    schemas[GenerateRequest.__name__]["properties"]["sampling_params"] = {"anyOf": [sampling, {"type": "null"}]}
    return schemas | {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
