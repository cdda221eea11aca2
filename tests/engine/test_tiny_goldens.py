"""Every path through the engine gives the tokens and log-probabilities that transformers recorded, or PlainStep.

A family's tests take two engines of the sizes in tests/tiny_sizes.py, which differ in the length of a chunk. They ask
for log-probabilities everywhere, as steps that need none are other programs.
"""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from tokenspeed_jax import Engine, RequestOutput, SamplingParams
from tokenspeed_jax.engine.collector import RequestCollector

from ..families import ALL, RECURRENT
from ..tiny_sizes import MAX_MODEL_LEN, MAX_NUM_SEQS
from .conftest import GOLDEN, EngineFactory, of_shared_sizes
from .reuse_pairs import forget_prefixes
from .three_kinds import THREE_KINDS, three_kinds_golden

FAMILIES = (*ALL, THREE_KINDS)

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)


def in_chunks(tiny_engine: EngineFactory, family: str) -> Engine:
    """Chunks of 64 tokens, and one step at a time: a request whose step is in flight is never retracted."""
    return of_shared_sizes(tiny_engine, family, max_num_batched_tokens=64, overlap_schedule=False)


def in_one_chunk(tiny_engine: EngineFactory, family: str) -> Engine:
    """Chunks of 256 tokens."""
    return of_shared_sizes(tiny_engine, family, max_num_batched_tokens=256)


def random_prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def golden_prompts(family: str) -> list[dict[str, Any]]:
    if family == THREE_KINDS:
        return list(three_kinds_golden())
    return json.loads((GOLDEN / "tiny" / f"{family}.json").read_text())["prompts"]


def generate_apart(engine: Engine, goldens: list[dict[str, Any]], params: SamplingParams) -> list[RequestOutput]:
    """All at once, with a salt for each that keeps them from sharing what they have in common."""
    collectors = [RequestCollector(params) for _ in goldens]
    for index, (golden, collector) in enumerate(zip(goldens, collectors, strict=True)):
        engine.submit(golden["prompt_ids"], params, cache_salt=str(index), on_delta=collector.push)
    return [collector.wait() for collector in collectors]


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


FOUR_KINDS = ("llama", "gemma3", "qwen3_5", "qwen3_moe")
"""A dense, a sliding, a delta-net and an expert family."""


@pytest.mark.parametrize("family", FOUR_KINDS, scope="module")
def test_given_tokens_score_as_they_were_sampled(tiny_engine: EngineFactory, family: str) -> None:
    """The plain method is a trainer's forward pass."""
    engine = in_chunks(tiny_engine, family)
    prompts = [random_prompt(seed, 40) for seed in range(4)]
    samples = [output.samples[0] for output in engine.generate(prompts, dataclasses.replace(GREEDY, temperature=0.8))]
    sampled, completions = [sample.logprobs for sample in samples], [sample.token_ids for sample in samples]
    for method in ("plain", "paged"):
        assert np.abs(np.subtract(engine.score(prompts, completions, method=method), sampled)).mean() <= 1e-5


@pytest.mark.parametrize("family", FOUR_KINDS, scope="module")
def test_thirty_updates_leave_sampler_and_trainer_together(tiny_engine: EngineFactory, family: str) -> None:
    """Programs that the test above has compiled: steps, and a forward pass, here with the trainer's own arrays."""
    engine = in_chunks(tiny_engine, family)
    forward = engine._assembly.scorer._forward  # pyright: ignore[reportPrivateUsage]
    prompts = [random_prompt(seed, 24) for seed in range(2)]
    params = dataclasses.replace(GREEDY, temperature=0.8, max_tokens=4)
    first = weights = engine.export_weights()
    rng, apart = np.random.default_rng(0), []
    for _ in range(30):
        weights = jax.tree.map(lambda x: jax.device_put(trained(x, rng)), weights)
        engine.update_weights(weights, version=engine.weight_version + 1)
        samples = [output.samples[0] for output in engine.generate(prompts, params)]
        tokens, is_token = np.zeros((4, 64), np.int32), np.zeros((4, 64), bool)
        tokens[:2, :28] = [[*prompt, *sample.token_ids] for prompt, sample in zip(prompts, samples, strict=True)]
        is_token[:2, :28] = True
        ours = np.asarray(forward(tuple(jax.tree.leaves(weights)), tokens, is_token))[:2, 24:28]
        apart.append(np.abs(ours - [sample.logprobs for sample in samples]).mean())
    engine.update_weights(first, version=engine.weight_version + 1)
    assert max(apart) <= 1e-5
    assert np.mean(apart[-10:]) <= 2 * np.mean(apart[:10])


