"""The samples of one request: they draw what requests of their own would draw, and compute their prompt once."""

import dataclasses

import numpy as np
import pytest

from tokenspeed_jax import Engine, SamplingParams
from tokenspeed_jax.engine.sampler import sample_seed

from .conftest import EngineFactory, of_shared_sizes

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


class Watched:
    """An engine's scheduler, counting what is planned."""

    def __init__(self, engine: Engine) -> None:
        self._scheduler = engine._loop._scheduler  # pyright: ignore[reportPrivateUsage]
        self.prefill_tokens = 0
        self.copies = 0

    def next_execution_plan(self) -> object:
        plan = self._scheduler.next_execution_plan()
        batch = plan.forward[0]
        self.prefill_tokens += sum(batch.input_lengths[: batch.num_extends()])
        self.copies += sum(map(len, plan.pages_to_copy.values()))
        return plan

    def __getattr__(self, name: str) -> object:
        return getattr(self._scheduler, name)


@pytest.fixture
def watched(tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, Watched]:
    engine = tiny_engine("llama")
    scheduler = Watched(engine)
    monkeypatch.setattr(engine._loop, "_scheduler", scheduler)  # pyright: ignore[reportPrivateUsage]
    return engine, scheduler


def assert_all_blocks_are_back(engine: Engine) -> None:
    scheduler = engine._loop._scheduler  # pyright: ignore[reportPrivateUsage]
    assert scheduler.active_lcm_blocks() == 0
    assert engine.stats().running == engine.stats().waiting == 0


def test_samples_of_a_prompt_of_one_token_are_what_one_sample_is(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    alone = engine.generate([7], GREEDY)[0].samples[0].token_ids
    together = engine.generate([7], dataclasses.replace(GREEDY, n=4))[0]
    assert [sample.token_ids for sample in together.samples] == [alone] * 4
    assert_all_blocks_are_back(engine)


@pytest.mark.parametrize("length", [64, 101])
def test_samples_draw_what_requests_of_their_seeds_draw(tiny_engine: EngineFactory, length: int) -> None:
    engine = tiny_engine("llama")
    ids = prompt(7, length)
    together = engine.generate(ids, dataclasses.replace(RANDOM, n=4))[0]
    # Seeds whose first sample has the noise of sample 0, 1, 2 and 3 of seed 5.
    seeds = [(5 + index * 0x9E3779B97F4A7C15) % 2**64 for index in range(4)]
    assert [sample_seed(seed, 0) for seed in seeds] == [sample_seed(5, index) for index in range(4)]
    accepted = [(index, seed) for index, seed in enumerate(seeds) if seed < 2**63]
    assert len(accepted) > 1
    for index, seed in accepted:
        alone = engine.generate(ids, dataclasses.replace(RANDOM, seed=seed))[0].samples[0]
        assert together.samples[index].token_ids == alone.token_ids
    assert len({tuple(sample.token_ids) for sample in together.samples}) == 4


@pytest.mark.parametrize(("length", "copies"), [(200, 1), (193, 0)])
def test_the_prompt_is_computed_once(watched: tuple[Engine, Watched], length: int, copies: int) -> None:
    engine, scheduler = watched
    output = engine.generate(prompt(length + 1000, length), dataclasses.replace(RANDOM, n=5))[0]
    assert scheduler.prefill_tokens == length + 4
    assert scheduler.copies == 4 * copies
    assert output.cached_tokens == 0, "no earlier request had computed any of it"
    assert_all_blocks_are_back(engine)


def test_more_samples_than_slots_are_served_too(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama", max_num_seqs=4)
    ids = prompt(9, 100)
    alone = engine.generate(ids, GREEDY)[0].samples[0].token_ids
    together = engine.generate(ids, dataclasses.replace(GREEDY, n=11))[0]
    assert [sample.token_ids for sample in together.samples] == [alone] * 11
    assert_all_blocks_are_back(engine)


def test_samples_run_without_prefix_caching(tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine("llama", enable_prefix_caching=False)
    scheduler = Watched(engine)
    monkeypatch.setattr(engine._loop, "_scheduler", scheduler)  # pyright: ignore[reportPrivateUsage]
    alone = engine.generate(prompt(3, 100), RANDOM)[0].samples[0].token_ids
    assert scheduler.prefill_tokens == 100
    together = engine.generate(prompt(3, 100), dataclasses.replace(RANDOM, n=3))[0]
    assert together.samples[0].token_ids == alone
    assert scheduler.prefill_tokens == 100 + 102


def test_copies_compile_nothing_once_the_engine_is_warm(tiny_engine: EngineFactory) -> None:
    engine = of_shared_sizes(tiny_engine, "llama", max_num_batched_tokens=64, warmup=True)
    programs = engine._assembly.programs  # pyright: ignore[reportPrivateUsage]
    assert programs.model.arena.compilations == 2
    engine.generate(prompt(4, 100), dataclasses.replace(RANDOM, n=6))
    assert engine.stats().compilations_after_warmup == 0
