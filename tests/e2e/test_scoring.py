"""Scoring over HTTP: the requests that lm-eval's `local-completions` sends, and what it reads of the replies."""

import json
from typing import Any

import httpx
import pytest

from .conftest import TINY, WARM_FAMILY, ServerFactory


def loglikelihoods(url: str, sequences: list[list[int]], context_lengths: list[int]) -> list[tuple[float, bool]]:
    """As lm-eval 0.4.13 does it: one token is generated and left out, and whether a continuation is what greedy
    decoding gives is found by comparing numbers of the reply for equality."""
    body = {
        "model": "tiny",
        "prompt": sequences,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    results = []
    choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
    for choice, length in zip(choices, context_lengths, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, tops, strict=True))
        results.append((sum(logprobs), is_greedy))
    return results


def second_best(golden: dict[str, Any]) -> tuple[list[int], float]:
    """The golden output with its last token replaced by the next best, and its log-probability."""
    best = [dict(map(tuple, top)) for top in golden["output_top5"]]
    *before, last = golden["output_ids"]
    other = next(token for token in best[-1] if token != last)
    return [*before, other], sum(top[token] for token, top in zip([*before, other], best, strict=True))


def test_lm_eval_reads_what_transformers_computes(tiny_server: ServerFactory) -> None:
    server = tiny_server(WARM_FAMILY)
    sequences, lengths, expected = [], [], []
    for golden in json.loads((TINY / f"{WARM_FAMILY}.json").read_text())["prompts"]:
        greedy = sum(
            dict(map(tuple, top))[token] for token, top in zip(golden["output_ids"], golden["output_top5"], strict=True)
        )
        other_ids, other = second_best(golden)
        for output, total, is_greedy in ((golden["output_ids"], greedy, True), (other_ids, other, False)):
            sequences.append(golden["prompt_ids"] + output)
            lengths.append(len(golden["prompt_ids"]))
            expected.append((pytest.approx(total, abs=5e-3), is_greedy))
    assert loglikelihoods(server.url, sequences, lengths) == expected
    assert loglikelihoods(server.url, sequences[:1], lengths[:1]) == expected[:1]
    # The tokens in front of the context's end are scored too; the recorded predictions have most of them.
    body = {"model": "tiny", "prompt": sequences[0], "max_tokens": 0, "prompt_logprobs": 5}
    entries = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["prompt_logprobs"]
    golden = json.loads((TINY / f"{WARM_FAMILY}.json").read_text())["prompts"][0]
    for entry, top in zip(entries[1:], golden["prompt_top5"], strict=False):
        ranked = sorted((value["rank"], int(token), value["logprob"]) for token, value in entry.items())[:5]
        assert [token for _, token, _ in ranked] == [token for token, _ in top]
        assert [logprob for _, _, logprob in ranked] == pytest.approx([logprob for _, logprob in top], abs=1e-3)
    assert server.metric("tokenspeed:compilations_after_warmup_total") == 0
