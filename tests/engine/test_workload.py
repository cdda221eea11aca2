"""A long random workload compiles nothing, leaks nothing, and never writes the null parent."""

import threading

import jax
import numpy as np
import pytest

from tokenspeed_jax import RequestDelta, SamplingParams

from .conftest import EngineFactory, of_shared_sizes
from .table_watch import watch_tables

NUM_REQUESTS = 300


class CompilationCount:
    """Counts what XLA compiles in this process while it is active."""

    def __init__(self) -> None:
        self.total = 0
        self.active = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: object) -> None:
        del duration
        self.total += self.active and event == "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compilations() -> CompilationCount:
    return CompilationCount()


def random_params(rng: np.random.Generator) -> SamplingParams:
    choices = {
        "temperature": float(rng.choice([0.0, 0.7, 1.3])),
        "top_k": int(rng.choice([0, 5, 50])),
        "top_p": float(rng.choice([1.0, 0.8])),
        "min_p": float(rng.choice([0.0, 0.05])),
        "presence_penalty": float(rng.choice([0.0, 0.5])),
        "repetition_penalty": float(rng.choice([1.0, 1.2])),
        "logit_bias": {7: 5.0} if rng.random() < 0.2 else {},
        "min_tokens": int(rng.choice([0, 3])),
        "top_logprobs": int(rng.choice([0, 4])),
        "n": int(rng.choice([1, 1, 1, 3])),
        "max_tokens": int(rng.integers(3, 40)),
        "seed": int(rng.integers(0, 2**40)),
        "logprobs": True,
    }
    return SamplingParams(**choices)


def test_random_workload(tiny_engine: EngineFactory, compilations: CompilationCount) -> None:
    engine = of_shared_sizes(tiny_engine, "gemma3", max_num_batched_tokens=256, warmup=True)
    arena = engine._assembly.programs.model.arena
    watch_tables(engine)
    rng = np.random.default_rng(0)
    shared = [rng.integers(3, 500, 100).tolist() for _ in range(4)]
    done = threading.Semaphore(0)
    finished: dict[str, list[str]] = {}
    expected = {}

    def sink(delta: RequestDelta) -> None:
        if delta.finish_reason is not None:
            finished.setdefault(delta.request_id, []).append(delta.finish_reason)
            done.release()

    compilations.active = True
    total = 0
    for index in range(NUM_REQUESTS):
        head = shared[int(rng.integers(4))][: int(rng.integers(0, 100))]
        tail = rng.integers(3, 500, int(rng.integers(1, 80))).tolist()
        params = random_params(rng)
        request_id = engine.submit([*head, *tail], params, on_delta=sink)
        expected[request_id] = params.n
        total += params.n
        if index % 17 == 0:
            engine.abort(request_id)
    for _ in range(total):
        assert done.acquire(timeout=300)
    compilations.active = False

    assert {request_id: len(reasons) for request_id, reasons in finished.items()} == expected
    assert compilations.total == 0
    assert engine.stats().compilations_after_warmup == 0
    scheduler = engine._loop._scheduler
    idle = threading.Event()
    engine._loop.call(lambda: (scheduler.next_execution_plan(), idle.set()))
    assert idle.wait(60)
    assert scheduler.available_lcm_blocks() == arena.plan.num_lcm_blocks
    assert scheduler.active_lcm_blocks() == 0
    assert arena.null_parent_is_zero()
