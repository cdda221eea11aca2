"""KV-cache events: tells routers which prefixes are in this engine's cache, on ZeroMQ in vLLM's format.

`feed` takes the scheduler's events over on the step loop's thread, `publisher` sends them from a thread of its own, and
`wire` knows the bytes. Only the last two need pyzmq and msgspec.
"""

from typing import TYPE_CHECKING

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.kv_events.config import KVEventsConfig

if TYPE_CHECKING:
    from tokenspeed_jax.kv_events.publisher import EventPublisher

__all__ = ["KVEventsConfig", "open_publisher"]


def open_publisher(config: KVEventsConfig | None) -> "EventPublisher | None":
    """The publisher that the options ask for, its sockets open and its thread not started; None if they ask for none.

    Raises:
        ConfigError: pyzmq or msgspec is not installed, or an endpoint is taken or no address.
    """
    if config is None or not config.enable_kv_cache_events:
        return None
    try:
        from tokenspeed_jax.kv_events.publisher import EventPublisher
    except ImportError as error:
        raise ConfigError(
            f"kv_events_config needs the package {error.name or 'pyzmq'}: pip install 'tokenspeed-jax[kv-events]'",
            field="kv_events_config",
        ) from None
    return EventPublisher(config)
