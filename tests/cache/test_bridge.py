"""The bridge: what of a declaration reaches the scheduler, and the scheduler accepts it."""

import dataclasses

import pytest

from tokenspeed_jax.cache.bridge import cache_group_configs, scheduler_config, whole_state_blocks
from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.spec import CacheGroupSpec
from tokenspeed_jax.scheduler import (
    CacheGroupFamily,
    CacheRetention,
    CacheTransferPolicy,
    Scheduler,
    SchedulerConfig,
)

FULL = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=16, entry_stride_tokens=4, shard_count=2)
SLIDING = CacheGroupSpec(
    "sliding", "history", "sliding_window", True, rows_per_page=32, entry_stride_tokens=1,
    sliding_window_tokens=100, transfer_policy="full_suffix",
)  # fmt: skip
STATE = CacheGroupSpec(
    "state", "state", "full_history", False, checkpoint_granularity=64, transfer_policy="latest_snapshot"
)
LIMITS = SchedulerLimits(
    "Fused",
    max_live_requests=8,
    max_scheduled_tokens=256,
    max_context_len=512,
    decode_input_tokens=2,
    overlap_schedule_depth=1,
    disable_prefix_cache=True,
)


def test_every_boundary_field_comes_from_its_owner() -> None:
    packing = {"full": 6, "sliding": 2, "state": 1}
    counts = {"full": 61, "sliding": 21, "state": 11}
    full, sliding, state = cache_group_configs((FULL, SLIDING, STATE), packing, counts)
    assert [c.group_id for c in (full, sliding, state)] == ["full", "sliding", "state"]
    assert [c.block_granularity for c in (full, sliding, state)] == [64, 32, 64]
    assert [c.total_pages for c in (full, sliding, state)] == [61, 21, 11]
    assert [c.cache_blocks_per_lcm_block for c in (full, sliding, state)] == [6, 2, 1]
    assert [c.shard_count for c in (full, sliding, state)] == [2, 1, 1]
    assert [c.replayable for c in (full, sliding, state)] == [False, True, False]
    assert [c.sliding_window_tokens for c in (full, sliding, state)] == [None, 100, None]
    assert [c.retention for c in (full, sliding, state)] == [
        CacheRetention.FullHistory, CacheRetention.SlidingWindow, CacheRetention.FullHistory,
    ]  # fmt: skip
    assert [c.family for c in (full, sliding, state)] == [
        CacheGroupFamily.History, CacheGroupFamily.History, CacheGroupFamily.State,
    ]  # fmt: skip
    assert [c.transfer_policy for c in (full, sliding, state)] == [
        CacheTransferPolicy.Unspecified, CacheTransferPolicy.FullSuffix, CacheTransferPolicy.LatestSnapshot,
    ]  # fmt: skip


def test_a_pool_being_sized_has_no_pages() -> None:
    assert [c.total_pages for c in cache_group_configs((FULL,), {"full": 2})] == [0]


PLAIN = (
    dataclasses.replace(FULL, shard_count=1),
    dataclasses.replace(SLIDING, replayable=False, transfer_policy=None),
)


def contract() -> CacheRuntimeContract:
    return CacheRuntimeContract(64, 40, 64, PLAIN, {"full": 41, "sliding": 81}, {"full": 1, "sliding": 2})


def test_scheduler_config_carries_the_contract_and_the_limits() -> None:
    config = scheduler_config(contract(), LIMITS, enable_mixed_prefill_decode=True)
    assert (config.prefix_granularity, config.num_device_pages, config.num_host_pages) == (64, 41, 0)
    assert (config.max_scheduled_tokens, config.max_batch_size, config.decode_input_tokens) == (256, 8, 2)
    assert (config.overlap_schedule_depth, config.role) == (1, SchedulerConfig.Role.Fused)
    assert config.disable_prefix_cache
    assert config.disable_l2_cache
    assert config.enable_mixed_prefill_decode
    assert [group.total_pages for group in config.cache_groups] == [41, 81]


def test_the_scheduler_accepts_the_configuration_and_counts_the_same_pages() -> None:
    scheduler = Scheduler(scheduler_config(contract(), LIMITS, enable_mixed_prefill_decode=False))
    assert scheduler.cache_group_total_pages("full") == 41
    assert scheduler.cache_group_total_pages("sliding") == 81
    assert scheduler.cache_group_available_pages("sliding") == 80


def test_a_prefill_worker_has_no_overlap() -> None:
    config = scheduler_config(contract(), dataclasses.replace(LIMITS, role="P"), enable_mixed_prefill_decode=False)
    assert (config.overlap_schedule_depth, config.role) == (0, SchedulerConfig.Role.P)


def test_round_budget_is_whole_state_blocks() -> None:
    other = dataclasses.replace(STATE, group_id="other", checkpoint_granularity=96)
    assert whole_state_blocks((FULL, SLIDING), 1000) == 1000
    assert whole_state_blocks((FULL, STATE, other), 1000) == 960
    with pytest.raises(ConfigError, match="at least 192") as refusal:
        whole_state_blocks((STATE, other), 191)
    assert refusal.value.field == "max_num_batched_tokens"
