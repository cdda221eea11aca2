"""Puts an engine together, in the order in which a mistake costs least: sizes first, then weights, arena, programs."""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.attention.kernel_choice import kernel_families, mosaic_refusals, triton_refusal
from tokenspeed_jax.attention.kernel_page_sizes import history_kernel_page_sizes
from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.cache.binding import LayerBinding, bind_cache_groups
from tokenspeed_jax.cache.bridge import scheduler_config
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.engine.batch import BatchBuilder, BatchLayout
from tokenspeed_jax.engine.buckets import BucketTable
from tokenspeed_jax.engine.cache_sizing import CacheSizing, scheduler_limits
from tokenspeed_jax.engine.compilation_cache import use_compilation_cache
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.grammar_compiler import Grammars, grammars_of
from tokenspeed_jax.engine.jump_forward import JumpForward
from tokenspeed_jax.engine.lifecycle import Lifecycle
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.loop import StepLoop
from tokenspeed_jax.engine.masks import MaskBuilder
from tokenspeed_jax.engine.memory import MemoryReport, arena_budget, device_limit, tree_bytes
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.request_intake import RequestIntake
from tokenspeed_jax.engine.resolved_options import resolved_options
from tokenspeed_jax.engine.scorer import Scorer
from tokenspeed_jax.engine.source import ModelSource
from tokenspeed_jax.engine.start_report import Laps, StartReport
from tokenspeed_jax.engine.stats import StatsCollector
from tokenspeed_jax.engine.step import StepModel, init_device_state
from tokenspeed_jax.engine.weight_store import WeightStore
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.kv_events import open_publisher
from tokenspeed_jax.kv_events.feed import KVEventFeed
from tokenspeed_jax.recipes.base import CacheSetup
from tokenspeed_jax.recipes.report import GroupCapacity

if TYPE_CHECKING:
    from tokenspeed_jax.kv_events.publisher import EventPublisher

_LOG = logging.getLogger("tokenspeed_jax")


@dataclass
class Assembly:
    """The running parts of one engine."""

    source: ModelSource
    limits: EngineLimits
    programs: StepPrograms
    loop: StepLoop
    stats: StatsCollector
    lifecycle: Lifecycle
    intake: RequestIntake
    scorer: Scorer
    grammars: Grammars
    report: MemoryReport
    start: StartReport
    publisher: "EventPublisher | None"

    def free(self) -> None:
        """Drops the arena and the device state, and publishes the last events; the loop must have ended."""
        if self.publisher is not None:
            self.publisher.close()
        for leaf in jax.tree.leaves((self.programs.model.arena.planes, self.programs.device_state)):
            leaf.delete()


def assemble(config: EngineConfig, source: ModelSource) -> Assembly:
    """Sizes, loads, allocates and compiles.

    Raises:
        ConfigError: a configuration that cannot work, before anything is allocated.
        CheckpointError: weights that do not fit the architecture.
    """
    publisher = open_publisher(config.kv_events_config)
    try:
        return _assemble(config, source, publisher)
    except BaseException:
        if publisher is not None:
            publisher.close()
        raise


def _assemble(config: EngineConfig, source: ModelSource, publisher: "EventPublisher | None") -> Assembly:
    device = jax.devices()[0]
    use_compilation_cache(config.compilation_cache_dir)
    if config.enable_return_routed_experts and not source.moe_layers:
        raise ConfigError(
            f"enable_return_routed_experts: no layer of {source.name} has experts", field="enable_return_routed_experts"
        )
    limits = EngineLimits.resolve(
        config,
        model_limit=source.config.max_position_embeddings,
        vocab_size=source.config.vocab_size,
        platform=device.platform,
    )
    grammars = grammars_of(config, source.tokenizer, limits.vocab_size, source.eos_token_ids)
    planner = _CachePlanner(config, source, limits, device, returns_logits=grammars.are_served)
    planner.check_cheap_limits()
    laps = Laps()
    store = WeightStore.of(source.build(), is_shared=source.shares_weights)
    loading = laps.lap()
    limits, setup = planner.plan(store)
    step_model = _step_model(config, source, store, setup, limits, returns_logits=grammars.are_served)
    arena = step_model.arena
    state = init_device_state(limits.max_num_seqs, limits.vocab_size, step_model.router)
    programs = StepPrograms(step_model, store, state, limits.max_model_len)
    buckets = _buckets(limits, device)
    builder = BatchBuilder(buckets, step_model.router)
    planning = laps.lap()
    from_cache = _warm_up(config, programs, [builder.layout(bucket) for bucket in buckets.all()])
    compiling = laps.lap()
    kernels = _choose_kernels(config, source, setup)
    options = resolved_options(
        config,
        source,
        limits,
        setup,
        kernel_page_sizes=kernels.page_sizes,
        mosaic_refusals=kernels.refusals,
        serves_grammars=grammars.are_served,
    )
    start = StartReport(loading, planning, compiling, programs.compilations, from_cache, options)
    report = _report(programs, setup, planner.sizing.groups(limits, setup), device)
    for line in (*report.lines(), *start.lines()):
        _LOG.info("%s", line)
    stats = StatsCollector(
        setup.plan.num_lcm_blocks,
        prefix_caching=config.enable_prefix_caching,
        groups=[spec.group_id for spec in setup.specs],
    )
    scheduler, events = _scheduler(config, limits, arena, publisher)
    loop = StepLoop(
        scheduler,
        programs,
        builder,
        stats,
        overlap_depth=limits.overlap_depth,
        eos_token_ids=source.eos_token_ids,
        kv_events=events,
        masks=_mask_builder(source, limits) if grammars.are_served else None,
        jumps=None
        if config.disable_jump_forward or not grammars.are_served
        else JumpForward(scheduler, programs, stats, source.eos_token_ids),
    )
    lifecycle = Lifecycle(loop, store, arena, device)
    return Assembly(
        source=source,
        limits=limits,
        programs=programs,
        loop=loop,
        stats=stats,
        lifecycle=lifecycle,
        intake=RequestIntake(loop, lifecycle, store, limits, source, grammars, seed=config.seed),
        scorer=Scorer(store, precision=step_model.precision),
        grammars=grammars,
        report=report,
        start=start,
        publisher=publisher,
    )


