"""Engines over the tiny golden checkpoints; the tests of one family in a module share those of equal configuration."""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest

from tokenspeed_jax import Engine, EngineConfig

from ..tiny_sizes import model_config, shared_sizes
from .three_kinds import CONFIG, THREE_KINDS, three_kinds_model

GOLDEN = Path(__file__).parents[1] / "golden"

EngineFactory = Callable[..., Engine]


def of_equal_steps(config: EngineConfig) -> EngineConfig:
    """What two configurations have in common whose steps are the same programs, bucket by bucket.

    The options that are left out say what is scheduled, and so which of the buckets there are.
    """
    return dataclasses.replace(config, max_num_batched_tokens=None, overlap_schedule=True, checkpoint_granularity=None)


@pytest.fixture(scope="module")
def tiny_engine() -> Iterator[EngineFactory]:
    """`tiny_engine(family, **options)`: a small float32 engine on the CPU, shared by equal configurations.

    Engines that differ in their schedule alone share the steps that one of them has compiled: tracing and lowering them
    again costs as much as running them.

    Buckets compile on first use unless `warmup=True`: most tests need few of them. Asking for another family closes the
    engines of the one before: every compiled program holds memory maps, of which a process may have 65,530. So tests of
    many families take them with `parametrize(..., scope="module")`, which runs a family's tests one after another.
    """
    engines: dict[EngineConfig, Engine] = {}

    def close() -> None:
        while engines:
            engines.popitem()[1].close()
        gc.collect()
        jax.clear_caches()

    def make(family: str, **options: object) -> Engine:
        settings = {
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_cache_memory_bytes": 16 << 20,
            "warmup": False,
            "disable_progress_bars": True,
        } | options
        config = EngineConfig(model=str(GOLDEN / "tiny" / family), **settings)  # type: ignore[arg-type]
        if any(other.model != config.model for other in engines):
            close()
        if config not in engines:
            own = family == THREE_KINDS
            engine = Engine.from_model(three_kinds_model(), config) if own else Engine(config)
            alike = (other for key, other in engines.items() if of_equal_steps(key) == of_equal_steps(config))
            if not config.warmup and (first := next(alike, None)) is not None:
                engine._assembly.programs._steps = first._assembly.programs._steps
            engines[config] = engine
        return engines[config]

    yield make
    close()


def of_shared_sizes(tiny_engine: EngineFactory, family: str, **options: object) -> Engine:
    """`tiny_engine` with the sizes that tests of all families share."""
    config = CONFIG if family == THREE_KINDS else model_config(family)
    return tiny_engine(family, **shared_sizes(config), **options)
