"""The server for trainers over a real engine: weights out of folders, versions, sleep, from outside."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tokenspeed_jax.weights import open_checkpoint

from .conftest import ADMIN_KEY, TINY
from .server_process import ServerProcess
from .test_goldens_over_http import assert_is_golden, goldens
from .test_operations import golden_request

SERVER = ("-m", "tokenspeed_jax.rollout.server")
SERVED = TINY / "llama"


@pytest.fixture(scope="module")
def server(small_options: list[str]) -> Iterator[ServerProcess]:
    options = ["--model", str(SERVED), "--admin-api-key", ADMIN_KEY, "--no-warmup", *small_options]
    with ServerProcess(options, SERVER) as server:
        yield server


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with other weights, and nothing beside them."""
    folder = tmp_path_factory.mktemp("other")
    source = open_checkpoint(str(SERVED)).tensors
    tensors = {name: -source.read(name).astype(np.float32) for name in source.names()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return str(folder)


def generate(server: ServerProcess) -> tuple[list[int], list[float], int]:
    """Ids, log-probabilities, and tokens that came from the prefix cache, of the longest golden prompt."""
    status, reply = server.post("/generate", golden_request(goldens("llama")[-1]))
    assert status == 200, reply
    meta = reply["meta_info"]
    return reply["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], meta["cached_tokens"]


def update(server: ServerProcess, path: str, version: int) -> tuple[int, dict]:
    return server.post("/update_weights", {"path": path, "version": version}, ADMIN_KEY)


def test_weights_come_and_go_and_nothing_cached_survives_them(server: ServerProcess, other: str) -> None:
    before = generate(server)
    assert_is_golden(goldens("llama")[-1], *before[:2])
    assert generate(server)[2] > 0
    status, reply = update(server, other, 3)
    assert (status, reply["version"]) == (200, 3)
    changed = generate(server)
    assert changed[2] == 0
    assert changed[1] != before[1]
    assert update(server, str(SERVED), 4)[0] == 200
    assert generate(server) == before


def test_what_is_wrong_is_refused_and_the_old_weights_are_served(
    server: ServerProcess, other: str, tmp_path: Path
) -> None:
    before = generate(server)
    served = server.post("/update_weights", {"path": other, "version": 0}, ADMIN_KEY)
    assert (served[0], served[1]["error"]["param"]) == (400, "version")
    (tmp_path / "model.safetensors").write_bytes(safetensors.numpy.save({"a": np.zeros(2, np.float32)}))
    for path in (str(tmp_path), str(tmp_path / "absent")):
        status, reply = update(server, path, 10)
        assert (status, reply["error"]["param"]) == (400, "path")
    assert update(server, other, 10_000)[0] == 200
    assert update(server, str(SERVED), 10_000)[0] == 400
    assert update(server, str(SERVED), 10_001)[0] == 200
    assert generate(server)[:2] == before[:2]


def test_a_sleeping_server_refuses_and_wakes_as_it_was(server: ServerProcess) -> None:
    before = generate(server)
    status, slept = server.post("/sleep", {"level": 1}, ADMIN_KEY)
    assert (status, slept["level"]) == (200, 1)
    assert slept["freed_bytes"] > 0
    status, reply = server.post("/generate", golden_request(goldens("llama")[0]))
    assert (status, reply["error"]["code"]) == (503, "engine_not_serving")
    assert server.post("/wake", {}, ADMIN_KEY)[0] == 200
    assert generate(server)[:2] == before[:2]


def test_what_is_paused_goes_on(server: ServerProcess) -> None:
    before = generate(server)
    for mode in ("keep", "drain", "abort"):
        assert server.post("/pause", {"mode": mode}, ADMIN_KEY)[0] == 200
        assert server.post("/resume", {}, ADMIN_KEY)[0] == 200
    assert generate(server)[:2] == before[:2]
