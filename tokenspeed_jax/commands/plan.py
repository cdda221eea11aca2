"""`tokenspeed-jax plan`: what would fit, from `config.json` alone; no weights are read and no GPU is used."""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import jax
from flax import nnx

from tokenspeed_jax.engine.cache_sizing import CacheSizing
from tokenspeed_jax.engine.config import EngineConfig, about
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.memory import CPU_ARENA_BYTES, arena_share, group_lines, in_gib, tree_bytes
from tokenspeed_jax.engine.source import compute_dtype
from tokenspeed_jax.errors import CheckpointError, ConfigError
from tokenspeed_jax.models.registry import ModelConfig
from tokenspeed_jax.options import CommandLine, Configuration, ParsedOptions
from tokenspeed_jax.recipes.base import CacheSetup
from tokenspeed_jax.weights import CheckpointConfig, model_of, open_config

_WITHOUT_EFFECT = frozenset(
    {
        "seed",
        "kernel_page_size",
        "attention_implementation",
        "grammar_backend",
        "compilation_cache_dir",
        "warmup",
        "disable_progress_bars",
        "kv_events_config",
    }
)
_ONLY_ON_A_GPU = ("jax_memory_fraction", "workspace_gib", "gpu_memory_utilization")


@dataclass(frozen=True)
class PlanConfig:
    """The machine that is planned for. Raises `ConfigError` for a value outside its range."""

    gpu_memory_gib: float | None = field(
        default=None,
        metadata=about(
            "GiB of the GPU; default: the first GPU here, or without one a plan for the CPU", section="machine"
        ),
    )
    jax_memory_fraction: float = field(
        default=0.75, metadata=about("share of the GPU that JAX may allocate: the server's XLA_CLIENT_MEM_FRACTION")
    )
    workspace_gib: float = field(
        default=1.0,
        metadata=about("GiB for the temporaries of a step; a guess, which the server replaces by what it measures"),
    )

    def __post_init__(self) -> None:
        if self.gpu_memory_gib is not None and not 0 < self.gpu_memory_gib < math.inf:
            raise ConfigError(f"gpu_memory_gib must be positive, got {self.gpu_memory_gib}", field="gpu_memory_gib")
        if not 0 < self.jax_memory_fraction <= 1:
            raise ConfigError(
                f"jax_memory_fraction must lie in (0, 1], got {self.jax_memory_fraction}", field="jax_memory_fraction"
            )
        if not 0 <= self.workspace_gib < math.inf:
            raise ConfigError(f"workspace_gib must be at least 0, got {self.workspace_gib}", field="workspace_gib")


@dataclass(frozen=True)
class Plan:
    """What an engine would do with the memory.

    Attributes:
        architecture: as `config.json` has it.
        gpu_bytes: of the whole GPU; None for a plan for the CPU.
        limit: bytes that JAX may allocate; None on a CPU.
    """

    name: str
    architecture: str
    dtype: str
    model: ModelConfig
    gpu_bytes: int | None
    limit: int | None
    weights: int
    device_state: int
    workspace: int
    limits: EngineLimits
    setup: CacheSetup
    sizing: CacheSizing

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        cache = self.setup.plan
        context = self.limits.max_model_len
        yield f"model         {self.name}: {self.architecture}, {self.dtype}"
        if self.gpu_bytes is not None and self.limit is not None:
            yield f"GPU           {in_gib(self.gpu_bytes)}, of which JAX may allocate {in_gib(self.limit)}"
        yield f"weights       {in_gib(self.weights)} ({self.weights} bytes)"
        parents = f"{cache.num_lcm_blocks} parents of {cache.lcm_block_bytes} bytes"
        yield f"cache arena   {in_gib(cache.arena_bytes)} ({parents})"
        yield f"device state  {in_gib(self.device_state)}"
        if self.limit is None:
            yield "workspace     not planned on a CPU, whose memory has no limit here"
        else:
            yield f"workspace     {in_gib(self.workspace)} assumed (--workspace-gib)"
            taken = self.weights + cache.arena_bytes + self.device_state + self.workspace
            yield f"free          {in_gib(self.limit - taken)}"
        yield from group_lines(self.sizing.groups(self.limits, self.setup))
        requests = cache.num_lcm_blocks // self.sizing.parents_per_request(self.limits, self.setup)
        longest = min(self.sizing.longest_request(self.limits, self.setup), self.model.max_position_embeddings)
        yield f"max_model_len {context} of the model's {self.model.max_position_embeddings} tokens"
        yield f"the arena holds {requests} requests of {context} tokens, {requests * context} tokens in all"
        yield f"at most {self.limits.max_num_seqs} requests run at once; one alone may have {longest} tokens"


