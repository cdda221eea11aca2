"""The sockets: order and numbers of what is published, what can be asked for again, and who cannot do harm."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.kv_events import KVEventsConfig, open_publisher
from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.kv_events.publisher import EventPublisher

from .msgpack_reader import read
from .router import SECONDS, Subscriber
from .samples import FULL_GROUP, batch_of

_SERIAL = itertools.count()


@pytest.fixture
def config() -> KVEventsConfig:
    name = f"inproc://publisher-{next(_SERIAL)}"
    return KVEventsConfig(enable_kv_cache_events=True, endpoint=name, replay_endpoint=name + "-replay")


@pytest.fixture
def publishers() -> Iterator[list[EventPublisher]]:
    made: list[EventPublisher] = []
    yield made
    for publisher in made:
        publisher.close()


def started(config: KVEventsConfig, publishers: list[EventPublisher]) -> EventPublisher:
    publisher = EventPublisher(config)
    publishers.append(publisher)
    publisher.start([FULL_GROUP])
    return publisher


def marker(number: int) -> EventBatch:
    """A batch that is known by its time."""
    return EventBatch(float(number), cleared=True, events=[])


def join(subscriber: Subscriber, publisher: EventPublisher) -> int:
    """Publishes until a message comes through. Returns its number."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        publisher.put(marker(0))
        message = subscriber.receive(0.05)
        if message is not None:
            while (later := subscriber.receive(0.1)) is not None:
                message = later
            return message[1]
    raise AssertionError("no message came through")


@pytest.mark.parametrize("transport", ["inproc", "ipc", "tcp"])
def test_batches_come_in_order_numbered_and_under_the_topic(
    transport: str, tmp_path: Path, config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    endpoint = {"inproc": config.endpoint, "ipc": f"ipc://{tmp_path}/e", "tcp": "tcp://0.0.0.0:*"}[transport]
    publisher = started(dataclasses.replace(config, endpoint=endpoint, topic="kv@me@model"), publishers)
    if transport == "tcp":
        endpoint = publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "127.0.0.1")
    with Subscriber(endpoint, topic="kv@me") as subscriber:
        last = join(subscriber, publisher)
        for number in range(1, 6):
            publisher.put(marker(number))
        for number in range(1, 6):
            message = subscriber.receive()
            assert message is not None
            assert message[:2] == (b"kv@me@model", last + number)
            assert read(message[2]) == [float(number), [{"type": "AllBlocksCleared"}], 0]


def test_a_connecting_publisher_reaches_a_bound_subscriber(
    config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    with Subscriber(config.endpoint) as subscriber:
        port = subscriber.events.bind_to_random_port("tcp://127.0.0.1")
        config = dataclasses.replace(config, endpoint=f"tcp://127.0.0.1:{port}")
        assert not config.binds
        join(subscriber, started(config, publishers))


def test_a_gap_is_filled_by_a_replay_and_a_slow_subscriber_holds_nobody_up(
    config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    publisher = started(dataclasses.replace(config, hwm=1), publishers)
    with Subscriber(config.endpoint, config.replay_endpoint, hwm=1) as subscriber:
        last = join(subscriber, publisher)
        for number in range(1, 501):
            publisher.put(marker(number))
        while publisher._batches.qsize():
            time.sleep(0.005)
        received = []
        while (message := subscriber.receive(0.2)) is not None:
            received.append(message[1])
        assert received == list(range(last + 1, last + 1 + len(received)))
        assert len(received) < 100
        publisher.put(marker(501))
        message = subscriber.receive()
        assert message is not None
        assert message[1] == last + 501
        missed = subscriber.replay(received[-1] + 1)
        assert [number for number, _ in missed] == list(range(received[-1] + 1, last + 502))
        assert all(read(payload)[0] == number - last for number, payload in missed)
        assert missed[-1][1] == message[2]


def test_what_is_kept_for_replays_is_bounded(config: KVEventsConfig, publishers: list[EventPublisher]) -> None:
    publisher = started(dataclasses.replace(config, buffer_steps=3), publishers)
    for number in range(10):
        publisher.put(marker(number))
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        deadline = time.monotonic() + SECONDS
        while not (kept := subscriber.replay(0)) or kept[-1][0] < 9:
            assert time.monotonic() < deadline
        assert [number for number, _ in kept] == [7, 8, 9]
        assert [number for number, _ in subscriber.replay(9)] == [9]
        assert subscriber.replay(10) == []


def test_a_replay_longer_than_zeromqs_own_limit_is_whole(
    config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    publisher = started(config, publishers)
    for number in range(3000):
        publisher.put(marker(number))
    while publisher._batches.qsize():
        time.sleep(0.005)
    time.sleep(0.1)
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        assert [number for number, _ in subscriber.replay(0)] == list(range(3000))


def test_requests_that_are_none_get_an_end_and_no_more(
    config: KVEventsConfig, publishers: list[EventPublisher], tmp_path: Path
) -> None:
    config = dataclasses.replace(config, replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher = started(config, publishers)
    publisher.put(batch_of([1, 2, 3]))
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        assert [number for number, _ in subscriber.ask((0).to_bytes(8, "big"))] == [0], "without an empty part ahead"
        for request in ([b""], [b"", b"1234567"], [b"", b"123456789"], [b"a", b"b", b"c"], [b"\xff" * 8]):
            assert subscriber.ask(*request) == []
        subscriber.missed.send_multipart([b"", b"x" * 100_000])
        assert not subscriber.missed.poll(200), "who sends that much is disconnected"
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        assert [number for number, _ in subscriber.replay(0)] == [0]


def test_a_batch_that_cannot_be_published_is_a_gap_and_nothing_worse(
    config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    publisher = started(config, publishers)
    publisher.put(EventBatch(0.0, False, None))  # type: ignore[arg-type]
    publisher.put(marker(1))
    with Subscriber(config.endpoint, config.replay_endpoint) as subscriber:
        deadline = time.monotonic() + SECONDS
        while not (kept := subscriber.replay(0)):
            assert time.monotonic() < deadline
        assert [number for number, _ in kept] == [1]


def test_closing_sends_what_is_queued_and_frees_the_endpoints(
    config: KVEventsConfig, publishers: list[EventPublisher]
) -> None:
    publisher = started(config, publishers)
    with Subscriber(config.endpoint) as subscriber:
        last = join(subscriber, publisher)
        for number in range(50):
            publisher.put(marker(number))
        publisher.close()
        numbers = [message[1] for _ in range(50) if (message := subscriber.receive()) is not None]
        assert numbers == list(range(last + 1, last + 51))
    publisher.close()
    started(config, publishers)


def test_a_bounded_number_of_batches_waits(config: KVEventsConfig) -> None:
    publisher = EventPublisher(dataclasses.replace(config, max_queue_size=2))
    publisher.put(marker(0))
    assert not publisher.is_full
    publisher.put(marker(1))
    assert publisher.is_full
    publisher.start([FULL_GROUP])
    deadline = time.monotonic() + SECONDS
    while publisher.is_full:
        assert time.monotonic() < deadline
    publisher.close()


@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_an_endpoint_in_use_is_an_error_that_names_it(name: str, config: KVEventsConfig) -> None:
    with zmq.Context.instance().socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        taken = f"tcp://*:{port}"
        with pytest.raises(ConfigError, match=rf"{name} {taken.replace('*', '[*]')}: .*in use") as refused:
            open_publisher(dataclasses.replace(config, **{name: taken}))
        assert refused.value.field == "kv_events_config"
    publisher = open_publisher(config)
    assert publisher is not None
    publisher.close()
