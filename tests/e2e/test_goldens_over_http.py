"""Greedy tokens and log-probabilities of every tiny family, through the real server and the openai client."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from ..families import DENSE
from .conftest import TINY, WARM_FAMILY, ServerFactory

GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "logprobs": 5}
EXTRA = {"ignore_eos": True, "return_token_ids": True}


def goldens(family: str) -> list[dict[str, Any]]:
    return json.loads((TINY / f"{family}.json").read_text())["prompts"]


def assert_is_golden(golden: dict[str, Any], token_ids: list[int], logprobs: list[float]) -> None:
    assert token_ids == golden["output_ids"]
    expected = [dict(map(tuple, top))[token] for token, top in zip(token_ids, golden["output_top5"], strict=True)]
    assert logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("family", DENSE)
def test_replies_are_golden_cold_warm_streamed_and_together(tiny_server: ServerFactory, family: str) -> None:
    server = tiny_server(family)
    prompts = goldens(family)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

        def whole(golden: dict[str, Any]) -> int:
            reply = client.completions.create(prompt=golden["prompt_ids"], extra_body=EXTRA, **GREEDY)
            choice = reply.choices[0]
            assert choice.finish_reason == "length"
            assert_is_golden(golden, choice.model_extra["token_ids"], choice.logprobs.token_logprobs)
            return reply.usage.prompt_tokens_details.cached_tokens

        def streamed(golden: dict[str, Any]) -> None:
            chunks = client.completions.create(prompt=golden["prompt_ids"], stream=True, extra_body=EXTRA, **GREEDY)
            ids, logprobs = [], []
            for chunk in chunks:
                choice = chunk.choices[0]
                ids += choice.model_extra.get("token_ids", [])
                logprobs += choice.logprobs.token_logprobs if choice.logprobs else []
            assert_is_golden(golden, ids, logprobs)

        for golden in prompts:
            whole(golden)
        assert whole(prompts[-1]) > 0, "a prompt of 200 tokens is cached after its first run"
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(streamed, prompts * 3))
            list(pool.map(whole, prompts * 2))
        together = client.completions.create(
            prompt=[golden["prompt_ids"] for golden in prompts], extra_body=EXTRA, **GREEDY
        )
        for golden, choice in zip(prompts, together.choices, strict=True):
            assert_is_golden(golden, choice.model_extra["token_ids"], choice.logprobs.token_logprobs)
    if family == WARM_FAMILY:
        assert server.metric("tokenspeed:compilations_after_warmup_total") == 0
