"""`tokenspeed-jax bench` against the real server: its counts are the server's own."""

import json
from pathlib import Path
from typing import Any

from tokenspeed_jax.commands.main import main

from .server_process import ServerProcess

COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "output_tokens": "vllm:generation_tokens_total",
    "cached_tokens": "vllm:prefix_cache_hits_total",
}


def results(server: ServerProcess, file: Path, *words: str) -> dict[str, Any]:
    """The results of a run, which must agree with what the server has counted meanwhile."""
    before = {name: server.metric(counter) for name, counter in COUNTERS.items()}
    assert main(["bench", f"--base-url={server.url}", f"--output-json={file}", "--disable-tqdm", *words]) == 0
    found = json.loads(file.read_text())
    assert {name: found[name] for name in COUNTERS} == {
        name: server.metric(counter) - before[name] for name, counter in COUNTERS.items()
    }
    return found


def test_shared_prefixes_are_hits_and_lengths_are_kept(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    words = ["--num-prompts=12", "--random-prefix-len=192", "--random-input-len=32", "--random-output-len=8"]
    found = results(server, file, *words, "--concurrency=1", "--seed=81")
    assert found["completed"] == 12
    assert (found["prompt_tokens"], found["output_tokens"]) == (12 * 224, 12 * 8)
    # All but the first find three pages of 64 tokens.
    assert found["cached_tokens"] == 11 * 192
    alone = results(server, file, *words[:1], *words[2:], "--request-rate=100", "--seed=82")
    assert alone["prefix_hit_rate"] == 0


def test_a_mooncake_trace_reaches_its_ideal_hit_rate(server: ServerProcess, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 1100, [901, 902, 903]), (500, 1100, [901, 902, 904]), (1000, 600, [901, 905])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": time, "input_length": length, "output_length": 3, "hash_ids": ids}) + "\n"
            for time, length, ids in rows
        )
    )
    found = results(server, tmp_path / "results.json", f"--trace={trace}", "--concurrency=1", "--seed=83")
    assert (found["completed"], found["output_tokens"]) == (3, 9)
    assert found["cached_tokens"] == 1024 + 512
