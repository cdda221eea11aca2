"""`ServerConfig`: every option of the HTTP server that is not an option of the engine."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from tokenspeed_jax.engine.config import about
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.serve.trace_endpoint import TraceEndpoint
from tokenspeed_jax.text.transcripts import ReasoningFormat, ToolCallFormat, TranscriptFormat

LogLevel = Literal["critical", "error", "warning", "info", "debug"]


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server. Raises `ConfigError` for a value outside its range.

    Fields without `repr` are secrets: they are neither logged nor shown by `/server_info`.
    """

    host: str = field(
        default="127.0.0.1", metadata=about("address to listen on; 0.0.0.0 for every IPv4 interface", section="server")
    )
    port: int = field(default=8000, metadata=about("TCP port to listen on; 0 picks a free one"))
    served_model_name: str | None = field(
        default=None, metadata=about("the model's name in requests; default: the checkpoint's name")
    )
    api_key: str | None = field(
        default=None,
        repr=False,
        metadata=about(
            "require `Authorization: Bearer KEY` on all but /health, /ready, /metrics, the page at / (not its figures) "
            "and the admin routes",
            section="keys and admin routes",
        ),
    )
    admin_api_key: str | None = field(
        default=None,
        repr=False,
        metadata=about(
            "turn on /abort_request, /flush_cache, /start_profile and /stop_profile for `Authorization: Bearer KEY`"
        ),
    )
    profiler_dir: str | None = field(
        default=None, metadata=about("folder for traces of /start_profile; needs --admin-api-key")
    )
    incremental_streaming_output: bool = field(
        default=False,
        metadata=about(
            "in streams of /generate, send only what is new instead of all text and ids so far", section="requests"
        ),
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
    disable_status_page: bool = field(default=False, metadata=about("serve neither the page at / nor /status"))
    enable_auto_tool_choice: bool = field(
        default=False,
        metadata=about("let the model call tools; needs tool_call_parser", section="tools and reasoning"),
    )
    tool_call_parser: ToolCallFormat | None = field(
        default=None,
        metadata=about(
            "how the model writes tool calls; needs enable_auto_tool_choice",
            spellings={
                "qwen": "hermes",
                "qwen25": "hermes",
                "llama3": "llama3_json",
                "deepseekv3": "deepseek_v3",
                "deepseekv31": "deepseek_v31",
                "gpt-oss": "openai",
                "minimax-m2": "minimax_m2",
            },
        ),
    )
    reasoning_parser: ReasoningFormat | None = field(
        default=None,
        metadata=about(
            "how the model marks its reasoning, which is then kept apart from the content",
            spellings={"deepseek-r1": "deepseek_r1", "deepseek-v3": "deepseek_v3", "gpt-oss": "openai_gptoss"},
        ),
    )
    log_level: LogLevel = field(default="info", metadata=about("least severe messages that are printed", section="log"))
    access_log: bool = field(default=False, metadata=about("print a line per HTTP request"))
    otlp_traces_endpoint: str | None = field(
        default=None,
        metadata=about(
            "send an OpenTelemetry trace of every request to this collector: grpc://HOST:4317, or a whole URL such as "
            "http://HOST:4318/v1/traces; needs the extra `otel`",
            section="traces",
            aliases=("otlp_endpoint",),
        ),
    )

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigError("host must not be empty", field="host")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must lie in [0, 65535], got {self.port}", field="port")
        for name in ("served_model_name", "api_key", "admin_api_key", "profiler_dir"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name} must not be empty", field=name)
        if self.admin_api_key is not None and self.admin_api_key == self.api_key:
            raise ConfigError("admin_api_key must differ from api_key", field="admin_api_key")
        if self.profiler_dir is not None and self.admin_api_key is None:
            raise ConfigError("profiler_dir needs admin_api_key, the key of /start_profile", field="profiler_dir")
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
        if self.trace_endpoint is not None:
            self.trace_endpoint.exporter()
        self._check_parsers()
        _check_choice("log_level", self.log_level, get_args(LogLevel))

    @property
    def trace_endpoint(self) -> TraceEndpoint | None:
        """`otlp_traces_endpoint`, taken apart."""
        return None if self.otlp_traces_endpoint is None else TraceEndpoint.parse(self.otlp_traces_endpoint)

    def _check_parsers(self) -> None:
        if self.tool_call_parser is not None:
            _check_choice("tool_call_parser", self.tool_call_parser, get_args(ToolCallFormat))
        if self.reasoning_parser is not None:
            _check_choice("reasoning_parser", self.reasoning_parser, get_args(ReasoningFormat))
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser, the format of the model's calls: one of "
                + ", ".join(get_args(ToolCallFormat)),
                field="enable_auto_tool_choice",
            )
        if self.tool_call_parser is not None and not self.enable_auto_tool_choice:
            raise ConfigError(
                "tool_call_parser has no effect without enable_auto_tool_choice", field="tool_call_parser"
            )
        defect = TranscriptFormat(self.reasoning_parser, self.tool_call_parser).defect()
        if defect is not None:
            raise ConfigError(defect, field="tool_call_parser")


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name)
