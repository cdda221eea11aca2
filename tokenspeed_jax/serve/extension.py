"""What another package adds to the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.routing import Route


@dataclass(frozen=True)
class Extension:
    """Admin routes beside the server's own.

    Attributes:
        routes: all of them take the admin key, and none is there without one.
        bodies: what each `POST` among them takes, for the description of the server.
    """

    routes: Sequence[Route] = ()
    bodies: Mapping[str, type[msgspec.Struct]] = field(default_factory=dict)

    @property
    def paths(self) -> frozenset[str]:
        """Paths of the routes."""
        return frozenset(route.path for route in self.routes)


NO_EXTENSION = Extension()
"""The server as it is."""
