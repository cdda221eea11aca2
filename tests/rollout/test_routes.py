"""The routes for trainers over a scripted engine: what they hand on, what they refuse, and that they need their key."""

import threading
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.errors import CheckpointError, EngineClosed, OutOfDeviceMemory, WeightUpdateError
from tokenspeed_jax.rollout.routes import RolloutRoutes
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from ..serve.test_bad_input import refused
from ..serve.test_lifecycle import eventually
from .fake_trained_engine import FakeTrainedEngine

KEY = "admin"
HEADERS = {"authorization": f"Bearer {KEY}"}
COMPLETION = {"model": "fake/model", "prompt": "abc", "max_tokens": 100}
SLEPT = {"success": True, "bytes_before": 1000, "bytes_after": 400, "freed_bytes": 600}
WOKEN = {"success": True, "bytes_before": 400, "bytes_after": 1000, "seconds": 0.5}
FIGURES = {"success": True, "bytes_moved": 640, "seconds": 0.25, "arrays_kept": 3, "arrays_converted": 2}


class FakeReader:
    """Reads every folder but those that it is told are broken; waits while it is told to."""

    def __init__(self) -> None:
        self.folders: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.may_read = threading.Event()
        self.may_read.set()

    def read(self, folder: str) -> str:
        self.folders.append(folder)
        assert self.may_read.wait(30)
        if folder in self.broken:
            raise self.broken[folder]
        return f"weights of {folder}"


@pytest.fixture
def engine() -> Iterator[FakeTrainedEngine]:
    engine = FakeTrainedEngine()
    yield engine
    engine.close()


@pytest.fixture
def reader() -> FakeReader:
    return FakeReader()


@pytest.fixture
def admin(engine: FakeTrainedEngine, reader: FakeReader) -> Iterator[TestClient]:
    config = ServerConfig(admin_api_key=KEY, api_key="user")
    app = create_app(engine, config, extension=RolloutRoutes(engine, config, reader).extension())
    with TestClient(app, raise_server_exceptions=False, headers=HEADERS) as client:
        yield client


def completion(client: TestClient):
    return client.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer user"})


def test_an_update_reads_the_folder_and_answers_with_what_it_did(admin, engine, reader) -> None:
    body = {"path": "/w/1", "version": 7, "mode": "keep", "check_finite": True}
    assert admin.post("/update_weights", json=body).json() == FIGURES | {"version": 7}
    assert admin.get("/weight_version").json() == {"weight_version": 7}
    assert admin.post("/update_weights", json={"path": "/w/2", "version": 8}).status_code == 200
    assert reader.folders == ["/w/1", "/w/2"]
    assert engine.calls == [
        ("update", "weights of /w/1", 7, "keep", True),
        ("update", "weights of /w/2", 8, "drain", False),
    ]


@pytest.mark.parametrize("version", [0, -1])
def test_a_version_that_is_served_already_is_refused_before_anything_is_read(admin, engine, reader, version) -> None:
    error = refused(admin.post("/update_weights", json={"path": "/w", "version": version}), 400, "version")
    assert "higher than 0" in error["message"]
    assert reader.folders == engine.calls == []


def test_weights_that_do_not_fit_are_named_and_the_old_ones_served(admin, engine, reader) -> None:
    reader.broken["/bad"] = CheckpointError("/bad: tensors do not fit: 1 missing: model.norm.weight")
    error = refused(admin.post("/update_weights", json={"path": "/bad", "version": 1}), 400, "path")
    assert "model.norm.weight" in error["message"]
    engine.refusal = WeightUpdateError("params: model.norm.weight has values that are not finite", parameter="params")
    error = refused(admin.post("/update_weights", json={"path": "/nan", "version": 1}), 400, "path")
    assert error["message"] == "path: model.norm.weight has values that are not finite"
    engine.refusal = OutOfDeviceMemory("out of device memory while weights came in")
    error = refused(admin.post("/update_weights", json={"path": "/large", "version": 1}), 503, None)
    assert error["code"] == "out_of_device_memory"
    assert engine.calls == []
    assert admin.get("/weight_version").json() == {"weight_version": 0}
    assert completion(admin).status_code == 200


def test_one_update_at_a_time(admin, reader) -> None:
    reader.may_read.clear()
    replies = []
    post = lambda: replies.append(admin.post("/update_weights", json={"path": "/slow", "version": 1}))  # noqa: E731
    thread = threading.Thread(target=post)
    thread.start()
    eventually(lambda: reader.folders == ["/slow"])
    error = refused(admin.post("/update_weights", json={"path": "/w", "version": 2}), 409, None)
    assert error["code"] == "update_in_progress"
    # The event loop is free while weights are read.
    assert completion(admin).status_code == 200
    reader.may_read.set()
    thread.join(30)
    assert replies[0].status_code == 200
    assert admin.post("/update_weights", json={"path": "/w", "version": 2}).status_code == 200


def test_sglangs_update_counts_versions_by_itself(admin, engine) -> None:
    route = "/update_weights_from_disk"
    assert admin.post(route, json={"model_path": "/w", "flush_cache": True, "load_format": "auto"}).json() == (
        FIGURES | {"version": 1, "message": "weight version 1 is served"}
    )
    admin.post(route, json={"model_path": "/w", "weight_version": "40", "abort_all_requests": True})
    admin.post("/pause_generation", json={"mode": "in_place"})
    assert admin.post(route, json={"model_path": "/w", "weight_version": 41}).status_code == 200
    assert engine.calls == [
        ("update", "weights of /w", 1, "drain", False),
        ("update", "weights of /w", 40, "abort", False),
        ("pause", "keep"),
        ("update", "weights of /w", 41, "keep", False),
    ]
    for field, value in (("weight_version", 41), ("weight_version", "default"), ("flush_cache", False)):
        refused(admin.post(route, json={"model_path": "/w", field: value}), 400, field)
    refused(admin.post(route, json={"model_path": "/w", "load_format": "dummy"}), 400, "load_format")


