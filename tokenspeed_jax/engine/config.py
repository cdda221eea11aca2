"""`EngineConfig`: every option of the engine, once. The server's command line is generated from it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, get_args

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.kv_events import KVEventsConfig

DType = Literal["auto", "float32", "bfloat16", "float16"]
GrammarBackend = Literal["auto", "llguidance", "none"]


_NONE: Mapping[str, str] = MappingProxyType({})


def about(
    help_text: str,
    *,
    section: str | None = None,
    aliases: tuple[str, ...] = (),
    near_aliases: Mapping[str, str] = _NONE,
    opposites: tuple[str, ...] = (),
    spellings: Mapping[str, str] = _NONE,
    alternative_to: str | None = None,
) -> dict[str, Any]:
    """Field metadata from which the command line is made.

    Args:
        help_text: the option's help.
        section: heading of this option and of those that follow it, in the help.
        aliases: other names of the option that mean exactly the same.
        near_aliases: names that other servers use for nearly the same; each is taken and what differs is printed.
        opposites: names of switches that turn this switch off.
        spellings: other spellings of the option's values.
        alternative_to: a field beside which this one would have no effect; not both can be given.
    """
    return {
        "help": help_text,
        "section": section,
        "aliases": aliases,
        "near_aliases": near_aliases,
        "opposites": opposites,
        "spellings": spellings,
        "alternative_to": alternative_to,
    }


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine. Field names are the server's option names with underscores.

    Raises `ConfigError` for a value outside its range; what depends on the checkpoint (context length,
    memory) is checked by `Engine` before anything is allocated.
    """

    model: str = field(
        metadata=about("checkpoint folder, GGUF file, or Hugging Face hub id", section="model", aliases=("model_path",))
    )
    revision: str | None = field(default=None, metadata=about("branch, tag or commit of a hub id"))
    dtype: DType = field(
        default="auto",
        metadata=about(
            "compute dtype; auto: the checkpoint's, float32 on a CPU",
            spellings={"half": "float16", "float": "float32"},
        ),
    )
    seed: int = field(default=0, metadata=about("seed of requests that bring none", aliases=("random_seed",)))
    max_model_len: int | None = field(
        default=None,
        metadata=about(
            "longest prompt plus output in tokens; default: the model's own limit",
            section="batches",
            aliases=("context_length",),
        ),
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata=about(
            "most requests in one step; default 256 on a GPU, 16 on a CPU", aliases=("max_running_requests",)
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=about(
            "most tokens in one step, and the longest prefill chunk; default 8192 on a GPU, 512 on a CPU",
            near_aliases={
                "chunked_prefill_size": "it bounds a prefill chunk as in SGLang, and here also all tokens of a step, "
                "those of decoding requests included"
            },
        ),
    )
    gpu_memory_utilization: float = field(
        default=0.90,
        metadata=about(
            "share of the memory that JAX may allocate that the engine uses, above 0 up to 1",
            section="memory",
            alternative_to="kv_cache_memory_bytes",
            near_aliases={
                "mem_fraction_static": "the share counts a step's temporaries too, which SGLang leaves out, and is of "
                "what JAX may allocate, not of the whole GPU"
            },
        ),
    )
    kv_cache_memory_bytes: int | None = field(
        default=None,
        metadata=about("bytes of the cache arena; default: what gpu_memory_utilization leaves, 1 GiB on a CPU"),
    )
    prefix_granularity: int | None = field(
        default=None,
        metadata=about(
            "tokens per hashed prefix page: requests share cache at multiples of it; default 64",
            section="cache",
            aliases=("block_size",),
            near_aliases={
                "page_size": "it is the granularity at which requests share prefixes; the kernels' page is "
                "--kernel-page-size"
            },
        ),
    )
    checkpoint_granularity: int | None = field(
        default=None,
        metadata=about(
            "tokens that one state block of a recurrent layer spans; default: prefix_granularity, which it must divide"
        ),
    )
    kernel_page_size: int | None = field(
        default=None,
        metadata=about("tokens per attention-kernel page; default: the kernel's own; must divide prefix_granularity"),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=about("reuse the cache of equal prompt prefixes", opposites=("disable_radix_cache",)),
    )
    kv_events_config: KVEventsConfig | None = field(
        default=None,
        metadata=about(
            "tell routers on ZeroMQ what comes into the prefix cache and what leaves it, as in "
            '{"enable_kv_cache_events": true}; default: nobody is told'
        ),
    )
    overlap_schedule: bool = field(
        default=True,
        metadata=about(
            "plan and dispatch a step before the previous one has landed",
            section="execution",
            aliases=("async_scheduling",),
            opposites=("disable_overlap_schedule",),
        ),
    )
    attention_implementation: Literal["auto", "mosaic", "xla"] = field(
        default="auto",
        metadata=about(
            "kernels of attention and recurrences: mosaic (NVIDIA Hopper), xla (any platform); auto picks by platform"
        ),
    )
    enable_return_routed_experts: bool = field(
        default=False,
        metadata=about(
            "serve requests that ask which experts their tokens went to, for a trainer that replays them; steps then "
            "hand the experts out"
        ),
    )
    grammar_backend: GrammarBackend = field(
        default="auto",
        metadata=about(
            "what constrains structured outputs; auto: llguidance where it is installed; none compiles nothing for "
            "them and refuses them",
            near_aliases={
                "guided_decoding_backend": "the only backend is llguidance, which vLLM calls guidance",
            },
            spellings={"guidance": "llguidance"},
        ),
    )
    disable_jump_forward: bool = field(
        default=False,
        metadata=about("draw every token of structured outputs in a step of its own, also those that a grammar forces"),
    )
    compilation_cache_dir: str | None = field(
        default=None,
        metadata=about(
            "folder that keeps compiled programs between starts; default: of a server "
            "~/.cache/tokenspeed_jax/compiled, in other programs what JAX is set to; 'off' sets nothing"
        ),
    )
    warmup: bool = field(
        default=True, metadata=about("compile every bucket at start; without it a bucket compiles on first use")
    )
    disable_progress_bars: bool = field(default=False, metadata=about("print no progress bars"))

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("model must be a non-empty string", field="model")
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "prefix_granularity",
            "checkpoint_granularity",
            "kernel_page_size",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}", field=name)
        if self.compilation_cache_dir == "":
            raise ConfigError("compilation_cache_dir must not be empty", field="compilation_cache_dir")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer in [0, 2**63), got {self.seed!r}", field="seed")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization!r}",
                field="gpu_memory_utilization",
            )
        for name, allowed in (
            ("dtype", get_args(DType)),
            ("attention_implementation", ("auto", "mosaic", "xla")),
            ("grammar_backend", get_args(GrammarBackend)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}", field=name)
        self._check_kv_events()
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{item.name} must be true or false, got {value!r}", field=item.name)
        self._check_jump_forward()

    def _check_jump_forward(self) -> None:
        if self.disable_jump_forward and self.grammar_backend == "none":
            raise ConfigError(
                "disable_jump_forward has no effect with grammar_backend none", field="disable_jump_forward"
            )

    def _check_kv_events(self) -> None:
        events = self.kv_events_config
        if events is None:
            return
        if not isinstance(events, KVEventsConfig):
            raise ConfigError(f"kv_events_config must be a KVEventsConfig, got {events!r}", field="kv_events_config")
        if events.enable_kv_cache_events and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config has no effect without enable_prefix_caching", field="kv_events_config")
