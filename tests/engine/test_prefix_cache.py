"""A warm prefix is visible in `cached_tokens` and changes nothing else."""

import dataclasses

import numpy as np
import pytest

from tokenspeed_jax import SamplingParams

from ..families import ALL
from .conftest import EngineFactory
from .three_kinds import THREE_KINDS

FAMILIES = (*ALL, THREE_KINDS)
# The five most likely tokens are asked for as in test_tiny_goldens.py, whose programs serve here too then.
GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_a_warm_request_agrees_with_the_cold_one(tiny_engine: EngineFactory, family: str) -> None:
    # 230 tokens cold and 102 warm take the bucket of 256 both: XLA fuses a layer differently for 64 tokens, which
    # alone changes log-probabilities by up to 2e-5.
    engine = tiny_engine(family, prefix_granularity=128)
    ids = prompt(1, 230)
    cold, warm = (engine.generate(ids, GREEDY)[0] for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 128
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == pytest.approx(cold.samples[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_equal_chunk_boundaries_and_buckets_give_equal_bits(tiny_engine: EngineFactory, family: str) -> None:
    # Cold: chunks of 64 tokens, so the last one starts where the warm hit ends and has the same bucket.
    engine = tiny_engine(family, max_num_batched_tokens=64)
    ids = prompt(2, 64 * 3 + 40)
    cold, warm = (engine.generate(ids, GREEDY)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 192)
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == cold.samples[0].logprobs
    assert warm.samples[0].top_logprobs == cold.samples[0].top_logprobs


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_a_shared_prefix_of_200_tokens_hits_at_64(tiny_engine: EngineFactory, family: str) -> None:
    engine = tiny_engine(family, max_num_batched_tokens=64)
    first = prompt(6, 230)
    params = dataclasses.replace(GREEDY, max_tokens=1)
    assert engine.generate(first, params)[0].cached_tokens == 0
    assert engine.generate([*first[:200], 500, *prompt(7, 20)], params)[0].cached_tokens == 192


def test_turns_of_a_conversation_reuse_prompt_and_reply(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    first = engine.generate(prompt(3, 70), SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True))[0]
    history = first.prompt_token_ids + first.samples[0].token_ids
    second = engine.generate([*history, *prompt(4, 10)], GREEDY)[0]
    assert second.cached_tokens == 128


def test_without_prefix_caching_nothing_is_reused(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama", max_num_batched_tokens=64, enable_prefix_caching=False)
    ids = prompt(5, 200)
    outputs = [engine.generate(ids, GREEDY)[0] for _ in range(2)]
    assert [output.cached_tokens for output in outputs] == [0, 0]
