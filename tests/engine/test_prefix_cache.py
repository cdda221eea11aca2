"""A warm prefix is visible in `cached_tokens` and changes nothing else."""

import numpy as np
import pytest

from tokenspeed_jax import SamplingParams

from ..families import ALL
from .conftest import EngineFactory

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


@pytest.mark.parametrize("family", ALL)
def test_a_warm_request_agrees_with_the_cold_one(tiny_engine: EngineFactory, family: str) -> None:
    engine = tiny_engine(family)
    ids = prompt(1, 230)
    cold, warm = (engine.generate(ids, GREEDY)[0] for _ in range(2))
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == 192
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == pytest.approx(cold.samples[0].logprobs, abs=1e-5)


@pytest.mark.parametrize("family", ALL)
def test_equal_chunk_boundaries_and_buckets_give_equal_bits(tiny_engine: EngineFactory, family: str) -> None:
    # Cold: chunks of 64 tokens, so the last one starts where the warm hit ends and has the same bucket.
    engine = tiny_engine(family, max_num_batched_tokens=64)
    ids = prompt(2, 64 * 3 + 40)
    cold, warm = (engine.generate(ids, GREEDY)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 192)
    assert warm.samples[0].token_ids == cold.samples[0].token_ids
    assert warm.samples[0].logprobs == cold.samples[0].logprobs


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
