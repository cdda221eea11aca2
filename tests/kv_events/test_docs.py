"""docs/kv-events.md: its command and its subscriber work as they stand there."""

import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_jax.kv_events import KVEventsConfig
from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.kv_events.publisher import EventPublisher
from tokenspeed_jax.serve.options import parse_options

from .samples import FULL_GROUP

PAGE = (Path(__file__).parents[2] / "docs" / "kv-events.md").read_text(encoding="utf-8")


def test_the_command_is_one_that_the_server_takes() -> None:
    (command,) = re.findall(r"^tokenspeed-jax serve (.*)$", PAGE, re.MULTILINE)
    config = parse_options(shlex.split(command))[0].kv_events_config
    assert config == KVEventsConfig(enable_kv_cache_events=True, replay_endpoint="tcp://*:5558")


def test_the_table_has_every_key_and_its_default() -> None:
    for name, value in vars(KVEventsConfig()).items():
        shown = {None: "(none)?", False: "`false`"}.get(
            value, re.escape(f'`"{value}"`' if isinstance(value, str) else str(value))
        )
        assert re.search(rf"^\| `{name}` \| {shown} ?\|", PAGE, re.MULTILINE), name


def test_the_subscriber_prints_what_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    publisher = EventPublisher(KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://documented"))
    printed: list[tuple[object, ...]] = []

    def show(*values: object) -> None:
        printed.append(values)
        raise StopIteration

    # Connected and subscribed; only then does the publisher send what waits.
    program = program.replace("tcp://127.0.0.1:5557", "inproc://documented").replace(
        "while True:", "begin()\nwhile True:"
    )
    publisher.put(EventBatch(1.0, cleared=True, events=[]))

    def begin() -> None:
        time.sleep(0.05)  # the subscription is on its way
        publisher.start([FULL_GROUP])

    names: dict[str, Any] = {"begin": begin, "print": show}
    try:
        with pytest.raises(StopIteration):
            exec(program, names)
    finally:
        names["socket"].close(linger=0)
        publisher.close()
    assert printed == [(0, "AllBlocksCleared", 0)]
