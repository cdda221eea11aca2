"""Programs kept between starts: JAX's persistent compilation cache, as the engine asks for it and watches it.

JAX has one such cache per process and keys it by the lowered program, the compiler's version and options, and the
device. An engine inside another program leaves it alone unless it is given a folder.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from tokenspeed_jax.errors import ConfigError

_LOG = logging.getLogger("tokenspeed_jax")
_HIT = "/jax/compilation_cache/cache_hits"

OFF = "off"


def default_cache_folder() -> str:
    """Where a server keeps compiled programs: JAX's own setting if there is one, else a folder of the user; `OFF`,
    with a warning, where that cannot be made."""
    if jax.config.jax_compilation_cache_dir is not None:
        return OFF
    folder = Path.home() / ".cache" / "tokenspeed_jax" / "compiled"
    try:
        _make(folder)
    except OSError as error:
        _LOG.warning("compiled programs are not kept: %s; see --compilation-cache-dir", error)
        return OFF
    return str(folder)


def use_compilation_cache(folder: str | None) -> None:
    """Lets this process keep every program that it compiles in a folder, and take it from there.

    Args:
        folder: made if missing, for its owner alone, since who writes there decides what runs here. None and `OFF`
            leave JAX's own settings as they are.

    Raises:
        ConfigError: the folder cannot be made.
    """
    if folder is None or folder == OFF:
        return
    try:
        _make(Path(folder))
    except OSError as error:
        raise ConfigError(f"compilation_cache_dir: {error}", field="compilation_cache_dir") from None
    before = jax.config.jax_compilation_cache_dir
    if before != folder:
        if before is not None:
            _LOG.warning("compiled programs are kept in %s from now on, no longer in %s", folder, before)
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()
    # JAX would leave out what compiles within a second; a start needs dozens of such programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


class CacheHits:
    """Counts the programs that threads took from the cache instead of compiling them."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._lock = threading.Lock()
        self.count = 0

    def watch_this_thread(self) -> None:
        """From now on, programs of the calling thread count."""
        self._local.counts = True

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Counts inside, and nothing before or after."""
        jax.monitoring.register_event_listener(self._observe)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_listener(self._observe)

    def _observe(self, event: str, **_: str | int) -> None:
        if event == _HIT and getattr(self._local, "counts", False):
            with self._lock:
                self.count += 1
