"""The listening process: announces itself, drains when it is told to stop, and ends when its engine fails.

signal ---------> draining: /health and new requests are 503, what runs may finish until `drain_timeout` -> exit 0
second signal --> the process ends at once
engine failed --> every request is answered 500, /health is 503 for a moment -> exit `ENGINE_FAILED`
"""

import logging
import math
import os
import socket
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.connections import uvicorn_limits
from tokenspeed_jax.serve.errors import engine_failed, request_aborted

ENGINE_FAILED = 3
"""Exit code after a failed step."""

_FAREWELL_SECONDS = 5
"""Time to send the last replies; a client that does not read is cut off after it."""
_FAILURE_SECONDS = 1.0
"""Time for which a server whose engine has failed still answers, so that a prober sees why it goes."""
_KEEP_ALIVE_SECONDS = 75
_SIGNAL_EXIT = 128

_LOG = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Serves until a signal or until the engine fails.

    Attributes:
        exit_code: what the process should end with.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, admission: Admission, announcement: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=config.access_log,
                log_level=config.log_level,
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FAREWELL_SECONDS,
                **uvicorn_limits(config.max_connections),
            )
        )
        self.exit_code = 0
        self._admission = admission
        self._announcement = announcement
        self._drain_timeout = config.drain_timeout
        self._ends_at = math.inf
        self._is_announced_drain = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._announcement, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler; it interrupts the event loop anywhere, so it only notes what `on_tick` acts on."""
        if self._admission.is_draining:
            os._exit(_SIGNAL_EXIT + sig)
        self._admission.drain()
        self._ends_at = min(self._ends_at, time.monotonic() + self._drain_timeout)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; true ends the main loop and closes the port."""
        if self._is_over():
            self.should_exit = True
        return await super().on_tick(counter)

    def _is_over(self) -> bool:
        if self._admission.engine_has_failed:
            return self._is_over_after_failure()
        if not self._admission.is_draining:
            return False
        running = len(self._admission.open_requests)
        if not self._is_announced_drain:
            self._is_announced_drain = True
            _LOG.info("stopping; %d requests are running. A second signal stops at once", running)
        if running and time.monotonic() >= self._ends_at:
            _LOG.warning("%d requests are aborted after %g s of draining", running, self._drain_timeout)
            self._admission.fail_all(request_aborted())
            return True
        return not running

    def _is_over_after_failure(self) -> bool:
        if self.exit_code != ENGINE_FAILED:
            self.exit_code = ENGINE_FAILED
            self._ends_at = time.monotonic() + _FAILURE_SECONDS
            _LOG.error("the engine has failed; the server answers what is open and ends")
            self._admission.fail_all(engine_failed())
        return time.monotonic() >= self._ends_at
