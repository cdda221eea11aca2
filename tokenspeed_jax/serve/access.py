"""Who may ask for what: keys come in headers and are compared in constant time."""

import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.errors import ApiError, speaks_anthropic
from tokenspeed_jax.serve.status_page.assets import PAGE_PATHS

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"}) | PAGE_PATHS
"""Paths that probes and scrapers read without a key, and the page that asks for it."""
ADMIN_PATHS = frozenset({"/abort_request", "/flush_cache", "/start_profile", "/stop_profile"})
"""Paths that take the admin key, not the API key, and are there only if one is configured; those of an `Extension`
come on top."""


class AccessCheck:
    """Middleware: 401 unless a request brings the key that its path needs."""

    def __init__(self, app: ASGIApp, config: ServerConfig, admin_paths: Collection[str] = ADMIN_PATHS) -> None:
        self._app = app
        self._admin_paths = admin_paths
        self._api_key = config.api_key
        self._admin_key = config.admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["path"], dict(scope["headers"]))
            except ApiError as error:
                await error.response(scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        given = [headers.get(b"authorization", b"")]
        if speaks_anthropic(path):  # whose clients send the bare key, or either
            given.append(b"Bearer " + headers.get(b"x-api-key", b""))
        if path in self._admin_paths:
            if self._admin_key is None:
                raise ApiError(
                    f"{path} is turned off; start the server with --admin-api-key KEY to have it",
                    status=404,
                    code="admin_disabled",
                )
            _compare(given, self._admin_key, "admin API key")
        elif self._api_key is not None and path not in OPEN_PATHS:
            _compare(given, self._api_key, "API key")


def _compare(given: Sequence[bytes], key: str, kind: str) -> None:
    expected = b"Bearer " + key.encode()
    if not any(hmac.compare_digest(header, expected) for header in given):
        raise ApiError(
            f"wrong or missing {kind}; send `Authorization: Bearer KEY`",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
