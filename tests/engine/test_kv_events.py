"""KV-cache events of a whole engine, as a router on ZeroMQ receives them."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tokenspeed_jax import ConfigError, Engine, KVEventsConfig, SamplingParams

from ..kv_events.msgpack_reader import read
from ..kv_events.router import SECONDS, CacheModel, Subscriber
from .conftest import EngineFactory

PAGE = 16
EVENTS = KVEventsConfig(
    enable_kv_cache_events=True,
    endpoint="inproc://kv-events",
    replay_endpoint="inproc://kv-events-replay",
    max_queue_size=8,
)
SMALL_ARENA = 1 << 18
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tiny_engine: EngineFactory) -> Engine:
    """Room for 15 pages, less than two of the longest requests: what earlier ones left has to go."""
    return tiny_engine(
        "llama",
        prefix_granularity=PAGE,
        kernel_page_size=PAGE,
        max_model_len=128,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=SMALL_ARENA,
        kv_events_config=EVENTS,
    )


class Router:
    """Follows the events, and knows each batch by its number."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.model = CacheModel()
        self.last = -1
        self.events: list[dict[str, Any]] = []

    def catch_up(self) -> None:
        """What was published before it subscribed."""
        for number, payload in self.subscriber.replay(self.last + 1):
            self._apply(number, payload)

    def follow(self, is_there: Callable[[], bool]) -> None:
        """Receives until what is waited for is there."""
        deadline = time.monotonic() + SECONDS
        while not is_there():
            assert time.monotonic() < deadline, self.events
            message = self.subscriber.receive(0.2)
            if message is not None and message[1] > self.last + 1:
                self.catch_up()
            elif message is not None and message[1] == self.last + 1:
                self._apply(message[1], message[2])

    def _apply(self, number: int, payload: bytes) -> None:
        assert number == self.last + 1
        self.last = number
        self.model.apply(payload)
        self.events += read(payload)[1]


@pytest.fixture
def router(engine: Engine) -> Iterator[Router]:
    with Subscriber(EVENTS.endpoint, EVENTS.replay_endpoint) as subscriber:
        router = Router(subscriber)
        router.catch_up()
        router.events.clear()
        yield router


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def generate(engine: Engine, router: Router, prompt: list[int]) -> int:
    """Runs a prompt, waits for its events, and returns how much of it was cached."""
    output = engine.generate(prompt, GREEDY)[0]
    computed = prompt + output.samples[0].token_ids[:-1]
    # One more, since the last token of a prompt is never looked up.
    router.follow(lambda: router.model.hit([*computed, 0]) == len(computed) // PAGE * PAGE)
    return output.cached_tokens


def test_a_prompt_is_stored_once_in_a_chain_with_its_tokens(engine: Engine, router: Router) -> None:
    prompt = ids(1, 3 * PAGE + 5)
    generate(engine, router, prompt)
    stored = [event for event in router.events if event["type"] == "BlockStored"]
    assert [token for event in stored for token in event["token_ids"]] == prompt[: 3 * PAGE]
    names = [name for event in stored for name in event["block_hashes"]]
    assert len(set(names)) == 3
    assert stored[0]["parent_block_hash"] is None
    for before, event in itertools.pairwise(stored):
        assert event["parent_block_hash"] == before["block_hashes"][-1]
    assert {(event["block_size"], event["medium"], event["kv_cache_spec_kind"]) for event in stored} == {
        (PAGE, "GPU", "full_attention")
    }
    router.events.clear()
    assert generate(engine, router, prompt) == 3 * PAGE
    router.catch_up()
    assert router.events == []


def test_a_flush_is_announced_as_a_cleared_cache(engine: Engine, router: Router) -> None:
    prompt = ids(2, 2 * PAGE + 1)
    generate(engine, router, prompt)
    assert engine.flush_cache()
    router.follow(lambda: not router.model.page_of)
    assert generate(engine, router, prompt) == 0
    kinds = [event["type"] for event in router.events]
    assert kinds.count("AllBlocksCleared") == 1
    assert "BlockRemoved" not in kinds
    assert kinds[-1] == "BlockStored"


def test_the_router_knows_every_hit_while_prompts_push_each_other_out(engine: Engine, router: Router) -> None:
    choose = np.random.default_rng(3)
    trunks = [ids(10 + index, 4 * PAGE) for index in range(6)]
    hits = []
    for number in range(48):
        trunk = trunks[choose.integers(len(trunks))][: PAGE * int(choose.integers(1, 5))]
        prompt = trunk + ids(100 + number, int(choose.integers(1, 30)))
        expected = router.model.hit(prompt)
        assert generate(engine, router, prompt) == expected
        hits.append(expected)
    assert any(event["type"] == "BlockRemoved" for event in router.events)
    assert {0, PAGE} < set(hits)


def test_a_publisher_that_hangs_holds_nobody_up_and_nothing_is_lost(
    engine: Engine, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = engine._assembly.publisher
    assert publisher is not None
    publish, go_on = publisher._publish, threading.Event()

    def hang(*arguments: Any) -> None:
        assert go_on.wait(SECONDS)
        publish(*arguments)

    monkeypatch.setattr(publisher, "_publish", hang)
    prompts = [ids(500 + number, 3 * PAGE + 1) for number in range(16)]
    for prompt in prompts:
        engine.generate(prompt, GREEDY)
    assert publisher.is_full
    go_on.set()
    while publisher.is_full:
        time.sleep(0.001)
    assert generate(engine, router, prompts[-1]) == 3 * PAGE
    for prompt in prompts:
        expected = router.model.hit(prompt)
        assert generate(engine, router, prompt) == expected
    assert engine.stats().kv_events_dropped == 0


def test_the_first_batch_says_that_the_cache_is_empty(engine: Engine, router: Router) -> None:
    (number, payload), *_ = router.subscriber.replay(0)
    assert (number, read(payload)[1]) == (0, [{"type": "AllBlocksCleared"}])


def test_an_endpoint_that_another_engine_has_is_refused_before_a_model_is_loaded(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"endpoint inproc://kv-events.*in use"):
        Engine(dataclasses.replace(engine.config))


def test_a_closed_engine_has_freed_its_endpoints_and_its_thread(tiny_engine: EngineFactory, engine: Engine) -> None:
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "tokenspeed-kv-events"]
    with Subscriber(EVENTS.endpoint) as late:
        late.missed.bind(EVENTS.endpoint)
