"""Puts an engine together, in the order in which a mistake costs least: sizes first, then weights, arena, programs."""

import dataclasses
import logging
from dataclasses import dataclass

import jax

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.attention.kernel_choice import kernel_families, mosaic_refusals
from tokenspeed_jax.attention.kernel_page_sizes import history_kernel_page_sizes
from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.cache.binding import LayerBinding, bind_cache_groups
from tokenspeed_jax.cache.bridge import capacity_model, scheduler_config
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.engine.batch import BatchBuilder
from tokenspeed_jax.engine.buckets import BucketTable
from tokenspeed_jax.engine.compilation_cache import use_compilation_cache
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.loop import StepLoop
from tokenspeed_jax.engine.memory import MemoryReport, arena_budget, device_limit, tree_bytes
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.sampling_state import sampling_state_bytes
from tokenspeed_jax.engine.scorer import Scorer
from tokenspeed_jax.engine.source import ModelSource
from tokenspeed_jax.engine.split_model import SplitModel
from tokenspeed_jax.engine.start_report import Laps, StartReport
from tokenspeed_jax.engine.stats import StatsCollector
from tokenspeed_jax.engine.step import StepModel, init_device_state
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.base import CacheSetup, SchedulerLimits
from tokenspeed_jax.recipes.report import capacity_report
from tokenspeed_jax.recipes.setup import cache_setup

_LOG = logging.getLogger("tokenspeed_jax")


@dataclass
class Assembly:
    """The running parts of one engine."""

    source: ModelSource
    limits: EngineLimits
    programs: StepPrograms
    loop: StepLoop
    stats: StatsCollector
    scorer: Scorer
    report: MemoryReport
    start: StartReport

    def free(self) -> None:
        """Drops the arena and the device state; the loop must have ended."""
        for leaf in jax.tree.leaves((self.programs.model.arena.planes, self.programs.device_state)):
            leaf.delete()


def assemble(config: EngineConfig, source: ModelSource) -> Assembly:
    """Sizes, loads, allocates and compiles.

    Raises:
        ConfigError: a configuration that cannot work, before anything is allocated.
        CheckpointError: weights that do not fit the architecture.
    """
    device = jax.devices()[0]
    use_compilation_cache(config.compilation_cache_dir)
    limits = EngineLimits.resolve(
        config,
        model_limit=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        platform=device.platform,
    )
    planner = _CachePlanner(config, source, limits, device)
    planner.check_cheap_limits()
    laps = Laps()
    model = SplitModel.of(source.build())
    loading = laps.lap()
    limits, setup = planner.plan(model)

    step_model = _step_model(config, source, model, setup, limits)
    arena = step_model.arena
    state = init_device_state(limits.max_num_seqs, limits.vocab_size, step_model.router)
    programs = StepPrograms(step_model, model.weights, state, limits.max_model_len)
    buckets = _buckets(limits, device)
    builder = BatchBuilder(buckets, step_model.router)
    planning, from_cache = laps.lap(), 0
    if config.warmup:
        layouts = [builder.layout(bucket) for bucket in buckets.all()]
        from_cache = programs.warm_up(layouts, progress=not config.disable_progress_bars)
    start = StartReport(loading, planning, laps.lap(), programs.compilations, from_cache)
    report = _report(config, programs, setup, limits, device)
    for line in (*report.lines(), *start.lines()):
        _LOG.info("%s", line)
    stats = StatsCollector(setup.plan.num_lcm_blocks, prefix_caching=config.enable_prefix_caching)
    scheduler = scheduling.Scheduler(
        scheduler_config(arena.contract, _scheduler_limits(config, limits), enable_mixed_prefill_decode=True)
    )
    loop = StepLoop(
        scheduler,
        programs,
        builder,
        stats,
        overlap_depth=limits.overlap_depth,
        eos_token_ids=source.eos_token_ids,
    )
    scorer = Scorer(model, precision=step_model.precision)
    return Assembly(source, limits, programs, loop, stats, scorer, report, start)