def _warm_up(config: EngineConfig, programs: StepPrograms, layouts: list[BatchLayout]) -> int:
    """Compiles all steps, unless that is to wait; how many came from the compilation cache."""
    return programs.warm_up(layouts, progress=not config.disable_progress_bars) if config.warmup else 0


def _scheduler(
    config: EngineConfig, limits: EngineLimits, arena: CacheArena, publisher: "EventPublisher | None"
) -> tuple[scheduling.Scheduler, KVEventFeed | None]:
    """The scheduler, and what hands its events to the publisher."""
    settings = scheduler_config(arena.contract, scheduler_limits(config, limits), enable_mixed_prefill_decode=True)
    settings.enable_kv_cache_events = publisher is not None
    scheduler = scheduling.Scheduler(settings)
    if publisher is None:
        return scheduler, None
    publisher.start(arena.contract.group_specs)
    return scheduler, KVEventFeed(scheduler, publisher)


def _mask_builder(source: ModelSource, limits: EngineLimits) -> MaskBuilder | None:
    if source.tokenizer is None:
        return None
    return MaskBuilder(limits.vocab_size, source.tokenizer.token_ids(), source.eos_token_ids)


class _CachePlanner:
    """Finds how large the arena may be, and what fits into it."""

    def __init__(
        self,
        config: EngineConfig,
        source: ModelSource,
        limits: EngineLimits,
        device: jax.Device,
        *,
        returns_logits: bool,
    ) -> None:
        self._config = config
        self._source = source
        self._limits = limits
        self._device = device
        self._returns_logits = returns_logits
        self.sizing = CacheSizing(config, source.config, source.dtype.name, limits)

    def check_cheap_limits(self) -> None:
        """Refuses, before weights are loaded, what cannot fit even without a step's temporaries."""
        reserved = {"weights": self._source.weight_bytes, "device state": self.sizing.state_bytes}
        _, setup = self.sizing.setup(arena_budget(self._config, self._device, reserved=reserved))
        for operation, reason in _choose_kernels(self._config, self._source, setup).refusals.items():
            if self._device.platform == "gpu" and self._config.attention_implementation == "auto":
                _LOG.warning("%s runs in XLA, not in the Mosaic GPU kernel: %s", operation, reason)
        slower = triton_refusal(self._source.config.attention_layers(), self._source.dtype.name)
        if slower and self._device.platform == "gpu" and self._config.attention_implementation == "auto":
            _LOG.info("prefill of the delta rule with a gate a channel does not run in the Triton kernels: %s", slower)

    def plan(self, store: WeightStore) -> tuple[EngineLimits, CacheSetup]:
        """The arena's plan, with the weights on the device."""
        reserved = {"device state": self.sizing.state_bytes}
        if self._config.kv_cache_memory_bytes is None and device_limit(self._device) is not None:
            reserved["workspace"] = self._measure_workspace(store)
        limits, setup = self.sizing.setup(arena_budget(self._config, self._device, reserved=reserved))
        if limits != self._limits:
            before, after = self._limits.max_model_len, limits.max_model_len
            _LOG.warning("max_model_len is lowered from %d to the %d tokens that the arena holds", before, after)
        return limits, setup

    def _measure_workspace(self, store: WeightStore) -> int:
        """Workspace of the costliest step, from its compiled programs over the smallest arena that plans."""
        setup = self.sizing.smallest_setup(parents=64)
        model = _step_model(self._config, self._source, store, setup, self._limits, returns_logits=self._returns_logits)
        state = jax.eval_shape(
            lambda: init_device_state(self._limits.max_num_seqs, self._limits.vocab_size, model.router)
        )
        programs = StepPrograms(model, store, state, self._limits.max_model_len)
        buckets = _buckets(self._limits, self._device)
        builder = BatchBuilder(buckets, model.router)
        return programs.measured_workspace(builder.layout(buckets.all()[0]))


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
    config: EngineConfig,
    source: ModelSource,
    store: WeightStore,
    setup: CacheSetup,
    limits: EngineLimits,
    *,
    returns_logits: bool,
) -> StepModel:
    kernels = _choose_kernels(config, source, setup)
    arena = CacheArena(setup.plan, setup.specs, setup.token_capacity)
    router = CacheGroupRouter(
        arena.contract,
        kernels.page_sizes,
        max_context_len=limits.max_model_len,
        overlap_tokens=scheduler_limits(config, limits).overlap_tokens,
    )
    in_float32_on_gpu = jax.default_backend() == "gpu" and source.dtype.name == "float32"
    implementation = config.attention_implementation
    return StepModel(
        structure=store.structure,
        arena=arena,
        router=router,
        bindings=kernels.bindings,
        attention_implementation=None if implementation == "auto" else implementation,
        precision="highest" if in_float32_on_gpu else None,
        returns_logits=returns_logits,
        returns_expert_ids=config.enable_return_routed_experts,
    )


def _report(
    programs: StepPrograms, setup: CacheSetup, groups: tuple[GroupCapacity, ...], device: jax.Device
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
        prefix_granularity=setup.plan.prefix_granularity,
        token_capacity=setup.token_capacity,
        groups=groups,
    )
