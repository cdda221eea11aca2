"""`BenchConfig`: the options of `tokenspeed-jax bench`."""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from tokenspeed_jax.commands.load.endpoint import Endpoint
from tokenspeed_jax.engine.config import about
from tokenspeed_jax.errors import ConfigError


@dataclass(frozen=True)
class BenchConfig:
    """What load is put on which server. Raises `ConfigError` for a value outside its range."""

    base_url: str = field(default="http://127.0.0.1:8000", metadata=about("where the server listens", section="server"))
    model: str | None = field(
        default=None, metadata=about("the model's name in requests; default: the first one served")
    )
    api_key: str | None = field(default=None, repr=False, metadata=about("sent as `Authorization: Bearer KEY`"))
    endpoint: Literal["completions", "chat"] = field(
        default="completions",
        metadata=about("/v1/completions with token ids, or /v1/chat/completions with their text in one message"),
    )
    request_timeout: float = field(default=600.0, metadata=about("seconds after which a request counts as failed"))
    random_input_len: int = field(
        default=1024,
        metadata=about("tokens of a prompt, a shared prefix not counted", section="random prompts"),
    )
    random_output_len: int = field(default=128, metadata=about("tokens that are asked for"))
    random_range_ratio: float = field(
        default=0.0, metadata=about("lengths are even between 1 - r and 1 + r times the above; at least 0, below 1")
    )
    random_prefix_len: int = field(default=0, metadata=about("tokens in front of a prompt that it shares with others"))
    random_num_prefixes: int = field(
        default=1, metadata=about("number of different shared prefixes, each prompt has one of them")
    )
    trace: str | None = field(
        default=None,
        metadata=about(
            "replay a trace in place of random prompts: Mooncake's .jsonl or Azure's .csv, at its own times unless "
            "--request-rate is given",
            section="trace",
        ),
    )
    num_prompts: int | None = field(
        default=None, metadata=about("number of requests; default 1000, of a trace all", section="load")
    )
    request_rate: float = field(
        default=math.inf,
        metadata=about("requests per second, at the times of a Poisson process; inf sends all at once"),
    )
    max_concurrency: int | None = field(
        default=None, metadata=about("most requests at a time; further ones wait", aliases=("concurrency",))
    )
    temperature: float = field(default=0.0, metadata=about("temperature of every request"))
    ignore_eos: bool = field(
        default=True, metadata=about("generate as many tokens as are asked for, whatever they are")
    )
    vocab_size: int | None = field(
        default=None,
        metadata=about("draw token ids from 0 up to this; default: ids of words, from the server's /tokenize"),
    )
    seed: int = field(default=0, metadata=about("of lengths, tokens and times"))
    output_json: str | None = field(
        default=None, metadata=about("write the results and every request's times to this file", section="output")
    )
    disable_tqdm: bool = field(default=False, metadata=about("show no progress bar"))

    def __post_init__(self) -> None:
        try:
            Endpoint.at(self.base_url, None)
        except ValueError as error:
            raise ConfigError(f"base_url: {error}", field="base_url") from None
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable() and self.api_key):
            raise ConfigError("api_key must be printable ASCII", field="api_key")
        for name in ("random_input_len", "random_output_len", "random_num_prefixes", "num_prompts", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}", field=name)
        for name in ("request_timeout", "request_rate"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}", field=name)
        for name in ("random_prefix_len", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be at least 0, got {getattr(self, name)}", field=name)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(
                f"random_range_ratio must lie in [0, 1), got {self.random_range_ratio}", field="random_range_ratio"
            )
        if self.random_num_prefixes > 1 and not self.random_prefix_len:
            raise ConfigError("random_num_prefixes needs random_prefix_len", field="random_num_prefixes")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be at least 0, got {self.temperature}", field="temperature")
        if self.vocab_size is not None and not 2 <= self.vocab_size <= 1 << 31:
            raise ConfigError(f"vocab_size must lie in [2, 2**31], got {self.vocab_size}", field="vocab_size")
        if self.output_json is not None and not Path(self.output_json).parent.is_dir():
            raise ConfigError(f"output_json: no folder {Path(self.output_json).parent}", field="output_json")

    def shown(self) -> dict[str, object]:
        """The options without secrets, for the results."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.repr}