class _CachePlanner:
    """Finds how large the arena may be, and what fits into it."""

    def __init__(self, config: EngineConfig, source: ModelSource, limits: EngineLimits, device: jax.Device) -> None:
        self._config = config
        self._source = source
        self._limits = limits
        self._device = device
        self._smallest = dataclasses.replace(limits, max_model_len=limits.prefix_granularity)
        self._state_bytes = sampling_state_bytes(limits.max_num_seqs, limits.vocab_size) + self._table_bytes()

    def check_cheap_limits(self) -> None:
        """Refuses, before weights are loaded, what cannot fit even without a step's temporaries."""
        reserved = {"weights": self._source.weight_bytes, "device state": self._state_bytes}
        _, setup = self._setup(arena_budget(self._config, self._device, reserved=reserved))
        for operation, reason in _choose_kernels(self._config, self._source, setup).refusals.items():
            if self._device.platform == "gpu" and self._config.attention_implementation == "auto":
                _LOG.warning("%s runs in XLA, not in the Mosaic GPU kernel: %s", operation, reason)

    def plan(self, model: SplitModel) -> tuple[EngineLimits, CacheSetup]:
        """The arena's plan, with the weights on the device."""
        reserved = {"device state": self._state_bytes}
        if self._config.kv_cache_memory_bytes is None and device_limit(self._device) is not None:
            reserved["workspace"] = self._measure_workspace(model)
        limits, setup = self._setup(arena_budget(self._config, self._device, reserved=reserved))
        if limits != self._limits:
            before, after = self._limits.max_model_len, limits.max_model_len
            _LOG.warning("max_model_len is lowered from %d to the %d tokens that the arena holds", before, after)
        return limits, setup

    def _setup(self, budget: int) -> tuple[EngineLimits, CacheSetup]:
        """Plans for a budget. A context length that the user did not ask for shrinks to what fits."""
        try:
            return self._limits, self._plan_for(self._limits, budget)
        except ConfigError as error:
            if self._config.max_model_len is not None or error.field != "max_model_len" or not error.limit:
                raise
            limits = dataclasses.replace(self._limits, max_model_len=error.limit)
        return limits, self._plan_for(limits, budget)

    def _plan_for(self, limits: EngineLimits, budget: int) -> CacheSetup:
        return cache_setup(
            self._source.config.attention_layers(),
            limits=_scheduler_limits(self._config, limits),
            prefix_granularity=limits.prefix_granularity,
            kv_dtype=self._source.dtype.name,
            budget_bytes=budget,
            checkpoint_granularity=self._config.checkpoint_granularity,
            family=self._source.config.cache_family,
        )

    def _table_bytes(self) -> int:
        """Of the device's copy of the block tables."""
        tokens = self._limits.max_model_len + _scheduler_limits(self._config, self._limits).overlap_tokens
        specs = self._plan_for(self._smallest, 1 << 40).specs
        columns = sum(-(-tokens // spec.block_granularity) for spec in specs if spec.family == "history")
        return 4 * columns * (self._limits.max_num_seqs + 1)

    def _measure_workspace(self, split: SplitModel) -> int:
        """Temporaries of the costliest step, from its compiled program over the smallest arena that plans."""
        budget = 64 * self._plan_for(self._smallest, 1 << 40).plan.lcm_block_bytes
        setup = self._plan_for(self._smallest, budget)
        model = _step_model(self._config, self._source, split, setup, self._limits)
        state = jax.eval_shape(
            lambda: init_device_state(self._limits.max_num_seqs, self._limits.vocab_size, model.router)
        )
        programs = StepPrograms(model, split.weights, state, self._limits.max_model_len)
        buckets = _buckets(self._limits, self._device)
        builder = BatchBuilder(buckets, model.router)
        compiled = programs.compiled(builder.layout(buckets.all()[0]))
        return compiled.memory_analysis().temp_size_in_bytes


def _buckets(limits: EngineLimits, device: jax.Device) -> BucketTable:
    return BucketTable.for_limits(limits.max_num_seqs, limits.max_num_batched_tokens, device.platform)


@dataclass(frozen=True)
class _KernelChoice:
    """Which pages and kernels the layers use, and why some of them not the Mosaic ones."""

    page_sizes: dict[str, int]
    bindings: tuple[LayerBinding, ...]
    refusals: dict[str, str]


def _choose_kernels(config: EngineConfig, source: ModelSource, setup: CacheSetup) -> _KernelChoice:
    """Binds the layers to their caches. `ConfigError` for a page size or an implementation that cannot serve them."""
    layers = source.config.attention_layers()
    bindings = bind_cache_groups(layers, setup.plan, setup.specs)
    page_sizes = history_kernel_page_sizes(setup.specs, kernel_families(layers, bindings), config.kernel_page_size)
    refusals = mosaic_refusals(layers, bindings, page_sizes, source.dtype.name)
    if refusals and config.attention_implementation == "mosaic":
        raise ConfigError(
            f"attention_implementation mosaic cannot serve this model: {next(iter(refusals.values()))}",
            field="attention_implementation",
        )
    return _KernelChoice(page_sizes, bindings, refusals)


def _step_model(
    config: EngineConfig, source: ModelSource, model: SplitModel, setup: CacheSetup, limits: EngineLimits
) -> StepModel:
    kernels = _choose_kernels(config, source, setup)
    arena = CacheArena(setup.plan, setup.specs, setup.token_capacity)
    router = CacheGroupRouter(
        arena.contract,
        kernels.page_sizes,
        max_context_len=limits.max_model_len,
        overlap_tokens=_scheduler_limits(config, limits).overlap_tokens,
    )
    in_float32_on_gpu = jax.default_backend() == "gpu" and source.dtype.name == "float32"
    implementation = config.attention_implementation
    return StepModel(
        structure=model.structure,
        arena=arena,
        router=router,
        bindings=kernels.bindings,
        attention_implementation=None if implementation == "auto" else implementation,
        precision="highest" if in_float32_on_gpu else None,
    )


def _scheduler_limits(config: EngineConfig, limits: EngineLimits) -> SchedulerLimits:
    return SchedulerLimits(
        role="Fused",
        max_live_requests=limits.max_num_seqs,
        max_scheduled_tokens=limits.max_num_batched_tokens,
        max_context_len=limits.max_model_len,
        decode_input_tokens=1,
        overlap_schedule_depth=limits.overlap_depth,
        disable_prefix_cache=not config.enable_prefix_caching,
    )


def _report(
    config: EngineConfig, programs: StepPrograms, setup: CacheSetup, limits: EngineLimits, device: jax.Device
) -> MemoryReport:
    limit = device_limit(device)
    free = None
    if limit is not None:
        free = limit - (device.memory_stats() or {}).get("bytes_in_use", 0) - programs.workspace_bytes
    return MemoryReport(
        weights=tree_bytes(programs.weights),
        arena=setup.plan.arena_bytes,
        device_state=tree_bytes(programs.device_state),
        workspace=programs.workspace_bytes,
        free=free,
        num_parents=setup.plan.num_lcm_blocks,
        parent_bytes=setup.plan.lcm_block_bytes,
        groups=capacity_report(
            setup.plan,
            setup.specs,
            max_num_seqs=limits.max_num_seqs,
            per_request_blocks=_state_blocks_per_request(config, setup, limits),
        ),
    )


def _state_blocks_per_request(config: EngineConfig, setup: CacheSetup, limits: EngineLimits) -> dict[str, int]:
    """Blocks of each state group that one request of the longest context holds."""
    packing = {group.group_id: group.cache_blocks_per_lcm_block for group in setup.plan.groups}
    model = capacity_model(setup.specs, packing, setup.plan.prefix_granularity, _scheduler_limits(config, limits))
    pages = model.single_request_group_pages(limits.max_model_len)
    return {spec.group_id: n for spec, n in zip(setup.specs, pages, strict=True) if spec.family == "state"}
