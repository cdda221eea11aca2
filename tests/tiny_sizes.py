"""How the tiny checkpoints are served where all families are: engines and servers of equal sizes share programs.

Compiling them is nearly all that such tests cost.
"""

import json
from pathlib import Path
from typing import Any

from tokenspeed_jax.models.registry import ModelConfig, resolve_model
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.plan import pack
from tokenspeed_jax.recipes.setup import CACHE_FAMILIES

TINY = Path(__file__).parent / "golden" / "tiny"

BLOCK = 16
MAX_MODEL_LEN = 264
MAX_NUM_SEQS = 16
POOL_REQUESTS = 7
"""Requests of full length that the pool holds while they decode: sixteen shorter ones, but not if these go on."""


def shared_sizes(config: ModelConfig) -> dict[str, Any]:
    """Engine options beside `max_num_batched_tokens`, of which 64 and 256 have the steps of 64 tokens in common."""
    return {
        "dtype": "float32",
        "prefix_granularity": BLOCK,
        "kernel_page_size": BLOCK,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "kv_cache_memory_bytes": pool_bytes(config),
    }


def model_config(family: str) -> ModelConfig:
    """The configuration of a tiny golden checkpoint."""
    return resolve_model(json.loads((TINY / family / "config.json").read_text()))[1]


def pool_bytes(config: ModelConfig) -> int:
    """Arena bytes for `POOL_REQUESTS` requests of full length."""
    recipe = CACHE_FAMILIES[config.cache_family](
        config.attention_layers(),
        kv_dtype="float32",
        prefix_granularity=BLOCK,
        budget_bytes=1 << 30,
        limits=SchedulerLimits(
            "Fused", max_live_requests=MAX_NUM_SEQS, max_scheduled_tokens=BLOCK, max_context_len=MAX_MODEL_LEN
        ),
    )
    groups = recipe.groups()
    specs = tuple(spec for spec, _ in groups)
    layout = pack(groups, BLOCK, recipe.packing(groups), recipe.alignment, recipe.max_padding_fraction)
    model = recipe.capacity_model(layout, specs)
    alone = model.lcm_blocks_needed_for(model.single_request_group_pages(MAX_MODEL_LEN))
    return (1 + alone * POOL_REQUESTS) * layout.lcm_block_bytes
