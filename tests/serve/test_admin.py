"""Admin routes: absent without their key, closed to every other key, and what each of them does."""

import json
import logging
import threading

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.serve.access import ADMIN_PATHS
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine
from .test_bad_input import refused
from .test_lifecycle import eventually

KEY = "adminßecret"
HEADERS = {"authorization": f"Bearer {KEY}".encode()}
COMPLETION = {"model": "fake/model", "prompt": "abc", "max_tokens": 100}
NATIVE = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 100}}


@pytest.fixture
def admin(engine: FakeEngine):
    config = ServerConfig(admin_api_key=KEY, profiler_dir="/traces")
    with TestClient(create_app(engine, config), raise_server_exceptions=False) as client:
        yield client


def test_the_routes_of_the_key_are_those_that_exist(engine: FakeEngine) -> None:
    app = create_app(engine, ServerConfig(admin_api_key=KEY))
    assert {path for path in ADMIN_PATHS if any(getattr(route, "path", "") == path for route in app.routes)} == set(
        ADMIN_PATHS
    )


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
@pytest.mark.parametrize("api_key", [None, "user"])
def test_without_the_key_the_routes_say_how_to_get_them(engine: FakeEngine, path: str, api_key: str | None) -> None:
    with TestClient(create_app(engine, ServerConfig(api_key=api_key))) as client:
        for headers in ({}, {"authorization": "Bearer user"}, {"authorization": "Bearer None"}):
            error = refused(client.post(path, headers=headers), 404, None)
            assert error["code"] == "admin_disabled"
            assert "--admin-api-key" in error["message"]


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_only_the_admin_key_opens_the_routes_and_nothing_else(engine: FakeEngine, path: str) -> None:
    config = ServerConfig(api_key="user", admin_api_key=KEY, profiler_dir="/traces")
    with TestClient(create_app(engine, config)) as client:
        for headers in ({}, {"authorization": "Bearer user"}, {"authorization": f"Basic {KEY}".encode()}):
            reply = client.post(f"{path}?key={KEY}", json={"abort_all": True}, headers=headers)
            assert refused(reply, 401, None)["code"] == "invalid_api_key"
            assert KEY not in reply.text
        assert client.post("/v1/completions", json=COMPLETION, headers=HEADERS).status_code == 401
        assert client.get("/server_info", headers=HEADERS).status_code == 401
        body = {"abort_all": True} if path == "/abort_request" else {}
        assert client.post(path, json=body, headers=HEADERS).status_code != 401
    assert engine.aborted == []


