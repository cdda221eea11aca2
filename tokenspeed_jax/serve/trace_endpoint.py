"""Where traces go: the address of an OpenTelemetry collector, and the protocol that it says."""

from dataclasses import dataclass
from importlib import import_module
from typing import Literal, Self
from urllib.parse import urlsplit

from tokenspeed_jax.errors import ConfigError

_FIELD = "otlp_traces_endpoint"
_EXPORTER = "opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter"


@dataclass(frozen=True)
class TraceEndpoint:
    """A collector.

    Attributes:
        address: HOST:PORT for gRPC, a URL for HTTP.
    """

    protocol: Literal["grpc", "http"]
    address: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """`grpc://HOST:PORT`, or the whole URL to which traces are posted.

        Raises:
            ConfigError: neither of the two.
        """
        try:
            url = urlsplit(text)
            has_host, port = bool(url.hostname), url.port
        except ValueError as error:
            raise ConfigError(f"{_FIELD} {text!r} is no URL: {error}", field=_FIELD) from None
        if "@" in url.netloc:
            raise ConfigError(
                f"{_FIELD} must hold no password, since it is shown: headers are given in OTEL_EXPORTER_OTLP_HEADERS",
                field=_FIELD,
            )
        if url.scheme == "grpc" and has_host and port and not url.path and not url.query:
            return cls("grpc", url.netloc)
        if url.scheme in ("http", "https") and has_host and url.path not in ("", "/"):
            return cls("http", text)
        raise ConfigError(
            f"{_FIELD} must be grpc://HOST:PORT (collectors listen on 4317) or a URL with a path, such as "
            f"http://HOST:4318/v1/traces, got {text!r}",
            field=_FIELD,
        )

    def exporter(self) -> type:
        """The class that exports spans by this protocol.

        Raises:
            ConfigError: the packages of the extra `otel` are not installed.
        """
        try:
            import_module("opentelemetry.sdk.trace.export")
            return import_module(_EXPORTER.format(protocol=self.protocol)).OTLPSpanExporter
        except ImportError as error:
            raise ConfigError(
                f"{_FIELD} needs OpenTelemetry's packages: pip install 'tokenspeed-jax[otel]' ({error})", field=_FIELD
            ) from None