def run(argv: Sequence[str], prog: str) -> int:
    """Prints the plan.

    Returns:
        The exit code: 0; 1 for a checkpoint that cannot be read or is not served; 2 for an option that is wrong, or a
        configuration that does not fit.
    """
    options = CommandLine(
        prog,
        "Say what would fit, from the checkpoint's config.json alone: no weights are loaded, and no GPU is used.",
        Configuration(PlanConfig),
        Configuration(EngineConfig, omitted=_WITHOUT_EFFECT, positional="model"),
    ).parse(argv)
    gpu_bytes = _gpu_bytes(options.of(PlanConfig))
    if gpu_bytes is None:
        for name in _ONLY_ON_A_GPU:
            if name in options.given:
                options.refuse("has no effect in a plan for the CPU; add --gpu-memory-gib", name)
    jax.config.update("jax_platforms", "cpu")  # JAX would take most of the GPU's memory otherwise
    try:
        lines = list(make_plan(options, gpu_bytes).lines())
    except ConfigError as error:
        options.refuse(str(error), error.field)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def make_plan(options: ParsedOptions, gpu_bytes: int | None) -> Plan:
    """Plans for a GPU with this much memory, or for a CPU.

    Raises:
        ConfigError: the configuration does not fit, or contradicts the model.
        CheckpointError: the checkpoint's configuration cannot be read, or is not served.
    """
    config, machine = options.of(EngineConfig), options.of(PlanConfig)
    checkpoint = open_config(config.model, revision=config.revision, progress=False)
    family, model = model_of(checkpoint)
    platform = "cpu" if gpu_bytes is None else "gpu"
    dtype = compute_dtype(config, checkpoint, platform)
    shapes = nnx.eval_shape(lambda: family.build(model, dtype=dtype, rngs=nnx.Rngs(0)))
    weights = tree_bytes(nnx.state(shapes))
    limits = EngineLimits.resolve(
        config, model_limit=model.max_position_embeddings, vocab_size=model.vocab_size, platform=platform
    )
    sizing = CacheSizing(config, model, dtype.name, limits)
    limit = None if gpu_bytes is None else int(gpu_bytes * machine.jax_memory_fraction)
    workspace = 0 if limit is None else int(machine.workspace_gib * 2**30)
    if limit is None:
        budget = config.kv_cache_memory_bytes or CPU_ARENA_BYTES
    else:
        taken = {"weights": weights, "device state": sizing.state_bytes, "workspace": workspace}
        budget = arena_share(config, limit, taken)
    limits, setup = sizing.setup(budget)
    return Plan(
        name=config.model,
        architecture=_architecture(checkpoint),
        dtype=dtype.name,
        model=model,
        gpu_bytes=gpu_bytes,
        limit=limit,
        weights=weights,
        device_state=sizing.state_bytes,
        workspace=workspace,
        limits=limits,
        setup=setup,
        sizing=sizing,
    )


def _architecture(checkpoint: CheckpointConfig) -> str:
    return ", ".join(checkpoint.hf_config["architectures"])


def _gpu_bytes(machine: PlanConfig) -> int | None:
    """Of the GPU that is planned for; None for a plan for the CPU."""
    if machine.gpu_memory_gib is not None:
        return int(machine.gpu_memory_gib * 2**30)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return int(done.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
