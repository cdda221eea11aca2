"""Two real checkpoints through the engine: the recorded tokens and log-probabilities, whatever the schedule."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed_jax import Engine, EngineConfig, RequestOutput, SamplingParams

from .conftest import GOLDEN

MODELS = {"smollm2-135m": "smollm2_path", "gemma3-270m": "gemma3_270m_path"}
GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True, logprobs=True, prompt_logprobs=1)
FEWER = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True)
"""All 64 recorded tokens are asked for once: a step of a real model takes a quarter of a second on two cores."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[Path, list[dict[str, Any]]]:
    """(checkpoint, golden prompts) of one real model."""
    golden = json.loads((GOLDEN / f"{request.param}.json").read_text())
    return request.getfixturevalue(MODELS[request.param]), golden["prompts"]


def make_engine(path: Path, **options: Any) -> Engine:
    settings = {
        "dtype": "float32",
        "max_model_len": 1280,
        "max_num_seqs": 16,
        "warmup": False,
        "disable_progress_bars": True,
    } | options
    return Engine(EngineConfig(model=str(path), **settings))


@pytest.fixture(scope="module")
def whole_prompt_engine(model: tuple[Path, list[dict[str, Any]]]) -> Iterator[Engine]:
    with make_engine(model[0], max_num_batched_tokens=1280, kv_cache_memory_bytes=512 << 20) as engine:
        yield engine


def assert_is_golden(output: RequestOutput, golden: dict[str, Any], params: SamplingParams = FEWER) -> None:
    sample, count = output.samples[0], params.max_tokens
    assert sample.token_ids == golden["output_ids"][:count], golden["id"]
    assert sample.logprobs == pytest.approx(golden["output_logprobs"][:count], abs=1e-3), golden["id"]


def test_all_prompts_at_once_cold_and_warm(
    whole_prompt_engine: Engine, model: tuple[Path, list[dict[str, Any]]]
) -> None:
    _, prompts = model
    for warm in (False, True):
        params = FEWER if warm else GREEDY
        outputs = whole_prompt_engine.generate([prompt["prompt_ids"] for prompt in prompts], params)
        for output, golden in zip(outputs, prompts, strict=True):
            assert_is_golden(output, golden, params)
            if not warm:
                assert output.prompt_logprobs is not None
                scores = output.prompt_logprobs.token_logprobs()
                assert scores[0] is golden["prompt_logprobs"][0] is None
                assert scores[1:] == pytest.approx(golden["prompt_logprobs"][1:], abs=1e-3), golden["id"]
            if len(golden["prompt_ids"]) > 64:
                assert (output.cached_tokens > 0) == warm


def test_texts_and_chats_alone(whole_prompt_engine: Engine, model: tuple[Path, list[dict[str, Any]]]) -> None:
    _, prompts = model
    golden = next(prompt for prompt in prompts if prompt["kind"] == "short")
    assert_is_golden(whole_prompt_engine.generate(golden["text"], FEWER)[0], golden)
    if whole_prompt_engine.tokenizer.has_chat_template:
        golden = next(prompt for prompt in prompts if "messages" in prompt)
        output = whole_prompt_engine.generate(golden["messages"], FEWER)[0]
        assert_is_golden(output, golden)
        assert output.samples[0].text == whole_prompt_engine.tokenizer.decode(golden["output_ids"][: FEWER.max_tokens])


def test_chunks_of_64_under_eviction_and_retraction(model: tuple[Path, list[dict[str, Any]]]) -> None:
    path, prompts = model
    longest = max(len(prompt["prompt_ids"]) for prompt in prompts) + 80
    parent_bytes = 64 * 30 * 2 * 3 * 64 * 4 if "SmolLM2" in path.name else 64 * 15 * 2 * 256 * 4
    parents = 3 * longest // 64
    undeclared = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, stop=["\0"])
    with make_engine(
        path,
        max_model_len=longest,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=(parents + 1) * parent_bytes,
    ) as engine:
        chosen = sorted(prompts, key=lambda prompt: len(prompt["prompt_ids"]))
        outputs = engine.generate(
            [prompt["prompt_ids"] for prompt in chosen], [FEWER] * (len(chosen) - 1) + [undeclared]
        )
        for output, golden in zip(outputs[:-1], chosen[:-1], strict=True):
            assert_is_golden(output, golden)
        assert outputs[-1].samples[0].token_ids[:64] == chosen[-1]["output_ids"]
