"""Servers over golden checkpoints, each started once per session."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from .server_process import ServerProcess

TINY = Path(__file__).parents[1] / "golden" / "tiny"

ADMIN_KEY = "admin-key-of-the-tests"
WARM_FAMILY = "llama"
"""The one server that compiles every step at start; the others compile what their tests need."""

ServerFactory = Callable[[str], ServerProcess]


@pytest.fixture(scope="session")
def small_options(compiled_programs: Path) -> list[str]:
    """Options of a small float32 server on a free port."""
    return [
        "--port=0", "--dtype=float32", "--max-num-seqs=8", "--max-num-batched-tokens=128",
        "--kv-cache-memory-bytes=33554432", f"--compilation-cache-dir={compiled_programs}", "--disable-progress-bars",
    ]  # fmt: skip


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the servers of the session write their traces."""
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="session")
def tiny_server(small_options: list[str], profiles: Path) -> Iterator[ServerFactory]:
    """`tiny_server(family)`: the server of a tiny golden checkpoint."""
    servers: dict[str, ServerProcess] = {}

    def get(family: str) -> ServerProcess:
        if family not in servers:
            options = ["--model", str(TINY / family), "--served-model-name", "tiny", *small_options]
            options += ["--admin-api-key", ADMIN_KEY, "--profiler-dir", str(profiles)]
            if family != WARM_FAMILY:
                options.append("--no-warmup")
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