def trained(array: jax.Array, rng: np.random.Generator) -> np.ndarray:
    """A little further: a tenth of its spread after thirty times."""
    return np.asarray(array) + rng.normal(0, 0.02 * np.asarray(array).std(), array.shape).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_cold_prompts_in_chunks_of_64_then_warm_ones_match_alone(tiny_engine: EngineFactory, family: str) -> None:
    engine = in_chunks(tiny_engine, family)
    is_scored = family != THREE_KINDS
    for golden in golden_prompts(family):
        first = dataclasses.replace(GREEDY, prompt_logprobs=5) if is_scored else GREEDY
        cold, warm = (engine.generate(golden["prompt_ids"], params)[0] for params in (first, GREEDY))
        assert_is_golden(cold, golden)
        assert_is_golden(warm, golden)
        assert cold.cached_tokens == 0
        if is_scored:
            assert_scores_are_golden(cold, golden)
        # Of a prompt of whole blocks all but the last one may come from the cache, but a state's snapshot of it stands
        # at its end.
        if len(golden["prompt_ids"]) % 16 or family not in (*RECURRENT, THREE_KINDS):
            assert (warm.cached_tokens > 0) == (len(golden["prompt_ids"]) > 16)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_equal_chunk_boundaries_and_buckets_give_equal_bits(tiny_engine: EngineFactory, family: str) -> None:
    # Cold: chunks of 64 tokens, so the last one starts where the warm hit ends and has the same bucket.
    engine = in_chunks(tiny_engine, family)
    forget_prefixes(engine)
    ids = random_prompt(2, 64 * 3 + 10)
    cold, warm = (engine.generate(ids, GREEDY)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 192)
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == cold.samples[0].logprobs
    assert warm.samples[0].top_logprobs == cold.samples[0].top_logprobs


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_eviction_and_retraction_change_no_token(tiny_engine: EngineFactory, family: str) -> None:
    # Undeclared output budgets, and a salt for each, as equal requests would share blocks.
    engine = in_chunks(tiny_engine, family)
    params = dataclasses.replace(GREEDY, max_tokens=None)
    prompts = golden_prompts(family)
    batch = [prompts[index % 3] for index in range(MAX_NUM_SEQS)]
    before = engine.stats().retractions
    outputs = generate_apart(engine, batch, params)
    same: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for output, golden in zip(outputs, batch, strict=True):
        token_ids = output.samples[0].token_ids
        assert token_ids[:24] == golden["output_ids"]
        assert len(golden["prompt_ids"]) + len(token_ids) == MAX_MODEL_LEN
        same.setdefault(tuple(golden["prompt_ids"]), set()).add(tuple(token_ids))
    assert all(len(variants) == 1 for variants in same.values())
    # A request of a model with states alone never grows, so nothing is ever taken from it.
    assert engine.stats().retractions > before or family in ("mamba2", "falcon_mamba")


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_prompts_in_one_chunk_match_alone_and_all_match_in_a_mixed_batch_of_16(
    tiny_engine: EngineFactory, family: str
) -> None:
    engine = in_one_chunk(tiny_engine, family)
    prompts = sorted(golden_prompts(family), key=lambda prompt: len(prompt["prompt_ids"]))
    longest = prompts[-1]
    assert_is_golden(engine.generate(longest["prompt_ids"], GREEDY)[0], longest)
    # It also comes first, and so whole, in a batch whose later prompts are cut where a step is full.
    batch = [prompts[index % 3] for index in range(2, 18)]
    for output, golden in zip(generate_apart(engine, batch, GREEDY), batch, strict=True):
        assert_is_golden(output, golden)
        assert output.cached_tokens == 0


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_a_warm_prompt_in_another_chunk_agrees_with_the_cold_one(tiny_engine: EngineFactory, family: str) -> None:
    engine = in_one_chunk(tiny_engine, family)
    once = dataclasses.replace(GREEDY, max_tokens=1)
    forget_prefixes(engine)
    # 230 tokens cold and 102 warm take the bucket of 256 both: XLA fuses a layer differently for 64 tokens, which alone
    # changes log-probabilities by up to 2e-5.
    ids = random_prompt(8, 230)
    cold = engine.generate(ids, GREEDY)[0]
    forget_prefixes(engine)
    assert engine.generate(ids[:140], once)[0].cached_tokens == cold.cached_tokens == 0
    warm = engine.generate(ids, GREEDY)[0]
    assert warm.cached_tokens == 128
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == pytest.approx(cold.samples[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_greedy_samples_are_all_what_one_sample_is(tiny_engine: EngineFactory, family: str) -> None:
    engine = in_one_chunk(tiny_engine, family)
    for length in (100, 129, 230):
        ids = random_prompt(length, length)
        alone = engine.generate(ids, GREEDY, cache_salt="alone")[0].samples[0]
        together = engine.generate(ids, dataclasses.replace(GREEDY, n=4))[0]
        assert [sample.token_ids for sample in together.samples] == [alone.token_ids] * 4
    scheduler = engine._loop._scheduler  # pyright: ignore[reportPrivateUsage]
    assert scheduler.active_lcm_blocks() == 0
    assert engine.stats().running == engine.stats().waiting == 0
