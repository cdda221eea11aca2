"""Who may come in, and who is in: new requests are refused while the queue is full, the server drains or the engine
is gone, and what runs can be ended from one place."""

from typing import Protocol

from tokenspeed_jax.serve.errors import ApiError, engine_asleep, engine_unavailable, queue_full, server_draining
from tokenspeed_jax.serve.served_engine import ServedEngine


class OpenRequest(Protocol):
    """An HTTP request whose reply is not complete."""

    def fail(self, error: ApiError) -> None:
        """Ends it with an error and aborts what it runs in the engine."""
        ...


class Admission:
    """The server's door. Belongs to the event loop; `drain` may be called by a signal handler, and the checks anywhere.

    Attributes:
        open_requests: those that are in; each enters and leaves by itself.
        is_draining: whether the server stops: what runs may finish, nothing new comes in.
    """

    def __init__(self, engine: ServedEngine, max_queued_requests: int) -> None:
        self._engine = engine
        self._max_queued = max_queued_requests
        self.open_requests: set[OpenRequest] = set()
        self.is_draining = False

    @property
    def engine_has_failed(self) -> bool:
        """Whether the engine has ended under a server that still runs."""
        return not self._engine.is_healthy

    def drain(self) -> None:
        """Lets nothing new in from now on."""
        self.is_draining = True

    def check_serving(self) -> None:
        """Raises `ApiError` 503 while the engine does not run or the server drains."""
        if self.engine_has_failed:
            raise engine_unavailable()
        if self.is_draining:
            raise server_draining()

    def check_ready(self) -> None:
        """Raises `ApiError` 503 as `check_serving`, and while the engine sleeps."""
        self.check_serving()
        if self._engine.is_sleeping:
            raise engine_asleep()

    def check_room(self) -> None:
        """Raises `ApiError` 503 as `check_ready`, or 429 while the queue is full.

        One HTTP request may bring many prompts. They come in together, even if that overfills the queue: a batch
        larger than the whole queue could never be let in otherwise.
        """
        self.check_ready()
        if self._engine.num_queued_requests >= self._max_queued:
            raise queue_full(self._max_queued)

    def fail_all(self, error: ApiError) -> None:
        """Ends every open request with `error`."""
        for request in list(self.open_requests):
            request.fail(error)
