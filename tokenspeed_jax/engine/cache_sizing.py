"""How the cache of an engine is laid out for a number of bytes; nothing is allocated, and no device is asked."""

import dataclasses

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.cache.bridge import capacity_model
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.sampling_state import sampling_state_bytes
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.registry import ModelConfig
from tokenspeed_jax.recipes.base import CacheSetup, SchedulerLimits
from tokenspeed_jax.recipes.report import GroupCapacity, capacity_report
from tokenspeed_jax.recipes.setup import cache_setup

_ANY_BUDGET = 1 << 40


def scheduler_limits(config: EngineConfig, limits: EngineLimits) -> SchedulerLimits:
    """What the scheduler of this engine may hold at once."""
    return SchedulerLimits(
        role="Fused",
        max_live_requests=limits.max_num_seqs,
        max_scheduled_tokens=limits.max_num_batched_tokens,
        max_context_len=limits.max_model_len,
        decode_input_tokens=1,
        overlap_schedule_depth=limits.overlap_depth,
        disable_prefix_cache=not config.enable_prefix_caching,
    )


class CacheSizing:
    """Plans the cache of one model under one engine's options.

    Args:
        model: configuration of the model.
        kv_dtype: name of the dtype that keys and values are cached in.
        limits: resolved from `config`.

    Attributes:
        state_bytes: of the device state beside the arena: what sampling remembers, and the block tables.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, kv_dtype: str, limits: EngineLimits) -> None:
        self._config = config
        self._model = model
        self._kv_dtype = kv_dtype
        self._limits = limits
        self._smallest = dataclasses.replace(limits, max_model_len=limits.prefix_granularity)
        self.state_bytes = sampling_state_bytes(limits.max_num_seqs, limits.vocab_size) + self._table_bytes()

    def setup(self, budget: int) -> tuple[EngineLimits, CacheSetup]:
        """The plan for a budget in bytes. A context length that the user did not ask for shrinks to what fits.

        Raises:
            ConfigError: one request of the longest context does not fit, or nothing does.
        """
        try:
            return self._limits, self._setup_for(self._limits, budget)
        except ConfigError as error:
            if self._config.max_model_len is not None or error.field != "max_model_len" or not error.limit:
                raise
            limits = dataclasses.replace(self._limits, max_model_len=error.limit)
        return limits, self._setup_for(limits, budget)

    def smallest_setup(self, parents: int) -> CacheSetup:
        """A plan for contexts of one prefix page, with this many parents, the null parent included."""
        layout = self._setup_for(self._smallest, _ANY_BUDGET).plan
        return self._setup_for(self._smallest, parents * layout.lcm_block_bytes)

    def groups(self, limits: EngineLimits, setup: CacheSetup) -> tuple[GroupCapacity, ...]:
        """What each cache group of a plan holds."""
        return capacity_report(
            setup.plan,
            setup.specs,
            max_num_seqs=limits.max_num_seqs,
            per_request_blocks=self._state_blocks_per_request(limits, setup),
        )

    def parents_per_request(self, limits: EngineLimits, setup: CacheSetup) -> int:
        """Parents that one request of the longest context needs when it runs alone."""
        model = self._capacity_model(limits, setup)
        return model.lcm_blocks_needed_for(model.single_request_group_pages(limits.max_model_len))

    def longest_request(self, limits: EngineLimits, setup: CacheSetup) -> int:
        """Tokens of the longest request that could run alone in the arena, the model's own limit aside."""
        return self._capacity_model(limits, setup).max_single_request_tokens(setup.plan.num_lcm_blocks)

    def _setup_for(self, limits: EngineLimits, budget: int) -> CacheSetup:
        return cache_setup(
            self._model.attention_layers(),
            limits=scheduler_limits(self._config, limits),
            prefix_granularity=limits.prefix_granularity,
            kv_dtype=self._kv_dtype,
            budget_bytes=budget,
            checkpoint_granularity=self._config.checkpoint_granularity,
            family=self._model.cache_family,
        )

    def _table_bytes(self) -> int:
        """Of the device's copy of the block tables."""
        tokens = self._limits.max_model_len + scheduler_limits(self._config, self._limits).overlap_tokens
        specs = self._setup_for(self._smallest, _ANY_BUDGET).specs
        columns = sum(-(-tokens // spec.block_granularity) for spec in specs if spec.family == "history")
        return 4 * columns * (self._limits.max_num_seqs + 1)

    def _state_blocks_per_request(self, limits: EngineLimits, setup: CacheSetup) -> dict[str, int]:
        """Blocks of each state group that one request of the longest context holds."""
        pages = self._capacity_model(limits, setup).single_request_group_pages(limits.max_model_len)
        return {spec.group_id: n for spec, n in zip(setup.specs, pages, strict=True) if spec.family == "state"}

    def _capacity_model(self, limits: EngineLimits, setup: CacheSetup) -> scheduling.CapacityModel:
        packing = {group.group_id: group.cache_blocks_per_lcm_block for group in setup.plan.groups}
        return capacity_model(
            setup.specs, packing, setup.plan.prefix_granularity, scheduler_limits(self._config, limits)
        )
