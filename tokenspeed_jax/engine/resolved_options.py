"""What became of the options that leave a choice to the engine, for people who ask how it runs."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.recipes.base import CacheSetup

if TYPE_CHECKING:
    from tokenspeed_jax.engine.source import ModelSource


def resolved_options(
    config: EngineConfig,
    source: "ModelSource",
    limits: EngineLimits,
    setup: CacheSetup,
    *,
    kernel_page_sizes: Mapping[str, int],
    mosaic_refusals: Mapping[str, str],
    serves_grammars: bool,
) -> dict[str, Any]:
    """The value in force of every option of `EngineConfig` whose default depends on something.

    Args:
        kernel_page_sizes: by cache group.
        mosaic_refusals: operations that the Mosaic kernels do not serve, and why.
    """
    state_blocks = {spec.block_granularity for spec in setup.specs if spec.family == "state"}
    attention: str = config.attention_implementation
    if attention == "auto":
        on_gpu = jax.default_backend() == "gpu"
        others = f" ({', '.join(sorted(mosaic_refusals))}: xla)" if mosaic_refusals else ""
        attention = f"mosaic{others}" if on_gpu else "xla"
    return {
        "dtype": source.dtype.name,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "kv_cache_memory_bytes": setup.plan.arena_bytes,
        "prefix_granularity": limits.prefix_granularity,
        "checkpoint_granularity": _common(state_blocks),
        "kernel_page_size": _common(set(kernel_page_sizes.values())),
        "attention_implementation": attention,
        "grammar_backend": "llguidance" if serves_grammars else "none",
        "compilation_cache_dir": jax.config.jax_compilation_cache_dir or "off",
    }


def _common(values: set[int]) -> int | str:
    """The value of all groups, all of their values, or that there is none."""
    if len(values) == 1:
        return next(iter(values))
    return ", ".join(map(str, sorted(values))) or "none"
