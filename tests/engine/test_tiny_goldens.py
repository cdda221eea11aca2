"""Every path through the engine gives the tokens and log-probabilities that transformers recorded, or PlainStep."""

import dataclasses
import json
from typing import Any

import pytest

from tokenspeed_jax import Engine, RequestOutput, SamplingParams
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.plan import pack
from tokenspeed_jax.recipes.setup import CACHE_FAMILIES

from ..families import ALL
from .conftest import GOLDEN, EngineFactory
from .three_kinds import CONFIG, THREE_KINDS, three_kinds_golden

FAMILIES = (*ALL, THREE_KINDS)

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)


def golden_prompts(family: str) -> list[dict[str, Any]]:
    if family == THREE_KINDS:
        return list(three_kinds_golden())
    return json.loads((GOLDEN / "tiny" / f"{family}.json").read_text())["prompts"]


def assert_is_golden(output: RequestOutput, golden: dict[str, Any]) -> None:
    sample = output.samples[0]
    assert sample.token_ids == golden["output_ids"]
    assert sample.finish_reason == "length"
    assert sample.logprobs is not None
    assert sample.top_logprobs is not None
    for token, logprob, top, expected in zip(
        sample.token_ids, sample.logprobs, sample.top_logprobs, golden["output_top5"], strict=True
    ):
        want = dict(map(tuple, expected))
        assert logprob == pytest.approx(want[token], abs=1e-3)
        assert list(top) == list(want)
        assert list(top.values()) == pytest.approx(list(want.values()), abs=1e-3)


def run_goldens(engine: Engine, family: str, *, scoring: bool = False) -> None:
    params = dataclasses.replace(GREEDY, prompt_logprobs=5) if scoring else GREEDY
    for golden in golden_prompts(family):
        output = engine.generate(golden["prompt_ids"], params)[0]
        assert_is_golden(output, golden)
        if scoring:
            assert_scores_are_golden(output, golden)


def assert_scores_are_golden(output: RequestOutput, golden: dict[str, Any]) -> None:
    """What is recorded stands for the prediction after each token; here each entry stands at the token predicted."""
    assert output.prompt_logprobs is not None
    first, *entries = output.prompt_logprobs
    assert first is None
    for token, entry, expected in zip(golden["prompt_ids"][1:], entries, golden["prompt_top5"][:-1], strict=True):
        want = dict(map(tuple, expected))
        top = {other: entry[other].logprob for other in entry if entry[other].rank <= 5}
        assert sorted(top) == sorted(want)
        assert [top[other] for other in want] == pytest.approx(list(want.values()), abs=1e-3)
        assert next(iter(entry)) == token
        assert entry[token].rank == 1 + list(want).index(token) if token in want else entry[token].rank > 5


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_cold_prompts_in_chunks_of_64_then_warm_ones_match_alone(tiny_engine: EngineFactory, family: str) -> None:
    engine = tiny_engine(family, max_num_batched_tokens=64)
    run_goldens(engine, family, scoring=family != THREE_KINDS)
    run_goldens(engine, family)
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_prompts_in_one_chunk_match_alone_and_all_match_in_a_mixed_batch_of_16(
    tiny_engine: EngineFactory, family: str
) -> None:
    # The granularity of test_prefix_cache.py, where prompts in one chunk take the same programs.
    engine = tiny_engine(family, prefix_granularity=128, enable_prefix_caching=False)
    prompts = sorted(golden_prompts(family), key=lambda prompt: len(prompt["prompt_ids"]))
    longest = prompts[-1]
    assert_is_golden(engine.generate(longest["prompt_ids"], GREEDY)[0], longest)
    # It also comes first, and so whole, in a batch whose later prompts are cut where a step is full.
    batch = [prompts[index % 3] for index in range(2, 18)]
    for output, golden in zip(engine.generate([p["prompt_ids"] for p in batch], GREEDY), batch, strict=True):
        assert_is_golden(output, golden)
    assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_eviction_and_retraction_change_no_token(tiny_engine: EngineFactory, family: str) -> None:
    # Undeclared output budgets, and a pool that holds one and a half requests at full length (equal requests share
    # blocks; Mistral's keep only a window each). Without overlap, since a request whose step is in flight is never
    # retracted.
    engine = tiny_engine(
        family,
        prefix_granularity=16,
        kernel_page_size=16,
        max_model_len=232,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=small_pool_bytes(family),
        overlap_schedule=False,
    )
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    prompts = golden_prompts(family)
    batch = [prompts[index] for index in (0, 1, 0, 1, 2, 0, 1)]
    before = engine.stats().retractions
    outputs = engine.generate([prompt["prompt_ids"] for prompt in batch], params)
    for output, golden in zip(outputs, batch, strict=True):
        sample = output.samples[0]
        assert sample.token_ids[:24] == golden["output_ids"]
        assert len(sample.token_ids) == 232 - len(golden["prompt_ids"])
    same = {}
    for output in outputs:
        same.setdefault(tuple(output.prompt_token_ids), set()).add(tuple(output.samples[0].token_ids))
    assert all(len(variants) == 1 for variants in same.values())
    # A request of a model with states alone never grows, so nothing is ever taken from it.
    assert engine.stats().retractions > before or family in ("mamba2", "falcon_mamba")


def small_pool_bytes(family: str) -> int:
    """Arena bytes for one and a half requests of 232 tokens, in blocks of 16."""
    if family == THREE_KINDS:
        config = CONFIG
    else:
        _, config = resolve_model(json.loads((GOLDEN / "tiny" / family / "config.json").read_text()))
    recipe = CACHE_FAMILIES[config.cache_family](
        config.attention_layers(),
        kv_dtype="float32",
        prefix_granularity=16,
        budget_bytes=1 << 30,
        limits=SchedulerLimits("Fused", max_live_requests=16, max_scheduled_tokens=64, max_context_len=232),
    )
    groups = recipe.groups()
    specs = tuple(spec for spec, _ in groups)
    layout = pack(groups, 16, recipe.packing(groups), recipe.alignment, recipe.max_padding_fraction)
    model = recipe.capacity_model(layout, specs)
    alone = model.lcm_blocks_needed_for(model.single_request_group_pages(232))
    return (1 + alone * 3 // 2) * layout.lcm_block_bytes
