"""The command line: generated from the configurations, strict, and clear about mistakes."""

import json
import shlex
import socket
from dataclasses import fields

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.serve import cli
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.options import option_name, parse_options

from .fake_engine import FakeEngine


def test_every_field_of_both_configurations_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for item in (*fields(EngineConfig), *fields(ServerConfig)):
        assert f"{option_name(item.name)} " in text.replace(",", " "), item.name


def test_defaults_are_the_configurations_own() -> None:
    assert parse_options(["--model", "m"]) == (EngineConfig(model="m"), ServerConfig())


def test_values_are_parsed_by_type() -> None:
    engine, server = parse_options(
        shlex.split(
            "--model m --max-model-len 512 --gpu-memory-utilization 0.5 --no-enable-prefix-caching --dtype bfloat16 "
            "--block-size 32 --revision main --port 0 --api-key k --drain-timeout 1.5 --access-log "
            "--request-timeout 60 --max-queued-requests 8"
        )
    )
    assert engine == EngineConfig(
        model="m", max_model_len=512, gpu_memory_utilization=0.5, enable_prefix_caching=False, dtype="bfloat16",
        prefix_granularity=32, revision="main",
    )  # fmt: skip
    assert server == ServerConfig(
        port=0, api_key="k", drain_timeout=1.5, access_log=True, request_timeout=60.0, max_queued_requests=8
    )
    assert parse_options(["--model", "m", "--enable-prefix-caching"])[0].enable_prefix_caching


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], ["--model"]),
        (["--model", "m", "--colour", "red"], ["--colour"]),
        (["--model", "m", "extra"], ["extra"]),
        (["--model", "m", "--max-model", "5"], ["--max-model"]),
        (["--mod", "m"], ["--mod"]),
        (["--model", "m", "--port", "x"], ["--port", "integer", "'x'"]),
        (["--model", "m", "--port", "1.5"], ["--port", "integer", "'1.5'"]),
        (["--model", "m", "--port", "70000"], ["--port", "[0, 65535]", "70000"]),
        (["--model", "m", "--port", "9" * 40], ["--port", "integer"]),
        (["--model", "m", "--max-num-seqs", "0"], ["--max-num-seqs", "positive", "0"]),
        (["--model", "m", "--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "(0, 1]", "1.5"]),
        (["--model", "m", "--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "(0, 1]", "nan"]),
        (["--model", "m", "--gpu-memory-utilization", "half"], ["--gpu-memory-utilization", "number", "'half'"]),
        (["--model", "m", "--dtype", "int4"], ["--dtype", "bfloat16", "'int4'"]),
        (["--model", "m", "--warmup", "yes"], ["yes"]),
        (["--model", "m", "--api-key", ""], ["--api-key", "empty"]),
        (["--model", ""], ["--model", "empty"]),
        (["--model", "m", "--enable-auto-tool-choice"], ["--enable-auto-tool-choice", "tool_call_parser", "hermes"]),
        (["--model", "m", "--tool-call-parser", "hermes"], ["--tool-call-parser", "enable_auto_tool_choice"]),
        (["--model", "m", "--tool-call-parser", "x"], ["--tool-call-parser", "hermes", "'x'"]),
        (["--model", "m", "--reasoning-parser", "x"], ["--reasoning-parser", "qwen3", "'x'"]),
        (
            ["--model", "m", "--enable-auto-tool-choice", "--tool-call-parser", "openai"],
            ["--tool-call-parser", "openai_gptoss"],
        ),
        (["--model", "m", "--drain-timeout", "inf"], ["--drain-timeout", "inf"]),
        (["--model", "m", "--drain-timeout", "-1"], ["--drain-timeout", "-1"]),
        (["--model", "m", "--request-timeout", "0"], ["--request-timeout", "0"]),
        (["--model", "m", "--request-timeout", "nan"], ["--request-timeout", "nan"]),
        (["--model", "m", "--max-queued-requests", "0"], ["--max-queued-requests", "positive", "0"]),
    ],
)
def test_mistakes_exit_with_2_and_name_the_option(
    arguments: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_options(arguments)
    assert end.value.code == 2
    last_line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(part in last_line for part in says), last_line


def test_a_port_in_use_is_said_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["--model", "/nowhere", "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"--port {port}" in error
    assert "in use" in error


def test_a_host_that_is_no_address_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--model", "/nowhere", "--host", "256.0.0.1.invalid"]) == 1
    assert "--host 256.0.0.1.invalid" in capsys.readouterr().err


@pytest.mark.parametrize("has_template", [True, False])
def test_the_announced_command_is_one_that_works(has_template: bool) -> None:
    engine = FakeEngine() if has_template else FakeEngine(template=None)
    config = ServerConfig(port=0, served_model_name="it's mine")
    with cli.bind(config) as listener, TestClient(create_app(engine, config)) as client:
        url, command = cli.announcement(engine, config, listener).splitlines()
        words = shlex.split(command.removeprefix("Try:"))
        assert words[0] == "curl"
        assert words[1].startswith(url.removeprefix("Ready:").strip())
        path = words[1].removeprefix(url.removeprefix("Ready:").strip())
        assert client.post(path, json=json.loads(words[-1])).status_code == 200
    engine.close()
