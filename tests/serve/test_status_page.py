"""The page's files and `GET /status`: who may read them, what they say, and what they cost the engine."""

import asyncio
import re
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig
from tokenspeed_jax.serve.status_page import history, routes
from tokenspeed_jax.serve.status_page.assets import PAGE_PATHS
from tokenspeed_jax.serve.status_page.history import History
from tokenspeed_jax.serve.status_page.latencies import LatencyCounts, RecentLatencies
from tokenspeed_jax.serve.status_page.pool_picture import MAX_CELLS, pool_picture

from .fake_engine import FakeEngine
from .test_bad_input import refused
from .test_lifecycle import eventually

STATIC = Path(history.__file__).parent / "static"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every poll may look at the engine."""
    monkeypatch.setattr(routes, "_LOOK_SECONDS", 0.0)


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "SAMPLE_SECONDS", 0.02)


# The files ---------------------------------------------------------------------------------------------------------


def test_every_file_is_served_with_a_policy_that_allows_nothing_else(client: TestClient) -> None:
    assert {"/", "/status-page/main.js", "/status-page/style.css", "/status-page/icon.svg"} <= PAGE_PATHS
    for path in PAGE_PATHS:
        reply = client.get(path)
        assert reply.status_code == 200
        policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert client.get("/").headers["content-type"] == "text/html; charset=utf-8"


def test_an_unchanged_file_is_not_sent_again(client: TestClient) -> None:
    tag = client.get("/status-page/main.js").headers["etag"]
    again = client.get("/status-page/main.js", headers={"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/status-page/style.css", headers={"if-none-match": tag}).status_code == 200


def test_the_files_name_no_other_host_and_hold_no_inline_code() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in re.sub(r"^\s*//.*|\s// .*", "", text, flags=re.MULTILINE), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", text)
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"\sstyle=|\son[a-z]+=|<style|<script(?![^>]*\ssrc=)", page)


def test_nothing_beside_the_files_can_be_read(client: TestClient) -> None:
    for name in ("", "../routes.py", "%2e%2e/routes.py", "index.html"):
        assert client.get(f"/status-page/{name}").status_code == 404


# Who may read --------------------------------------------------------------------------------------------------------


def test_the_page_is_open_and_its_figures_need_the_key(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(api_key="k"))) as client:
        for path in PAGE_PATHS:
            assert client.get(path).status_code == 200
        assert refused(client.get("/status"), 401, None)["code"] == "invalid_api_key"
        assert client.get("/status", headers={"authorization": "Bearer k"}).status_code == 200


def test_a_server_without_the_page_has_neither_page_nor_figures(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(disable_status_page=True))) as client:
        for path in (*PAGE_PATHS, "/status"):
            assert client.get(path).status_code == 404
        assert client.get("/health").status_code == 200
    assert engine.looks == []


# What /status says ---------------------------------------------------------------------------------------------------


def test_status_has_figures_requests_and_pool(client: TestClient, engine: FakeEngine) -> None:
    body = {"model": "fake/model", "prompt": "secret words", "max_tokens": 3}
    assert client.post("/v1/completions", json=body).status_code == 200
    status = client.get("/status")
    assert status.headers["cache-control"] == "no-store"
    figures = status.json()
    assert (figures["state"], figures["chat"]) == ("ready", True)
    assert (figures["generation_tokens"], figures["prompt_tokens"]) == (3, 11)
    assert figures["finished"] == {"length": 1}
    assert figures["requests"] == []
    assert figures["pool"] == {
        "parents": 16,
        "parents_per_cell": 1,
        "free": 10,
        "groups": [{"group_id": "layers.full", "in_use": 4, "cached": 2}],
        "cells": [[1, 4], [-1, 2], [0, 10]],
    }


def test_requests_are_listed_in_figures_alone(
    address: tuple[str, int], openai_client, engine: FakeEngine, client: TestClient
) -> None:
    """Whoever sees the page must see no prompt, no reply and no id of others."""
    engine.allow(2)
    stream = openai_client.completions.create(model="fake/model", prompt="secret words", stream=True)
    eventually(lambda: engine._samples and len(engine._samples[0].token_ids) == 2)
    reply = client.get("/status")
    assert reply.json()["requests"] == [
        {"phase": "decode", "age": 2.5, "prompt_tokens": 11, "cached_tokens": 3, "output_tokens": 2, "samples": 1}
    ]
    assert "secret" not in reply.text
    assert "cmpl-" not in reply.text
    stream.close()


@pytest.mark.usefixtures("short_samples")
def test_history_is_sent_once(client: TestClient) -> None:
    eventually(lambda: client.get("/status").json()["history"]["last"] >= 3)
    first = client.get("/status?since=0").json()["history"]
    assert len(first["columns"]["at"]) == first["last"]
    later = client.get(f"/status?since={first['last']}").json()["history"]
    assert len(later["columns"]["at"]) == later["last"] - first["last"]
    assert {len(column) for column in later["columns"].values()} == {later["last"] - first["last"]}


@pytest.mark.parametrize("since", ["-1", "x", "1.5", "", "٣", "9" * 40])
def test_a_sample_number_that_is_none_is_refused(client: TestClient, since: str) -> None:
    assert refused(client.get("/status", params={"since": since}), 400, "since")["code"] == "invalid_value"


def test_a_failed_engine_is_still_described(client: TestClient, engine: FakeEngine) -> None:
    engine.die()
    figures = client.get("/status").json()
    assert (figures["state"], figures["pool"], figures["requests"]) == ("failed", None, [])


# What it costs -------------------------------------------------------------------------------------------------------


def test_many_pages_cost_one_look(client: TestClient, engine: FakeEngine) -> None:
    for _ in range(20):
        assert client.get("/status").json()["pool"] is not None
    assert len(engine.looks) == 1


def test_nobody_looks_at_the_engine_for_nobody(client: TestClient, engine: FakeEngine) -> None:
    client.get("/")
    client.get("/metrics")
    assert engine.looks == []


@pytest.mark.usefixtures("no_pause")
def test_a_long_step_delays_nobody_and_is_asked_once(client: TestClient, engine: FakeEngine) -> None:
    before = client.get("/status").json()
    engine.is_stuck = True
    for _ in range(3):
        later = client.get("/status").json()
        assert later["pool"] == before["pool"]
    assert before["look_age"] < 0.2 < 0.7 < later["look_age"]
    assert len(engine.looks) == 2
    engine.looks[-1].set_exception(routes.EngineClosed("over"))
    eventually(lambda: client.get("/status").json()["pool"] is None)


def test_a_step_that_never_ends_does_not_keep_the_server(engine: FakeEngine) -> None:
    engine.is_stuck = True
    with TestClient(create_app(engine, ServerConfig())) as client:
        assert client.get("/status").json()["pool"] is None

        async def left() -> list[asyncio.Task]:
            return [task for task in asyncio.all_tasks() if "_ask" in repr(task.get_coro())]

        assert client.portal is not None
        assert len(client.portal.call(left)) == 1
    # The task was cancelled with the loop, and with it the question.
    assert engine.looks[0].cancelled()


# Parts ---------------------------------------------------------------------------------------------------------------


def test_a_sample_has_what_happened_in_it() -> None:
    engine = FakeEngine()
    latencies = RecentLatencies()
    record = History(engine, latencies)
    engine.allow(0)
    done: Future[None] = Future()

    def on_delta(delta) -> None:
        if delta.finish_reason:
            done.set_result(None)

    engine.submit([5] * 12, SamplingParams(max_tokens=2), request_id="r", on_delta=on_delta)
    record.take()
    engine.allow(9)
    done.result(30)
    latencies.first_token.add(0.2)
    latencies.between_tokens.add(0.01, 99)
    latencies.between_tokens.add(1.0)
    record.take()
    record.take()
    columns = record.since(0)["columns"]
    engine.close()
    assert [value > 0 for value in columns["prompt_tokens"]] == [True, False, False]
    assert [value > 0 for value in columns["generation_tokens"]] == [False, True, False]
    assert columns["cached_tokens"][0] == pytest.approx(columns["prompt_tokens"][0] / 4)
    assert columns["prefix_hit_share"] == [0.25, None, None]
    assert columns["running"] == [1, 0, 0]
    assert columns["first_token_p50"] == [None, pytest.approx(0.2, rel=0.03), None]
    assert columns["between_tokens_p95"] == [None, pytest.approx(0.01, rel=0.03), None]
    assert columns["step_seconds"] == [None, None, None]


@given(st.lists(st.floats(1e-5, 1e3), min_size=1), st.sampled_from([0.5, 0.95, 1.0]))
def test_quantiles_are_those_of_the_sorted_list(values: list[float], share: float) -> None:
    counts = LatencyCounts()
    for value in values:
        counts.add(value)
    exact = sorted(values)[int(np.ceil(len(values) * share)) - 1]
    assert counts.quantile(share) == pytest.approx(exact, rel=0.031)
    assert counts.take().quantile(share) is not None
    assert counts.quantile(share) is None


def test_a_latency_of_nothing_counts() -> None:
    counts = LatencyCounts()
    counts.add(0.0)
    assert counts.quantile(0.5) == pytest.approx(1e-6, rel=0.031)


@given(st.lists(st.integers(-3, 3), max_size=4 * MAX_CELLS), st.integers(1, 4))
def test_the_picture_counts_every_parent_and_shows_most_of_each_cell(pattern: list[int], repeated: int) -> None:
    uses = np.array(pattern * repeated, np.int32)
    picture = pool_picture(uses, ["a", "b", "c"])
    cells = [use for use, length in picture["cells"] for _ in range(length)]
    per_cell = picture["parents_per_cell"]
    assert len(cells) == -(-len(uses) // per_cell) <= MAX_CELLS
    assert all(before[0] != after[0] for before, after in zip(picture["cells"], picture["cells"][1:], strict=False))
    for place, shown in enumerate(cells):
        there = uses[place * per_cell : (place + 1) * per_cell].tolist()
        assert there.count(shown) == max(there.count(use) for use in there)
    counted = [(group["in_use"], group["cached"]) for group in picture["groups"]]
    assert counted == [((uses == g).sum(), (uses == -g).sum()) for g in (1, 2, 3)]
    assert picture["free"] == (uses == 0).sum()
