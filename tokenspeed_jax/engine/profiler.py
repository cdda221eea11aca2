"""`Profiler`: traces of what the process runs on host and device, by JAX's profiler."""

import logging
import threading

import jax

from tokenspeed_jax.errors import ProfilerError

_LOG = logging.getLogger(__name__)


class Profiler:
    """At most one trace at a time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: str | None = None

    def start(self, folder: str) -> None:
        """Begins a trace that goes to `folder`. Raises `ProfilerError` while one runs."""
        with self._lock:
            if self._folder is not None:
                raise ProfilerError(f"a trace into {self._folder} runs already; stop it first")
            options = jax.profiler.ProfileOptions()
            # A record of every Python call slows the step loop down by more than most of what one looks for.
            options.python_tracer_level = 0
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
            except RuntimeError as error:
                # JAX has one trace per process, and another part of it may have started that.
                raise ProfilerError(f"cannot start a trace: {error}") from error
            self._folder = folder

    def stop(self) -> None:
        """Ends the trace and writes it. Raises `ProfilerError` when none runs or it cannot be written."""
        with self._lock:
            folder, self._folder = self._folder, None
            if folder is None:
                raise ProfilerError("no trace runs; start one first")
            try:
                jax.profiler.stop_trace()
            except (RuntimeError, OSError) as error:
                raise ProfilerError(f"cannot write the trace into {folder}: {error}") from error

    def close(self) -> None:
        """Ends and writes the trace that still runs, if any."""
        try:
            if self._folder is not None:
                self.stop()
        except ProfilerError as error:
            _LOG.warning("%s", error)
