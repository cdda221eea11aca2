"""Checkpoints and golden outputs that tests of several parts use."""

import functools
import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import settings

from tokenspeed_jax.engine.compilation_cache import use_compilation_cache
from tokenspeed_jax.text import Tokenizer
from tokenspeed_jax.weights import open_checkpoint
from tokenspeed_jax.weights.demo import demo_checkpoint

# Of XLA's own threads on the CPU, made at the first use. Pallas simulates each warpgroup of a block as a thread, whose
# callbacks wait for those of the others and hold one of XLA's threads meanwhile. With as many as a small machine has
# cores, all of them may wait for a warpgroup that has none.
os.environ.setdefault("PJRT_NPROC", "8")

# LLVM's first level for the CPU's programs: a sixth less time to compile them, and they run as fast, since products are
# in libraries. Flags that are given come later and win.
if not Path("/proc/driver/nvidia").exists():
    os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=1 {os.environ.get('XLA_FLAGS', '')}".strip()

# Tracing a model makes millions of small objects that live on: Python's default looks through them all again and again.
gc.set_threshold(50_000, 20, 50)


def pytest_collection_finish() -> None:
    """What imports and collecting made lives to the end: the collections after each module need not look through it."""
    gc.collect()
    gc.freeze()


# For the nights: `pytest --hypothesis-profile=long tests/scheduler/test_stateful.py`.
settings.register_profile("long", max_examples=3000, stateful_step_count=300, deadline=None)

GOLDEN = Path(__file__).parent / "golden"


# Tests that compile much and run it once or twice. Optimised programs are what every other folder runs.
COMPILED_QUICKLY = ("examples", "models", "pallas_kernels", "rollout")


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compilation cache of this run, which its worker processes share: modules compile the same programs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled_programs"
    use_compilation_cache(str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _compilations(request: pytest.FixtureRequest) -> Iterator[None]:
    """Says how a module's programs are compiled.

    Drops them with the module: each holds memory maps, of which a process may have 65,530.
    """
    jax.config.update("jax_disable_most_optimizations", request.path.parent.name in COMPILED_QUICKLY)
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[[str], Path]:
    """`tiny_checkpoint(family)`: the folder of a tiny model, see tests/golden/README.md."""
    return lambda family: GOLDEN / "tiny" / family


@pytest.fixture(scope="session")
def tiny_golden() -> Callable[[str], Any]:
    """`tiny_golden(family)`: what transformers computes for it."""
    return functools.cache(lambda family: json.loads((GOLDEN / "tiny" / f"{family}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def real_golden() -> Callable[[str], Any]:
    """`real_golden(name)`: what transformers computes for smollm2-135m or gemma3-270m."""
    return functools.cache(lambda name: json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8")))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, fetched once into the cache folder."""
    return demo_checkpoint("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def gemma3_270m_path() -> Path:
    """The GGUF file of Gemma 3 270M, fetched once into the cache folder."""
    return demo_checkpoint("gemma3-270m", progress=False)


@pytest.fixture(scope="session")
def real_tokenizer(request: pytest.FixtureRequest) -> Callable[[str], Tokenizer]:
    """`real_tokenizer(name)`: the tokenizer of smollm2-135m or gemma3-270m, built once (Gemma's takes seconds)."""
    fixtures = {"smollm2-135m": "smollm2_path", "gemma3-270m": "gemma3_270m_path"}

    @functools.cache
    def build(name: str) -> Tokenizer:
        return open_checkpoint(str(request.getfixturevalue(fixtures[name]))).tokenizer()

    return build
