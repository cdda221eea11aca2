"""`tokenspeed-jax bench` against servers: what it sends, what it measures, and what it makes of broken replies."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_jax.commands.main import main

from ..serve.fake_engine import FakeEngine
from .scripted_server import HEAD, ScriptedServer, chunk, whole

USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 8, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
}
END = chunk(b"[DONE]") + b"0\r\n\r\n"


def text(piece: str) -> bytes:
    return chunk({"choices": [{"index": 0, "text": piece}]})


def bench(url: str, *words: str) -> int:
    return main(["bench", f"--base-url={url}", "--disable-tqdm", *words])


def results(folder: Path, url: str, *words: str) -> dict[str, Any]:
    path = folder / "results.json"
    assert bench(url, f"--output-json={path}", *words) == 0
    return json.loads(path.read_text())


def test_random_prompts_through_both_endpoints(
    base_url: str, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-prompts=12", "--random-input-len=20", "--random-output-len=6"]
    shared = ["--random-prefix-len=10", "--random-num-prefixes=2", "--concurrency=3"]
    found = results(tmp_path, base_url, *sizes, *shared)
    assert (found["completed"], found["failed"], found["skipped"]) == (12, 0, 0)
    assert (found["prompt_tokens"], found["output_tokens"], found["cached_tokens"]) == (12 * 30, 12 * 6, 12 * 3)
    assert found["prefix_hit_rate"] == pytest.approx(0.1)
    assert len({tuple(prompt[:10]) for prompt, _ in engine.submitted}) == 2
    assert len({tuple(prompt) for prompt, _ in engine.submitted}) == 12
    special = engine.tokenizer.special_ids
    assert not any(special & set(prompt) for prompt, _ in engine.submitted), "/tokenize gives ids of words"
    assert all(params.ignore_eos and params.temperature == 0 for _, params in engine.submitted)
    out = capsys.readouterr().out
    assert "12 completed, 0 failed" in out
    assert "prefix hits    10.0% (36 tokens)" in out

    engine.submitted.clear()
    found = results(tmp_path, base_url, *sizes, "--endpoint=chat", "--request-rate=400", "--temperature=0.5")
    assert (found["completed"], found["output_tokens"]) == (12, 72)
    assert found["prompt_tokens"] == sum(len(prompt) for prompt, _ in engine.submitted)
    assert {params.temperature for _, params in engine.submitted} == {0.5}
    assert found["requests"][-1]["sent"] > found["requests"][0]["sent"]


def test_the_same_seed_asks_the_same(base_url: str, engine: FakeEngine) -> None:
    words = ["--num-prompts=4", "--random-input-len=9", "--random-output-len=2", "--random-range-ratio=0.5"]
    for seed in (1, 1, 2):
        assert bench(base_url, *words, f"--seed={seed}", "--concurrency=1") == 0
    prompts = [prompt for prompt, _ in engine.submitted]
    assert prompts[:4] == prompts[4:8]
    assert prompts[:4] != prompts[8:]


def test_a_trace_is_replayed_with_its_prefixes(base_url: str, engine: FakeEngine, tmp_path: Path) -> None:
    rows = [(7000, 30, 2, [4]), (7000, 40, 3, [4]), (7080, 20, 2, [5]), (7090, 9000, 2, [*range(18)])]
    trace = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    found = results(tmp_path, base_url, f"--trace={trace}")
    assert (found["completed"], found["skipped"]) == (3, 1), "the server's context holds 256 tokens"
    assert (found["prompt_tokens"], found["output_tokens"]) == (90, 7)
    first, second, third = sorted((prompt for prompt, _ in engine.submitted), key=lambda prompt: -len(prompt))
    assert first[:30] == second
    assert second[:20] != third
    sent = [request["sent"] for request in found["requests"]]
    assert sent[2] >= 0.08


def test_times_are_those_of_the_wire(tmp_path: Path) -> None:
    role = chunk({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    script = [HEAD, role, 0.2, text("a"), 0.1, text("b"), 0.1, text("c"), 0.1, chunk(USAGE) + END]
    with ScriptedServer(script) as server:
        found = results(tmp_path, server.url, "--num-prompts=3", "--vocab-size=9", "--concurrency=2", "--api-key=k")
        assert server.most_open == 2
        assert all("Authorization: Bearer k\r\n" in head for head in server.heads)
        assert all(
            body["stream_options"] == {"include_usage": True} and max(body["prompt"]) < 9 for body in server.bodies
        )
    assert found["config"].keys() >= {"seed"}
    assert "api_key" not in found["config"]
    # A loaded machine is late, never early.
    for request in found["requests"]:
        assert [time >= least for time, least in zip(request["arrivals"], (0.2, 0.3, 0.4), strict=True)] == [True] * 3
        assert request["end"] >= 0.5
    assert found["ttft_ms"]["mean"] >= 200
    assert found["e2e_ms"]["p50"] >= 500
    per_token = [(request["arrivals"][2] - request["arrivals"][0]) / 2 for request in found["requests"]]
    assert found["tpot_ms"]["mean"] == pytest.approx(1000 * sum(per_token) / 3)
    assert found["duration"] >= 1.0, "three requests, two at a time"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ([whole("429 Too Many", b'{"error": {"message": "queue is full"}}')], "status 429: queue is full"),
        ([whole("500 Oh", b"<html>")], "status 500: <html>"),
        ([HEAD, text("a")], "connection was lost"),
        ([b"SSH-2.0\r\n"], "connection was lost"),
        ([], "connection was lost"),
        ([HEAD, text("a"), END], "without usage"),
        ([HEAD, chunk(b"{"), END], "not as OpenAI's"),
        ([HEAD, chunk({"choices": [3]}), END], "not as OpenAI's"),
        ([HEAD, chunk({"choices": [], "usage": {"prompt": 1}}), END], "not as OpenAI's"),
        ([HEAD, chunk(b"[1]"), END], "not as OpenAI's"),
        ([HEAD, text("a"), chunk({"error": {"message": "engine failed"}}), END], "engine failed"),
        ([HEAD, 5.0], "no reply within 0.2 s"),
    ],
)
def test_a_broken_reply_is_a_failed_request(
    script: list[bytes | float], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ScriptedServer(script) as server:
        timeout = 0.2 if "no reply" in says else 60
        assert bench(server.url, "--num-prompts=2", "--vocab-size=9", f"--request-timeout={timeout}") == 1
    out = capsys.readouterr().out
    assert "0 completed, 2 failed" in out
    assert says in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--base-url=ftp://x"], ["--base-url", "http://HOST:PORT"]),
        (["--base-url=http://x:99999"], ["--base-url"]),
        (["--api-key=a\nb"], ["--api-key", "ASCII"]),
        (["--num-prompts=0"], ["--num-prompts", "positive"]),
        (["--request-rate=nan"], ["--request-rate", "nan"]),
        (["--random-range-ratio=1"], ["--random-range-ratio", "[0, 1)"]),
        (["--random-num-prefixes=2"], ["--random-num-prefixes", "random_prefix_len"]),
        (["--trace=t.csv", "--random-input-len=5"], ["--random-input-len", "no effect", "--trace"]),
        (["--output-json=/nowhere/x.json"], ["--output-json", "/nowhere"]),
        (["--max-concurrency=2", "--concurrency=3"], ["contradict"]),
        (["--endpoint=embeddings"], ["--endpoint", "completions, chat"]),
    ],
)
def test_mistakes_are_named_before_anything_is_sent(
    words: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert all(part in line for part in says), line


def test_servers_that_cannot_be_used_are_1(capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer([whole("404 Not Found", b"")]) as server:
        assert bench(server.url) == 1
        assert "/tokenize: status 404: ; without this route, give --vocab-size" in capsys.readouterr().err
        assert bench(server.url, "--vocab-size=9", "--endpoint=chat") == 1
        assert "/detokenize" in capsys.readouterr().err
        assert bench(server.url, "--model=other") == 1
        assert "--model other: the server has m" in capsys.readouterr().err
        with pytest.raises(SystemExit) as end:
            bench(server.url, "--vocab-size=9", "--random-input-len=4096")
        assert end.value.code == 2
        assert "4224 tokens" in capsys.readouterr().err
    assert bench(server.url) == 1
    assert "cannot connect" in capsys.readouterr().err