def test_a_native_request_that_is_aborted_ends_with_what_it_has(admin: TestClient, engine: FakeEngine) -> None:
    engine.allow(3)
    replies: dict[bool, object] = {}

    def post(stream: bool) -> None:
        replies[stream] = admin.post("/generate", json=NATIVE | {"rid": f"r{stream}", "stream": stream})

    threads = [threading.Thread(target=post, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    eventually(lambda: sum(len(sample.token_ids) for sample in engine._samples) == 6)
    assert admin.post("/abort_request", json={"rid": "other"}, headers=HEADERS).json()["num_aborted"] == 0
    assert engine.stats().running == 2
    for stream in (False, True):
        reply = admin.post("/abort_request", json={"rid": f"r{stream}"}, headers=HEADERS)
        assert reply.json() == {"success": True, "num_aborted": 1}
        assert engine.stats().running == (not stream)
    for thread in threads:
        thread.join(30)
    whole = replies[False].json()
    *_, last, done = [block.removeprefix("data: ") for block in replies[True].text.split("\n\n") if block]
    assert done == "[DONE]"
    for reply in (whole, json.loads(last)):
        assert reply["output_ids"] == engine.reply_ids[:3]
        assert reply["meta_info"]["finish_reason"]["type"] == "abort"


def test_one_prompt_of_many_is_aborted_by_its_own_id(admin: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    replies = []
    body = NATIVE | {"input_ids": [[5], [6], [7]], "rid": "many"}
    thread = threading.Thread(target=lambda: replies.append(admin.post("/generate", json=body)))
    thread.start()
    eventually(lambda: engine.stats().running == 3)
    assert admin.post("/abort_request", json={"rid": "many-1"}, headers=HEADERS).json()["num_aborted"] == 1
    assert engine.aborted == ["many-1"]
    engine.allow(10**9)
    thread.join(30)
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in replies[0].json()] == ["stop", "abort", "stop"]


def test_abort_all_ends_every_kind_of_request(admin: TestClient, engine: FakeEngine) -> None:
    engine.allow(2)
    replies = {}

    def post(path: str, body: dict) -> None:
        replies[path] = admin.post(path, json=body)

    bodies = {"/generate": NATIVE, "/v1/completions": COMPLETION}
    threads = [threading.Thread(target=post, args=item) for item in bodies.items()]
    for thread in threads:
        thread.start()
    eventually(lambda: engine.stats().running == 2)
    assert admin.post("/abort_request", json={"abort_all": True}, headers=HEADERS).json()["num_aborted"] == 2
    for thread in threads:
        thread.join(30)
    assert replies["/generate"].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert refused(replies["/v1/completions"], 503, None)["code"] == "request_aborted"
    assert admin.get("/load").json()["server_load"] == 0


@pytest.mark.parametrize("body", [{}, {"rid": "a", "abort_all": True}, {"rid": "", "abort_all": False}, {"rid": None}])
def test_an_abort_names_one_request_or_all(admin: TestClient, body: dict) -> None:
    refused(admin.post("/abort_request", json=body, headers=HEADERS), 400, "rid")


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_unknown_fields_are_refused(admin: TestClient, engine: FakeEngine, path: str) -> None:
    refused(admin.post(path, json={"output_dir": "/x"}, headers=HEADERS), 400, "output_dir")
    assert admin.post(path, content=b"{", headers=HEADERS).status_code == 400
    assert admin.get(path, headers=HEADERS).status_code == 405
    assert engine.profiles == []


def test_a_cache_in_use_is_not_flushed(admin: TestClient, engine: FakeEngine) -> None:
    assert admin.post("/flush_cache", headers=HEADERS).json() == {"success": True}
    engine.cache_is_free = False
    error = refused(admin.post("/flush_cache", headers=HEADERS), 409, None)
    assert error["code"] == "cache_in_use"
    assert "0 samples run" in error["message"]
    engine.die()
    refused(admin.post("/flush_cache", headers=HEADERS), 503, None)


def test_profiles_start_and_stop_in_turn(admin: TestClient, engine: FakeEngine) -> None:
    assert refused(admin.post("/stop_profile", headers=HEADERS), 409, None)["code"] == "profiler_error"
    started = admin.post("/start_profile", json={}, headers=HEADERS).json()
    assert started == {"success": True, "profiler_dir": "/traces"}
    assert refused(admin.post("/start_profile", headers=HEADERS), 409, None)["code"] == "profiler_error"
    assert admin.post("/stop_profile", headers=HEADERS).status_code == 200
    assert engine.profiles == ["/traces", "stop"]


def test_without_a_folder_there_are_no_profiles(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(admin_api_key=KEY))) as client:
        error = refused(client.post("/start_profile", headers=HEADERS), 404, None)
        assert "--profiler-dir" in error["message"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"admin_api_key": ""}, "admin_api_key"),
        ({"admin_api_key": "k", "api_key": "k"}, "admin_api_key"),
        ({"profiler_dir": "/x"}, "profiler_dir"),
        ({"profiler_dir": "", "admin_api_key": "k"}, "profiler_dir"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServerConfig(**options)
    assert error.value.field == field


def test_keys_are_neither_shown_nor_logged(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(api_key="usersecret", admin_api_key=KEY, profiler_dir="/traces")
    user = {"authorization": "Bearer usersecret"}
    with caplog.at_level(logging.DEBUG), TestClient(create_app(engine, config)) as client:
        info = client.get("/server_info", headers=user).text
        for path in sorted(ADMIN_PATHS):
            client.post(path, json={}, headers=HEADERS)
            client.post(path, json={}, headers=user)
    assert "/flush_cache" in caplog.text
    for text in (repr(config), info, caplog.text):
        assert "secret" not in text
        assert "ßecret" not in text
