"""What is taken from the prefix cache; test_tiny_goldens.py shows for every family that it changes no token."""

import numpy as np

from tokenspeed_jax import SamplingParams

from .conftest import EngineFactory

GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


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
