"""Priority, cache salts, the count of the queue, and deadlines, on a real engine."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from starlette.testclient import TestClient

from tokenspeed_jax import Engine, InvalidRequest, RequestDelta, SamplingParams
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .conftest import EngineFactory

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
FILLING = dataclasses.replace(LONG, n=15)


@pytest.fixture
def engine(tiny_engine: EngineFactory) -> Engine:
    """16 samples run at a time."""
    return tiny_engine("llama")


def ids(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def test_prefixes_are_shared_within_a_salt_only(engine: Engine) -> None:
    prompt = ids(0, 150)
    cached = [
        engine.generate(prompt, ONE, cache_salt=salt)[0].cached_tokens for salt in ("a", "a", "b", None, None, "b", "a")
    ]
    assert cached == [0, 128, 0, 0, 128, 128, 128]


def test_samples_of_one_request_share_its_salt(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, n=3)
    output = engine.generate(ids(1), params, cache_salt="a", priority=2)[0]
    assert [len(sample.token_ids) for sample in output.samples] == [4, 4, 4]


class Ends:
    """Receives deltas of many requests and notes the order in which they end."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.started = threading.Event()
        self._changed = threading.Condition()

    def push(self, delta: RequestDelta) -> None:
        self.started.set()
        if delta.finish_reason is not None:
            with self._changed:
                self.order.append(delta.request_id)
                self._changed.notify()

    def wait(self, count: int) -> list[str]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) == count, 60)
        return self.order


def test_a_full_queue_is_served_by_priority_and_then_in_order(engine: Engine) -> None:
    ends = Ends()
    engine.submit(ids(2), FILLING, request_id="filling", on_delta=lambda _: None)
    engine.submit(ids(2), LONG, request_id="running", on_delta=ends.push)
    assert ends.started.wait(60)
    for name, priority in (("c", 5), ("b", 0), ("a", -7), ("d", 5), ("e", 2**31 - 1), ("gone", -(2**31))):
        engine.submit(ids(3), ONE, request_id=name, priority=priority, on_delta=ends.push)
    assert engine.num_queued_requests == 6
    engine.abort("gone")
    engine.abort("running")
    # One slot is free now; who ends first has been started first.
    assert ends.wait(7) == ["gone", "running", "a", "b", "c", "d", "e"]
    engine.abort("filling")
    assert engine.num_queued_requests == 0


def test_generate_takes_a_priority_per_prompt_and_refuses_a_wrong_number(engine: Engine) -> None:
    outputs = engine.generate([ids(4), ids(5)], ONE, priority=[1, 0])
    assert [output.prompt_token_ids for output in outputs] == [ids(4), ids(5)]
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([ids(4), ids(5)], ONE, priority=[1])
    assert caught.value.parameter == "priority"


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"priority": 2**31}, "priority"),
        ({"priority": -(2**31) - 1}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "é" * 32_769}, "cache_salt"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"cache_salt": b"a"}, "cache_salt"),
    ],
)
def test_a_wrong_option_is_refused_by_name_and_claims_nothing(engine: Engine, options: dict, parameter: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(ids(6), ONE, request_id="refused", on_delta=lambda _: None, **options)
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)
    ends = Ends()
    engine.submit(ids(6), ONE, request_id="refused", cache_salt="é" * 32_768, on_delta=ends.push)
    ends.wait(1)
    assert engine.num_queued_requests == 0


def test_a_request_past_its_deadline_gives_its_blocks_back(engine: Engine) -> None:
    body = {"model": "llama", "prompt": ids(7), "max_tokens": 480, "ignore_eos": True}
    aborts = engine.stats().finished.get("abort", 0)
    config = ServerConfig(request_timeout=0.05, served_model_name="llama")
    with TestClient(create_app(engine, config)) as client:
        assert client.post("/v1/completions", json=body).status_code == 504
    deadline = time.monotonic() + 30
    while engine.stats().finished.get("abort", 0) == aborts:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)
