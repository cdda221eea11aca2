"""Everything a client can get wrong is a 4xx in OpenAI's form that names the parameter, and disturbs nobody."""

import json

import pytest
from starlette.testclient import TestClient

from tokenspeed_jax.serve.app import create_app
from tokenspeed_jax.serve.config import ServerConfig

from .fake_engine import FakeEngine

PATH = "/v1/completions"
BODY = {"model": "fake/model", "prompt": "abc"}


def refused(reply, status: int, param: str | None) -> dict:
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert error["param"] == param
    return error


WRONG_VALUES = [
    ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", ""]), ("prompt", ["a", 1]), ("prompt", None),
    ("prompt", 5), ("prompt", {}), ("prompt", [-1]), ("prompt", [10**6]), ("prompt", [10**30]),
    ("prompt", [[1, 2], [10**6]]), ("prompt", [1] * 256), ("prompt", ["a"] * 2049),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1000), ("max_tokens", "5"), ("max_tokens", 5.5),
    ("max_tokens", True), ("max_tokens", 2**70), ("min_tokens", 17), ("min_tokens", -1),
    ("temperature", -0.1), ("temperature", "hot"), ("temperature", 1000), ("temperature", []),
    ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_k", -1), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 2),
    ("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0), ("repetition_penalty", -1),
    ("seed", -1), ("seed", 1.5), ("seed", 2**64), ("stop", ""), ("stop", [""]), ("stop", 5), ("stop", ["a"] * 17),
    ("stop_token_ids", [-1]), ("stop_token_ids", 5), ("ignore_eos", 1), ("ignore_eos", "true"),
    ("n", 0), ("n", 129), ("n", "1"), ("n", 2**80), ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
    ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"1": 101}), ("logit_bias", {"1": "x"}),
    ("logit_bias", {"1": 1, "01": 2}), ("logit_bias", []), ("stream", "yes"), ("stream_options", {}),
    ("priority", 1.5), ("priority", "1"), ("priority", True), ("priority", 2**31), ("priority", -(2**31) - 1),
    ("cache_salt", ""), ("cache_salt", 5), ("cache_salt", []),
    ("user", 5), ("skip_special_tokens", "no"), ("return_token_ids", 1),
    ("best_of", 3), ("echo", 1), ("echo", "yes"), ("suffix", "x"), ("service_tier", "flex"), ("prompt_logprobs", -1),
    ("prompt_logprobs", 21), ("prompt_logprobs", True), ("include_stop_str_in_output", 1),
    ("response_format", "json"), ("use_beam_search", True), ("store", True),
    ("guided_json", 5), ("tools", []), ("colour", None), ("messages", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_wrong_values_are_refused_by_name(client: TestClient, engine: FakeEngine, name: str, value: object) -> None:
    reply = client.post(PATH, json=BODY | {name: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"] or "").split("[")[0] == name
    assert name in error["message"] or name == "prompt"
    assert engine.stats().running == 0
    assert client.post(PATH, json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_fields_within_fields_are_named_with_their_path(client: TestClient, extra: dict, param: str) -> None:
    refused(client.post(PATH, json=BODY | extra), 400, param)


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_missing_fields_are_named(client: TestClient, name: str) -> None:
    refused(client.post(PATH, json={key: value for key, value in BODY.items() if key != name}), 400, name)


@pytest.mark.parametrize("name", ["tools", "modalities", "tool_choice", "reasoning_effort", "top_logprobs", "audio"])
def test_chat_features_that_are_not_served_are_refused(client: TestClient, name: str) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    value = {"tools": [tool], "tool_choice": "required", "top_logprobs": 3}.get(name, {"type": "x"})
    body = {"model": "fake/model", "messages": [{"role": "user", "content": "x"}], name: value}
    refused(client.post("/v1/chat/completions", json=body), 400, name)


def test_contradicting_limits_are_refused(client: TestClient) -> None:
    body = {"model": "fake/model", "messages": [{"role": "user", "content": "x"}]}
    extra = {"max_tokens": 3, "max_completion_tokens": 4}
    refused(client.post("/v1/chat/completions", json=body | extra), 400, "max_tokens")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"null", b"5", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"\xff\xfe", b"{}x",
        b'{"temperature": NaN}', b'{"temperature": Infinity}', b'{"temperature": 1e999}', b"[" * 9000,
        b'{"a":' * 800 + b"1" + b"}" * 800,
    ],
)  # fmt: skip
def test_bodies_that_are_no_json_object_are_refused(client: TestClient, body: bytes) -> None:
    reply = client.post(PATH, content=body, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["code"] in ("invalid_json", "unknown_parameter")


@pytest.mark.parametrize("factor", [2, 20])
def test_bodies_over_the_limit_are_refused(client: TestClient, factor: int) -> None:
    body = json.dumps(BODY | {"prompt": "x" * 16384 * factor})
    error = refused(client.post(PATH, content=body), 413, None)
    assert "16384" in error["message"]
    just_fits = json.dumps(BODY | {"prompt": "Hello" * 20}).ljust(16384).encode()
    assert client.post(PATH, content=just_fits).status_code == 200


def test_another_model_is_not_found(client: TestClient) -> None:
    assert refused(client.post(PATH, json=BODY | {"model": "other"}), 404, "model")["code"] == "model_not_found"
    refused(client.get("/v1/models/other"), 404, "model")
    refused(client.post("/tokenize", json={"model": "other", "prompt": "x"}), 404, "model")


def test_unknown_routes_and_methods_have_the_same_form(client: TestClient) -> None:
    refused(client.get("/v2/nothing"), 404, None)
    refused(client.get("/v1/models/"), 404, "model")
    reply = client.get(PATH)
    refused(reply, 405, None)
    assert reply.headers["allow"] == "POST"


def test_wrong_keys_are_refused_and_probes_need_none(engine: FakeEngine) -> None:
    with TestClient(create_app(engine, ServerConfig(api_key="sécret"))) as client:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": "Basic sécret".encode()}):
            reply = client.post(PATH, json=BODY, headers=headers)
            assert refused(reply, 401, None)["code"] == "invalid_api_key"
        good = {"authorization": "Bearer sécret".encode()}
        assert client.post(PATH, json=BODY, headers=good).status_code == 200
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200


def test_one_bad_prompt_of_many_leaves_none_running(client: TestClient, engine: FakeEngine) -> None:
    engine.allow(0)
    refused(client.post(PATH, json=BODY | {"prompt": [[5], [6], [10**6]]}), 400, "prompt")
    assert engine.stats().running == 0


def test_defects_of_the_server_tell_no_details(client: TestClient, engine: FakeEngine) -> None:
    def broken(*_args, **_kwargs):
        raise RuntimeError("secret detail")

    engine.submit = broken
    error = refused(client.post(PATH, json=BODY), 500, None)
    assert "secret" not in error["message"]
