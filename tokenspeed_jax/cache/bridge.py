"""The bridge: folds declared groups into the scheduler's configuration (cache-runtime.md 9).

The one place where a declaration shape (rows x stride, or a checkpoint) becomes a `block_granularity`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.spec import CacheGroupSpec

if TYPE_CHECKING:
    from tokenspeed_jax.scheduler import CacheGroupConfig, CapacityModel, SchedulerConfig


def cache_group_configs(
    specs: Sequence[CacheGroupSpec],
    virtual_packing: Mapping[str, int],
    virtual_block_counts: Mapping[str, int] | None = None,
) -> "list[CacheGroupConfig]":
    """One boundary config per group, in the order of `specs`, which is the dense index of the scheduler.

    Args:
        virtual_packing: blocks per parent times shards, per group.
        virtual_block_counts: block ids per group, the null id included; None while a pool is being sized.
    """
    from tokenspeed_jax.scheduler import CacheGroupConfig, CacheGroupFamily, CacheRetention, CacheTransferPolicy

    families = {"history": CacheGroupFamily.History, "state": CacheGroupFamily.State}
    retentions = {"full_history": CacheRetention.FullHistory, "sliding_window": CacheRetention.SlidingWindow}
    policies = {
        None: CacheTransferPolicy.Unspecified,
        "full_suffix": CacheTransferPolicy.FullSuffix,
        "latest_snapshot": CacheTransferPolicy.LatestSnapshot,
    }
    return [
        CacheGroupConfig(
            group_id=spec.group_id,
            block_granularity=spec.block_granularity,
            total_pages=0 if virtual_block_counts is None else virtual_block_counts[spec.group_id],
            retention=retentions[spec.retention],
            sliding_window_tokens=spec.sliding_window_tokens,
            family=families[spec.family],
            cache_blocks_per_lcm_block=virtual_packing[spec.group_id],
            transfer_policy=policies[spec.transfer_policy],
            shard_count=spec.shard_count,
            replayable=spec.replayable,
        )
        for spec in specs
    ]


def scheduler_config(
    contract: CacheRuntimeContract,
    limits: SchedulerLimits,
    *,
    enable_mixed_prefill_decode: bool,
) -> "SchedulerConfig":
    """The configuration of a scheduler over `contract`, without a host tier.

    Raises:
        ConfigError: the token budget of a round holds no whole state block.
    """
    config = _capacity_config(contract.group_specs, contract.virtual_packing, contract.prefix_granularity, limits)
    config.cache_groups = cache_group_configs(
        contract.group_specs, contract.virtual_packing, contract.virtual_block_counts
    )
    config.num_device_pages = contract.num_lcm_blocks + 1
    config.num_host_pages = 0
    config.disable_l2_cache = True
    config.enable_mixed_prefill_decode = enable_mixed_prefill_decode
    config.dense_block_tables = False  # steps keep a copy of the resident tables
    config.plan_past_max_new_tokens = False  # the engine ends a request there
    return config


def capacity_model(
    specs: Sequence[CacheGroupSpec],
    packing: Mapping[str, int],
    prefix_granularity: int,
    limits: SchedulerLimits,
) -> "CapacityModel":
    """The scheduler's demand model for groups whose pool does not exist yet.

    Args:
        packing: local blocks per parent, per group.
    """
    from tokenspeed_jax.scheduler import CapacityModel

    virtual = {spec.group_id: packing[spec.group_id] * spec.shard_count for spec in specs}
    return CapacityModel(_capacity_config(specs, virtual, prefix_granularity, limits))


def whole_state_blocks(specs: Sequence[CacheGroupSpec], max_scheduled_tokens: int) -> int:
    """`max_scheduled_tokens` floored to a multiple of every state span: one chunk must be able to finish a block."""
    span = math.lcm(*(spec.block_granularity for spec in specs if spec.family == "state"))
    floored = max_scheduled_tokens // span * span
    if floored == 0:
        raise ConfigError(
            f"max_num_batched_tokens {max_scheduled_tokens} is below one state block of {span} tokens: raise it to at "
            f"least {span}",
            field="max_num_batched_tokens",
        )
    return floored


def _capacity_config(
    specs: Sequence[CacheGroupSpec],
    virtual_packing: Mapping[str, int],
    prefix_granularity: int,
    limits: SchedulerLimits,
) -> "SchedulerConfig":
    from tokenspeed_jax.scheduler import SchedulerConfig

    config = SchedulerConfig()
    config.prefix_granularity = prefix_granularity
    config.max_scheduled_tokens = whole_state_blocks(specs, limits.max_scheduled_tokens)
    config.max_batch_size = limits.max_live_requests
    config.decode_input_tokens = limits.decode_input_tokens
    # A prefill worker never decodes, so nothing of its own can be in flight beside a decode step.
    config.overlap_schedule_depth = 0 if limits.role == "P" else limits.overlap_schedule_depth
    config.role = getattr(SchedulerConfig.Role, limits.role)
    config.disable_prefix_cache = limits.disable_prefix_cache
    config.cache_groups = cache_group_configs(specs, virtual_packing)
    return config
