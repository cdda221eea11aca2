"""What cannot be served is refused at start: one clear line, and the exit code says whose mistake it was."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from .conftest import TINY
from .server_process import START_SECONDS, command


def refused(*options: str) -> tuple[int, str]:
    done = subprocess.run(command(*options), capture_output=True, text=True, timeout=START_SECONDS, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the tiny Llama, to be damaged."""
    return Path(shutil.copytree(TINY / "llama", tmp_path / "llama"))


def test_unknown_option() -> None:
    code, line = refused("--model", "m", "--max-num-sequences", "4")
    assert code == 2
    assert "--max-num-sequences" in line


def test_value_out_of_range() -> None:
    code, line = refused("--model", "m", "--gpu-memory-utilization", "90")
    assert code == 2
    assert "--gpu-memory-utilization" in line
    assert "90" in line


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, line = refused("--model", str(TINY / "llama"), "--port", port)
    assert code == 1
    assert port in line
    assert "in use" in line


@pytest.mark.parametrize(
    ("name", "says"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"), ("tokenizer.json", "tokenizer.json")],
)
def test_checkpoint_without_a_file(checkpoint: Path, name: str, says: str) -> None:
    (checkpoint / name).unlink()
    code, line = refused("--model", str(checkpoint), "--port", "0")
    assert code == 1
    assert says in line


def test_folder_that_does_not_exist(tmp_path: Path) -> None:
    code, line = refused("--model", str(tmp_path / "nothing"), "--port", "0")
    assert code == 1
    assert "nothing" in line


def test_unknown_architecture(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["MarvinForCausalLM"]}))
    code, line = refused("--model", str(checkpoint), "--port", "0")
    assert code == 1
    assert "MarvinForCausalLM" in line


def test_context_longer_than_the_model_has() -> None:
    code, line = refused("--model", str(TINY / "llama"), "--port", "0", "--max-model-len", "4096")
    assert code == 2
    assert "--max-model-len" in line
    assert "2048" in line


def test_cache_that_cannot_hold_one_request() -> None:
    code, line = refused("--model", str(TINY / "llama"), "--port", "0", "--kv-cache-memory-bytes", "1000")
    assert code == 2
    assert "kv" in line.lower()
