"""`ServerConfig`: every option of the HTTP server that is not an option of the engine."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from tokenspeed_jax.engine.config import about
from tokenspeed_jax.errors import ConfigError

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server. Raises `ConfigError` for a value outside its range."""

    host: str = field(default="127.0.0.1", metadata=about("address to listen on; 0.0.0.0 for every IPv4 interface"))
    port: int = field(default=8000, metadata=about("TCP port to listen on; 0 picks a free one"))
    served_model_name: str | None = field(
        default=None, metadata=about("the model's name in requests; default: the checkpoint's name")
    )
    api_key: str | None = field(
        default=None, metadata=about("require `Authorization: Bearer KEY` on all but /health and /metrics")
    )
    max_body_bytes: int = field(default=16 * 1024 * 1024, metadata=about("largest request body"))
    max_queued_requests: int = field(
        default=4096, metadata=about("most requests that may wait to be started; further ones are answered 429")
    )
    request_timeout: float | None = field(
        default=None,
        metadata=about("seconds after which a request is aborted and answered 504, its time in the queue included"),
    )
    drain_timeout: float = field(
        default=30.0, metadata=about("seconds that running requests get to finish after SIGTERM or SIGINT")
    )
    log_level: LogLevel = field(default="info", metadata=about("least severe messages that are printed"))
    access_log: bool = field(default=False, metadata=about("print a line per HTTP request"))

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty", field="host")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in [0, 65535], got {self.port}", field="port")
        for name in ("served_model_name", "api_key"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty", field=name)
        if self.max_body_bytes <= 0:
            raise ConfigError(f"max_body_bytes must be positive, got {self.max_body_bytes}", field="max_body_bytes")
        if self.max_queued_requests <= 0:
            raise ConfigError(
                f"max_queued_requests must be positive, got {self.max_queued_requests}", field="max_queued_requests"
            )
        if self.request_timeout is not None and not 0 < self.request_timeout < math.inf:
            raise ConfigError(
                f"request_timeout must be a number of seconds > 0, got {self.request_timeout}", field="request_timeout"
            )
        if not 0 <= self.drain_timeout < math.inf:
            raise ConfigError(
                f"drain_timeout must be a number of seconds >= 0, got {self.drain_timeout}", field="drain_timeout"
            )
        if self.log_level not in get_args(LogLevel):
            raise ConfigError(
                f"log_level must be one of {', '.join(get_args(LogLevel))}, got {self.log_level!r}", field="log_level"
            )
