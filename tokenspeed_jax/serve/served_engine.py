"""What the server needs of an engine: exactly the public API of `Engine`, as types.

The server is written against these protocols, so that it can be tested with a scripted model and starts no
JAX of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from tokenspeed_jax.engine.activity import Activity
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.memory import MemoryReport
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.start_report import StartReport
from tokenspeed_jax.text.piece_decoder import PieceStream


class ServedTokenizer(Protocol):
    """The part of `text.Tokenizer` that the server calls; every method may run on any thread."""

    vocab_size: int
    special_ids: frozenset[int]

    @property
    def has_chat_template(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> str | None: ...

    def piece_stream(self) -> PieceStream: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str: ...

    def chat_template_mentions(self, variable: str) -> bool: ...


class ServedStats(Protocol):
    """`EngineStats`: gauges of now and totals since start."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def live_tokens(self) -> int: ...
    @property
    def parents_in_use(self) -> int: ...
    @property
    def num_parents(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def generation_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def prefix_query_tokens(self) -> int: ...
    @property
    def checkpoint_lost_tokens(self) -> int: ...
    @property
    def finished(self) -> Mapping[str, int]: ...
    @property
    def retractions(self) -> int: ...
    @property
    def compilations_after_warmup(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def step_seconds_total(self) -> float: ...
    @property
    def steps(self) -> int: ...


class ServedEngine(Protocol):
    """One engine: requests in from the event loop's thread, deltas out on the engine's own thread."""

    @property
    def tokenizer(self) -> ServedTokenizer: ...

    @property
    def config(self) -> EngineConfig: ...

    @property
    def memory_report(self) -> MemoryReport: ...

    @property
    def start_report(self) -> StartReport: ...

    @property
    def model_name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def num_queued_requests(self) -> int: ...

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_delta: Callable[[RequestDelta], None],
    ) -> str:
        """Queues one prompt; raises `InvalidRequest` or `EngineClosed` and then has changed nothing."""
        ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> ServedStats: ...

    def activity(self, max_requests: int) -> Future[Activity]: ...

    def flush_cache(self) -> bool: ...

    def start_profile(self, folder: str) -> None: ...

    def stop_profile(self) -> None: ...