@pytest.mark.parametrize(
    ("route", "body", "call"),
    [
        ("/pause", None, "keep"), ("/pause", {"mode": "drain"}, "drain"), ("/pause", {"mode": "abort"}, "abort"),
        ("/pause", {"mode": "wait"}, "drain"), ("/pause?mode=wait", None, "drain"),
        ("/pause_generation", None, "abort"), ("/pause_generation", {"mode": "in_place"}, "keep"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("resume", ["/resume", "/continue_generation"])
def test_pauses_under_every_name(admin, engine, route, body, call, resume) -> None:
    assert admin.post(route, json=body).status_code == 200
    assert admin.get("/is_paused").json() == {"is_paused": True}
    assert admin.post(resume).json() == {"success": True}
    assert admin.get("/is_paused").json() == {"is_paused": False}
    assert engine.calls == [("pause", call), ("resume",)]


@pytest.mark.parametrize(
    ("route", "body", "level", "wake"),
    [
        ("/sleep", None, 1, "/wake"), ("/sleep", {"level": 2}, 2, "/wake"), ("/sleep?level=2", None, 2, "/wake_up"),
        ("/release_memory_occupation", None, 2, "/resume_memory_occupation"),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}, 1, "/resume_memory_occupation"),
    ],
)  # fmt: skip
def test_sleep_under_every_name(admin, engine, route, body, level, wake) -> None:
    assert admin.post(route, json=body).json() == SLEPT | {"level": level}
    assert admin.get("/is_sleeping").json() == {"is_sleeping": True}
    assert refused(completion(admin), 503, None)["code"] == "engine_not_serving"
    assert refused(admin.post(route, json=body), 409, None)["code"] == "engine_state"
    assert (
        refused(admin.post("/update_weights", json={"path": "/w", "version": 1}), 409, None)["code"] == "engine_state"
    )
    assert admin.post(wake).json() == WOKEN
    assert refused(admin.post(wake), 409, None)["code"] == "engine_state"
    assert engine.calls == [("sleep", level), ("wake",)]
    assert completion(admin).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/update_weights", {}, "path"), ("/update_weights", {"path": "/w"}, "version"),
        ("/update_weights", {"path": "/w", "version": "1"}, "version"),
        ("/update_weights", {"path": "/w", "version": 1, "mode": "wait"}, "mode"),
        ("/update_weights", {"path": "/w", "version": 1, "names": []}, "names"),
        ("/pause", {"mode": "stop"}, "mode"), ("/pause?clear_cache=true", None, "clear_cache"),
        ("/pause_generation", {"mode": "retract"}, "mode"), ("/resume", {"mode": "keep"}, "mode"),
        ("/sleep", {"level": 3}, "level"), ("/sleep?level=0", None, "level"), ("/sleep?mode=abort", None, "mode"),
        ("/wake_up?tags=weights", None, "tags"), ("/release_memory_occupation", {"tags": ["weights"]}, "tags"),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, "tags[0]"),
        ("/resume_memory_occupation", {"tags": ["weights"]}, "tags"), ("/sleep?level=1", {"level": 1}, None),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(admin, engine, route, body, field) -> None:
    refused(admin.post(route, json=body), 400, field)
    assert engine.calls == []


def test_a_closed_engine_is_said_to_be_closed(admin, engine) -> None:
    engine.refusal = EngineClosed("gone")
    error = refused(admin.post("/update_weights", json={"path": "/w", "version": 1}), 503, None)
    assert error["code"] == "engine_unavailable"


def test_the_routes_are_behind_the_admin_key_and_described(admin, engine, reader) -> None:
    config = ServerConfig(api_key="user")
    extension = RolloutRoutes(engine, config, reader).extension()
    assert {route.path for route in extension.routes if "POST" in route.methods} == set(extension.bodies)
    with TestClient(create_app(engine, config, extension=extension)) as without_key:
        for route in extension.routes:
            method = "POST" if route.path in extension.bodies else "GET"
            user = {"authorization": "Bearer user"}
            assert refused(admin.request(method, route.path, headers=user), 401, None)["code"] == "invalid_api_key"
            off = refused(without_key.request(method, route.path, headers=user), 404, None)
            assert off["code"] == "admin_disabled"
            described = admin.get("/openapi.json", headers=user).json()["paths"][route.path][method.lower()]
            assert described["security"] == [{"adminKey": []}]
            assert described["summary"].startswith(f"`{method} {route.path}`")
    assert engine.calls == []
    assert reader.folders == []


def test_the_plain_server_has_none_of_them(engine) -> None:
    with TestClient(create_app(engine, ServerConfig(admin_api_key=KEY)), headers=HEADERS) as client:
        assert client.post("/update_weights", json={}).status_code == 404
        assert client.get("/weight_version").json()["error"]["code"] == "not_found"


def test_tokens_say_with_which_weights_they_were_drawn(admin, engine) -> None:
    """Under `keep` a sample may have tokens of several versions."""
    engine.allow(2)
    replies = []
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}, "return_logprob": True}
    user = {"authorization": "Bearer user"}
    thread = threading.Thread(target=lambda: replies.append(admin.post("/generate", json=body, headers=user)))
    thread.start()
    eventually(lambda: engine.delivered == 2)
    assert admin.post("/update_weights", json={"path": "/w", "version": 6, "mode": "keep"}).status_code == 200
    engine.allow(4)
    thread.join(30)
    meta = replies[0].json()["meta_info"]
    assert (meta["weight_version"], meta["output_weight_versions"]) == (6, [0, 0, 6, 6])
