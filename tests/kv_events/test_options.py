"""`--kv-events-config`: vLLM's JSON, strictly read."""

import json
import sys
from pathlib import Path

import pytest

from tokenspeed_jax import ConfigError, EngineConfig, KVEventsConfig
from tokenspeed_jax.kv_events import open_publisher
from tokenspeed_jax.serve.options import parse_options

ON = KVEventsConfig(enable_kv_cache_events=True)


def option(value: object) -> KVEventsConfig | None:
    text = value if isinstance(value, str) else json.dumps(value)
    return parse_options(["--model", "m", "--kv-events-config", text])[0].kv_events_config


def test_vllms_json_is_taken_as_it_is() -> None:
    everything = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "buffer_steps": 100,
        "hwm": 200,
        "max_queue_size": 300,
        "topic": "kv@10.0.0.1@model",
    }
    assert option(everything) == KVEventsConfig(**everything)  # type: ignore[arg-type]
    assert option({"enable_kv_cache_events": True}) == ON
    assert option({"enable_kv_cache_events": False, "publisher": "null"}) == KVEventsConfig(publisher="null")


def test_a_file_of_options_may_hold_it_as_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "o.yaml"
    file.write_text("model: m\nkv-events-config:\n  enable_kv_cache_events: true\n  hwm: 5\n")
    expected = KVEventsConfig(enable_kv_cache_events=True, hwm=5)
    assert parse_options(["--config", str(file)])[0].kv_events_config == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ('{"enable_kv_cache_events": true, "port": 1}', ["'port'", "endpoint"]),
        ('{"enable_kv_cache_events": 1}', ["enable_kv_cache_events", "true or false"]),
        ('{"hwm": 1, "hwm": 2}', ["'hwm'", "twice"]),
        ("[]", ["JSON object"]),
        ("true", ["JSON object"]),
        ('{"enable_kv_cache_events": true, "publisher": "kafka"}', ["publisher", "zmq", "'kafka'"]),
        ('{"enable_kv_cache_events": true, "publisher": "null"}', ["publisher", "enable_kv_cache_events", "on"]),
        ('{"publisher": "zmq"}', ["publisher", "enable_kv_cache_events", "off"]),
        ('{"endpoint": "*:5557"}', ["endpoint", "tcp://HOST:PORT"]),
        ('{"endpoint": "tcp://*"}', ["endpoint", "tcp://HOST:PORT"]),
        ('{"endpoint": "tcp://*:70000"}', ["endpoint", "70000"]),
        ('{"endpoint": null}', ["endpoint", "None"]),
        ('{"replay_endpoint": "tcp://*:5557"}', ["replay_endpoint", "differ"]),
        ('{"hwm": 0}', ["hwm", "[1,", "0"]),
        ('{"buffer_steps": 1e3}', ["buffer_steps", "1000.0"]),
        ('{"max_queue_size": true}', ["max_queue_size", "True"]),
        ('{"topic": 5}', ["topic", "text"]),
        ('{"topic": "\\ud800"}', ["topic", "text"]),
        ('{"event_encoding": "json"}', ["event_encoding", "map, array"]),
    ],
)
def test_mistakes_name_the_key(value: str, says: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        option(value)
    assert end.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(part in last_line for part in ["--kv-events-config", *says]), last_line


def test_events_of_a_cache_that_is_off_are_refused() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(model="m", enable_prefix_caching=False, kv_events_config=ON)
    EngineConfig(model="m", enable_prefix_caching=False, kv_events_config=KVEventsConfig())
    with pytest.raises(ConfigError, match="KVEventsConfig"):
        EngineConfig(model="m", kv_events_config={"hwm": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True), ("tcp://0.0.0.0:5557", True), ("tcp://[::]:5557", True), ("ipc:///tmp/x", True),
        ("inproc://x", True), ("tcp://router:5557", False), ("tcp://10.0.0.1:5557", False),
    ],
)  # fmt: skip
def test_a_named_host_is_connected_to(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint).binds is binds


def test_without_pyzmq_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tokenspeed_jax.kv_events.publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"zmq.*tokenspeed-jax\[kv-events\]"):
        open_publisher(ON)
    assert open_publisher(KVEventsConfig()) is None
    assert open_publisher(None) is None
