"""Two real checkpoints through the engine: the recorded tokens and log-probabilities, whatever the schedule."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenspeed_jax import Engine, EngineConfig, RequestOutput, SamplingParams

from ..real_models import MAX_NUM_SEQS, REAL_MODELS, RealModel
from .conftest import GOLDEN

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True)
"""All 64 recorded tokens are asked for over HTTP: a step of all prompts takes long on two cores."""
FEW = dataclasses.replace(GREEDY, max_tokens=4)


class Checkpoint(NamedTuple):
    path: Path
    sizes: RealModel
    prompts: list[dict[str, Any]]


@pytest.fixture(scope="module", params=REAL_MODELS)
def model(request: pytest.FixtureRequest) -> Checkpoint:
    sizes = REAL_MODELS[request.param]
    golden = json.loads((GOLDEN / f"{request.param}.json").read_text())
    return Checkpoint(request.getfixturevalue(sizes.path_fixture), sizes, golden["prompts"])


def make_engine(model: Checkpoint, max_num_batched_tokens: int) -> Engine:
    config = EngineConfig(
        model=str(model.path),
        dtype="float32",
        max_model_len=model.sizes.max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_cache_memory_bytes=model.sizes.arena_bytes,
        warmup=False,
        disable_progress_bars=True,
    )
    return Engine(config)


@pytest.fixture(scope="module")
def whole_prompt_engine(model: Checkpoint) -> Iterator[Engine]:
    with make_engine(model, max_num_batched_tokens=model.sizes.max_num_batched_tokens) as engine:
        yield engine


def assert_is_golden(output: RequestOutput, golden: dict[str, Any], count: int = 24) -> None:
    sample = output.samples[0]
    assert sample.token_ids == golden["output_ids"][:count], golden["id"]
    assert sample.logprobs == pytest.approx(golden["output_logprobs"][:count], abs=1e-3), golden["id"]


def test_all_prompts_at_once_cold_then_each_alone_and_warm(whole_prompt_engine: Engine, model: Checkpoint) -> None:
    # The server's test asks for those of the long prompts.
    scored = dataclasses.replace(GREEDY, prompt_logprobs=1)
    params = [scored if len(prompt["prompt_ids"]) < 100 else GREEDY for prompt in model.prompts]
    outputs = whole_prompt_engine.generate([prompt["prompt_ids"] for prompt in model.prompts], params)
    for output, golden in zip(outputs, model.prompts, strict=True):
        assert_is_golden(output, golden)
        assert output.cached_tokens == 0
        if len(golden["prompt_ids"]) >= 100:
            continue
        assert output.prompt_logprobs is not None
        scores = output.prompt_logprobs.token_logprobs()
        assert scores[0] is golden["prompt_logprobs"][0] is None
        assert scores[1:] == pytest.approx(golden["prompt_logprobs"][1:], abs=1e-3), golden["id"]
    for golden in model.prompts:
        # Twice, as the pool may have let go of what the batch left.
        alone, warm = (whole_prompt_engine.generate(golden["prompt_ids"], FEW)[0] for _ in range(2))
        assert_is_golden(alone, golden, 4)
        assert_is_golden(warm, golden, 4)
        assert (warm.cached_tokens > 0) == (len(golden["prompt_ids"]) > 64)


def test_texts_and_chats_alone(whole_prompt_engine: Engine, model: Checkpoint) -> None:
    golden = next(prompt for prompt in model.prompts if prompt["kind"] == "short")
    assert_is_golden(whole_prompt_engine.generate(golden["text"], GREEDY)[0], golden)
    if whole_prompt_engine.tokenizer.has_chat_template:
        golden = next(prompt for prompt in model.prompts if "messages" in prompt)
        output = whole_prompt_engine.generate(golden["messages"], GREEDY)[0]
        assert_is_golden(output, golden)
        assert output.samples[0].text == whole_prompt_engine.tokenizer.decode(golden["output_ids"][:24])


def test_chunks_of_64_under_eviction_and_retraction(model: Checkpoint) -> None:
    undeclared = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True, logprobs=True, stop=["\0"])
    with make_engine(model, max_num_batched_tokens=64) as engine:
        *chosen, longest = sorted(model.prompts, key=lambda prompt: len(prompt["prompt_ids"]))
        outputs = engine.generate(
            [prompt["prompt_ids"] for prompt in [*chosen, longest]], [FEW] * len(chosen) + [undeclared]
        )
        for output, golden in zip(outputs, chosen, strict=False):
            assert_is_golden(output, golden, 4)
        assert outputs[-1].samples[0].token_ids[:64] == longest["output_ids"]
