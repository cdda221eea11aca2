"""`EventPublisher`: sends batches of events from a thread of its own, and again to subscribers that missed some.

A message has three parts: topic, sequence number (8 bytes, big-endian, from 0), payload. Numbers have no gaps: who sees
one has missed something. To get it, a subscriber sends the first number it wants to the replay endpoint, and receives
(number, payload) for each batch from there on that is still kept, then a number of -1 with nothing.
"""

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.kv_events.config import KVEventsConfig
from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.kv_events.wire import AnnouncedGroup, BatchEncoder
from tokenspeed_jax.recipes.spec import CacheGroupSpec

_LOG = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_REPLAY_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 2.0
_LINGER_MILLISECONDS = 500
_MAX_REQUEST_BYTES = 4096
"""Subscriptions and replay requests are a few bytes long; who sends more is disconnected."""


class EventPublisher:
    """Publishes batches in the order in which they come.

    `put`, `is_full` and `close` may be called from any thread. The sockets are opened here, so that a taken port is
    known before a model is loaded, and belong to the thread that `start` begins.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        """Opens the sockets.

        Raises:
            ConfigError: an endpoint is taken, or is no address of this machine.
        """
        self._config = config
        self._topic = config.topic.encode()
        self._batches: queue.SimpleQueue[EventBatch | None] = queue.SimpleQueue()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next_number = 0
        self._abandoned = False
        self._thread: threading.Thread | None = None
        self._replay: zmq.Socket[bytes] | None = None
        # The process's own context, so that a subscriber in it can connect to an inproc endpoint.
        context = zmq.Context.instance()
        self._socket = _open(context, zmq.PUB, "endpoint", config.endpoint, config.hwm, bind=config.binds)
        if config.replay_endpoint is not None:
            # One whole replay may wait for a client; what it asks for beyond that without reading is dropped.
            waiting = config.buffer_steps + 1
            try:
                self._replay = _open(context, zmq.ROUTER, "replay_endpoint", config.replay_endpoint, waiting, bind=True)
            except ConfigError:
                self._close_sockets()
                raise

    @property
    def is_full(self) -> bool:
        """Whether as many batches wait as may."""
        return self._batches.qsize() >= self._config.max_queue_size

    def start(self, groups: Sequence[CacheGroupSpec]) -> None:
        """Begins to publish what was put and what will be.

        Args:
            groups: the model's cache groups, in the scheduler's order.
        """
        encode = BatchEncoder(AnnouncedGroup.of(groups), self._config.event_encoding).encode
        self._thread = threading.Thread(target=self._run, args=(encode,), name="tokenspeed-kv-events", daemon=True)
        self._thread.start()
        _LOG.info("KV-cache events, with the token ids of every prompt, go to %s", _address(self._socket))
        if self._replay is not None:
            _LOG.info("KV-cache events are sent again from %s", _address(self._replay))

    def put(self, batch: EventBatch) -> None:
        """Queues a batch. The caller looks at `is_full` first."""
        self._batches.put(batch)

    def close(self) -> None:
        """Sends what is queued, as far as that takes two seconds, and closes the sockets."""
        thread, self._thread = self._thread, None
        if thread is None:
            self._close_sockets()
            return
        self._batches.put(None)
        thread.join(_CLOSE_SECONDS)
        self._abandoned = True
        thread.join()

    def _run(self, encode: Callable[[EventBatch], bytes]) -> None:
        try:
            for batch in self._waiting_batches():
                try:
                    if batch is not None:
                        self._publish(batch, encode)
                    self._answer_replay_request()
                except Exception:
                    # An engine does not end for want of a router, and a lost batch shows as a gap.
                    _LOG.exception("KV-cache events could not be published")
        finally:
            self._close_sockets()

    def _waiting_batches(self) -> Iterator[EventBatch | None]:
        """Batches as they come, and None when it is time to look for replay requests."""
        timeout = None if self._replay is None else _REPLAY_POLL_SECONDS
        while not self._abandoned:
            try:
                batch = self._batches.get(timeout=timeout)
            except queue.Empty:
                yield None
                continue
            if batch is None:
                return
            yield batch

    def _publish(self, batch: EventBatch, encode: Callable[[EventBatch], bytes]) -> None:
        number = self._next_number
        self._next_number += 1
        payload = encode(batch)
        self._sent.append((number, payload))
        self._socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer_replay_request(self) -> None:
        if self._replay is None or not self._replay.poll(0):
            return
        # vLLM's subscribers put an empty part ahead of the number, and expect one ahead of each answer.
        *envelope, request = self._replay.recv_multipart()
        if len(request) == len(_END):
            first = int.from_bytes(request, "big")
            for number, payload in self._sent:
                if number >= first:
                    self._replay.send_multipart((*envelope, number.to_bytes(8, "big"), payload))
        self._replay.send_multipart((*envelope, _END, b""))

    def _close_sockets(self) -> None:
        for socket, is_bound in ((self._socket, self._config.binds), (self._replay, True)):
            if socket is None:
                continue
            if is_bound:  # at once: what closing begins goes on behind it
                with contextlib.suppress(zmq.ZMQError):
                    socket.unbind(_address(socket))
            socket.close(linger=_LINGER_MILLISECONDS)


def _address(socket: "zmq.Socket[bytes]") -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")


def _open(
    context: "zmq.Context[zmq.Socket[bytes]]", kind: int, name: str, endpoint: str, high_water_mark: int, *, bind: bool
) -> "zmq.Socket[bytes]":
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, high_water_mark)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        verb = "bind" if bind else "connect to"
        raise ConfigError(
            f"kv_events_config: cannot {verb} {name} {endpoint}: {zmq.strerror(error.errno or 0)}",
            field="kv_events_config",
        ) from None
    return socket
