"""Engines over the tiny golden checkpoints; each distinct configuration is built once per test session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenspeed_jax import Engine, EngineConfig

from .three_kinds import THREE_KINDS, three_kinds_model

GOLDEN = Path(__file__).parents[1] / "golden"

EngineFactory = Callable[..., Engine]


@pytest.fixture(scope="session")
def tiny_engine() -> Iterator[EngineFactory]:
    """`tiny_engine(family, **options)`: a small float32 engine on the CPU, shared by equal configurations.

    Buckets compile on first use unless `warmup=True`: most tests need few of them.
    """
    engines: dict[EngineConfig, Engine] = {}

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
        if config not in engines:
            own = family == THREE_KINDS
            engines[config] = Engine.from_model(three_kinds_model(), config) if own else Engine(config)
        return engines[config]

    yield make
    for engine in engines.values():
        engine.close()
