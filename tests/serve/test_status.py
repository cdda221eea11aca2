"""Readiness, version, configuration and load: what probes and load balancers read."""

import threading

from starlette.testclient import TestClient

import tokenspeed_jax
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine
from .test_bad_input import refused
from .test_lifecycle import eventually


def test_ready_until_the_engine_takes_no_more_requests(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/ready").json() == {"status": "ready"}
    engine.die()
    assert refused(client.get("/ready"), 503, None)["code"] == "engine_unavailable"


def test_a_sleeping_engine_is_well_but_not_ready(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    engine.is_sleeping = True
    assert client.get("/health").json() == {"status": "asleep"}
    for reply in (client.get("/ready"), client.post("/generate", json={"input_ids": [5]})):
        error = refused(reply, 503, None)
        assert (error["code"], "asleep" in error["message"]) == ("engine_not_serving", True)
    engine.is_sleeping, engine.lacks_weights = False, True
    error = refused(client.post("/generate", json={"input_ids": [5]}), 503, None)
    assert (error["code"], error["message"]) == ("engine_not_serving", "the engine has no weights")
    engine.lacks_weights = False
    assert client.post("/generate", json={"input_ids": [5]}).status_code == 200


def test_not_ready_while_the_server_drains(engine: FakeEngine) -> None:
    config = ServerConfig()
    admission = Admission(engine, config.max_queued_requests)
    with TestClient(create_app(engine, config, admission)) as client:
        assert client.get("/ready").status_code == 200
        admission.drain()
        assert refused(client.get("/ready"), 503, None)["code"] == "server_draining"


def test_version_is_the_packages(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": tokenspeed_jax.__version__}


def test_server_info_has_model_configuration_start_and_memory_by_group(engine: FakeEngine) -> None:
    config = ServerConfig(served_model_name="mine", port=0, max_body_bytes=999)
    with TestClient(create_app(engine, config)) as client:
        info = client.get("/server_info").json()
    assert (info["model"], info["served_model_name"], info["max_model_len"]) == ("fake/model", "mine", 256)
    assert info["engine_config"]["model"] == "/models/fake"
    assert info["engine_config"]["max_num_seqs"] == 8
    assert info["server_config"]["max_body_bytes"] == 999
    assert not [name for name in info["server_config"] if "key" in name]
    assert info["memory"]["weights"] == 1000
    assert info["memory"]["free"] is None
    assert (info["start"]["compiling"], info["start"]["programs"], info["start"]["from_cache"]) == (20.0, 12, 3)
    (group,) = info["memory"]["groups"]
    assert (group["group_id"], group["capacity"], group["unit"]) == ("layers.full", 256, "tokens")


def test_load_counts_requests_samples_tokens_and_blocks(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(1)
    body = {"input_ids": [[5], [6]], "sampling_params": {"n": 2}}
    thread = threading.Thread(target=client.post, args=("/generate",), kwargs={"json": body})
    thread.start()
    eventually(lambda: engine.stats().running == 4)
    assert client.get("/load").json() == {
        "server_load": 1,
        "num_reqs": 4,
        "num_running_reqs": 4,
        "num_waiting_reqs": 0,
        "num_tokens": 77,
        "token_usage": 0.25,
        "num_used_blocks": 4,
        "num_total_blocks": 16,
    }
    engine.allow(10**9)
    thread.join(30)
    assert client.get("/load").json()["server_load"] == 0


def test_readiness_needs_no_key_and_the_rest_does(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(api_key="k"))) as client:
        assert client.get("/ready").status_code == 200
        for path in ("/version", "/server_info", "/load"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer k"}).status_code == 200
