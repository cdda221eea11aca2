"""Nothing of a request outlives it: not memory, nor a handle, nor a thread, nor a block or slot of the engine."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ADMIN_KEY, TINY
from .server_process import ServerProcess
from .soak import Resources, Soak
from .test_structured_output import TEMPLATE

WARM_UP, REQUESTS = 2_000, 18_000
"""The warm-up is as large as what fills up once: allocator pools, threads of the pool, caches with a bound."""

NOISE = 24 << 20
"""Bytes by which the resident set of an idle server differs from one look to the next: arenas of the allocator."""
BYTES_PER_REQUEST = 512
"""A request that leaks keeps its prompt, its parameters and its choices, several kilobytes; a look at the mean of many
requests tells less than that from noise."""
MOST_THREADS = 4
"""Workers of a pool that is not full yet when the warm-up ends."""


def assert_flat(before: Resources, after: Resources, requests: int) -> None:
    assert after.files <= before.files, (before, after)
    assert after.threads <= before.threads + MOST_THREADS, (before, after)
    assert after.rss - before.rss <= NOISE + BYTES_PER_REQUEST * requests, (before, after)


def test_a_short_soak_leaves_nothing_behind(server: ServerProcess) -> None:
    soak = Soak(server, tools=False)
    soak.run(60)
    soak.check_idle()
    before = soak.resources()
    soak.run(180)
    soak.check_idle()
    assert_flat(before, soak.resources(), 180)
    assert server.metric("tokenspeed:compilations_after_warmup_total") == 0
    assert len(soak.outcomes) >= 7, soak.outcomes


@pytest.fixture
def calling_server(tmp_path: Path, small_options: list[str]) -> Iterator[ServerProcess]:
    """A warm server that takes tools."""
    folder = Path(shutil.copytree(TINY / "llama", tmp_path / "llama"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    options = ["--model", str(folder), "--served-model-name=tiny", *small_options, "--admin-api-key", ADMIN_KEY]
    with ServerProcess([*options, "--enable-auto-tool-choice", "--tool-call-parser=hermes"]) as server:
        yield server


@pytest.mark.long
def test_twenty_thousand_requests_leave_nothing_behind(calling_server: ServerProcess) -> None:
    soak = Soak(calling_server, tools=True)
    soak.run(WARM_UP)
    soak.check_idle()
    looks = [soak.resources()]
    print(looks[0], flush=True)
    for _ in range(6):
        soak.run(REQUESTS // 6)
        soak.check_idle()
        looks.append(soak.resources())
        print(sum(soak.outcomes.values()), looks[-1], flush=True)
    print(soak.outcomes)
    assert_flat(looks[0], looks[-1], REQUESTS)
    assert calling_server.metric("tokenspeed:compilations_after_warmup_total") == 0
    assert calling_server.stop() == 0
    assert "Traceback" not in "".join(calling_server.output)
