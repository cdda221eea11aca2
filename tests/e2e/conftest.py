"""Servers over golden checkpoints, each started once per session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from ..tiny_sizes import TINY, model_config, shared_sizes
from .server_process import ServerProcess

ADMIN_KEY = "admin-key-of-the-tests"
WARM_FAMILY = "llama"
"""The one server that compiles every step at start; the others compile what their tests need."""

ServerFactory = Callable[[str], ServerProcess]


@pytest.fixture(scope="session")
def local_options(compiled_programs: Path) -> list[str]:
    """Options of a server on a free port that keeps its programs for the session."""
    return ["--port=0", f"--compilation-cache-dir={compiled_programs}", "--disable-progress-bars"]


@pytest.fixture(scope="session")
def small_options(local_options: list[str]) -> list[str]:
    """Options of a small float32 server."""
    return [
        "--dtype=float32", "--max-num-seqs=8", "--max-num-batched-tokens=128", "--kv-cache-memory-bytes=33554432",
        *local_options,
    ]  # fmt: skip


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the servers of the session write their traces."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def tiny_server(small_options: list[str], local_options: list[str], profiles: Path) -> Iterator[ServerFactory]:
    """`tiny_server(family)`: the server of a tiny golden checkpoint.

    All but one have the sizes, and so the programs, of the engines in tests/engine/test_tiny_goldens.py.
    """
    servers: dict[str, ServerProcess] = {}

    def get(family: str) -> ServerProcess:
        if family not in servers:
            options = ["--model", str(TINY / family), "--served-model-name", "tiny"]
            options += ["--admin-api-key", ADMIN_KEY, "--profiler-dir", str(profiles)]
            if family == WARM_FAMILY:
                options += small_options
            else:
                sizes = shared_sizes(model_config(family)) | {"max_num_batched_tokens": 256}
                options += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
                options += ["--no-warmup", *local_options]
            servers[family] = ServerProcess(options)
        return servers[family]

    yield get
    for server in servers.values():
        server.__exit__()


@pytest.fixture(scope="session")
def server(tiny_server: ServerFactory) -> ServerProcess:
    """The server of the tiny Llama."""
    return tiny_server("llama")


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """The real `openai` client of `server`."""
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client
