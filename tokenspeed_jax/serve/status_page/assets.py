"""The page's own files. They say nothing of the server, so anybody may read them."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
_FILES = {
    "/" if file.name == _INDEX else f"/status-page/{file.name}": file
    for file in sorted(_FOLDER.iterdir())
    if file.suffix in _TYPES
}

PAGE_PATHS = frozenset(_FILES)
"""Where the page and its files are."""

_HEADERS = {
    # Nothing but these files, and no word that another site or a reply of the model could smuggle in as a script.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def asset_routes() -> list[Route]:
    """A route for each file; they are read once, here."""
    return [_route(path, file) for path, file in _FILES.items()]


def _route(path: str, file: Path) -> Route:
    content = file.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = _HEADERS | {"etag": tag}

    async def asset(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_TYPES[file.suffix])

    return Route(path, asset, methods=["GET"])
