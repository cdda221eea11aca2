"""The real server's token-level route, and the routes of its operator, from outside."""

import json
import threading
from pathlib import Path

from .conftest import ADMIN_KEY
from .server_process import ServerProcess
from .test_goldens_over_http import assert_is_golden, goldens
from .test_server import eventually

GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


def golden_request(golden: dict) -> dict:
    return {"input_ids": golden["prompt_ids"], "sampling_params": GREEDY, "return_logprob": True}


def test_generate_answers_ids_with_golden_ids_and_logprobs(server: ServerProcess) -> None:
    for golden in goldens("llama"):
        status, reply = server.post("/generate", golden_request(golden))
        assert status == 200
        meta = reply["meta_info"]
        assert_is_golden(golden, reply["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]])
        # At temperature 0 nothing else could have been drawn.
        assert meta["output_token_sampling_logprobs"] == [[0.0, token, None] for token in reply["output_ids"]]
        assert meta["finish_reason"] == {"type": "length", "length": 24}


def test_an_aborted_request_gives_back_what_it_had(server: ServerProcess) -> None:
    sampling = {"max_new_tokens": 1900, "ignore_eos": True}
    results = []
    body = {"text": "The quick brown fox", "sampling_params": sampling, "rid": "long", "return_logprob": True}
    thread = threading.Thread(target=lambda: results.append(server.post("/generate", body)))
    thread.start()
    eventually(lambda: json.loads(server.get("/load"))["num_tokens"] > 10)
    load = json.loads(server.get("/load"))
    assert (load["server_load"], load["num_running_reqs"]) == (1, 1)
    assert 0 < load["num_used_blocks"] < load["num_total_blocks"]
    assert server.post("/abort_request", {"rid": "long"}, ADMIN_KEY) == (200, {"success": True, "num_aborted": 1})
    thread.join(60)
    status, reply = results[0]
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 1900
    assert len(reply["meta_info"]["output_token_logprobs"]) == len(reply["output_ids"])
    load = json.loads(server.get("/load"))
    assert {name: load[name] for name in ("num_reqs", "num_tokens", "num_used_blocks")} == {
        "num_reqs": 0, "num_tokens": 0, "num_used_blocks": 0,
    }  # fmt: skip


def test_a_flushed_cache_is_cold(server: ServerProcess) -> None:
    request = golden_request(goldens("llama")[-1])
    server.post("/generate", request)
    assert server.post("/generate", request)[1]["meta_info"]["cached_tokens"] > 0
    assert server.post("/flush_cache", {}, ADMIN_KEY) == (200, {"success": True})
    assert server.post("/generate", request)[1]["meta_info"]["cached_tokens"] == 0


def test_a_trace_is_written_where_the_option_says(server: ServerProcess, profiles: Path) -> None:
    assert server.post("/start_profile", {}, ADMIN_KEY)[0] == 200
    assert server.post("/start_profile", {}, ADMIN_KEY)[0] == 409
    server.post("/generate", golden_request(goldens("llama")[0]))
    assert server.post("/stop_profile", {}, ADMIN_KEY)[0] == 200
    assert list(profiles.rglob("*.xplane.pb"))
    assert server.post("/stop_profile", {}, ADMIN_KEY)[0] == 409


def test_server_info_reports_the_groups_of_the_start(server: ServerProcess) -> None:
    text = server.get("/server_info")
    info = json.loads(text)
    assert ADMIN_KEY not in text + "".join(server.output)
    assert info["memory"]["arena"] <= info["engine_config"]["kv_cache_memory_bytes"] == 33554432
    printed = "".join(server.output)
    for group in info["memory"]["groups"]:
        assert f"group {group['group_id']}: " in printed
        assert f"capacity {group['capacity']} {group['unit']}" in printed
    assert json.loads(server.get("/ready")) == {"status": "ready"}


def test_the_installed_server_has_the_page_and_its_figures(server: ServerProcess) -> None:
    assert '<script type="module" src="status-page/main.js">' in server.get("/")
    assert "getJson" in server.get("/status-page/main.js")
    status = json.loads(server.get("/status"))
    memory = json.loads(server.get("/server_info"))["memory"]
    pool = status["pool"]
    assert pool["parents"] == memory["num_parents"]
    assert [group["group_id"] for group in pool["groups"]] == [group["group_id"] for group in memory["groups"]]
    taken = sum(group["in_use"] + group["cached"] for group in pool["groups"])
    assert pool["free"] + taken == pool["parents"]
