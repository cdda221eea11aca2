"""Steps take their rows from a copy of the block tables that is brought up to date by what plans change."""

import pytest

from tokenspeed_jax import Engine, SamplingParams

from .conftest import EngineFactory
from .table_watch import watch_tables

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


@pytest.fixture
def watched_engine(tiny_engine: EngineFactory) -> tuple[Engine, list[int]]:
    engine = tiny_engine("llama", max_num_seqs=1, max_num_batched_tokens=64, prefix_granularity=16, kernel_page_size=16)
    return engine, watch_tables(engine, every=1)


def test_changes_beyond_a_steps_room_are_applied_before_it(watched_engine: tuple[Engine, list[int]]) -> None:
    """A long prompt fills a row at once; when it comes again, the row of the request before is emptied too."""
    engine, early_calls = watched_engine
    engine.generate([5, 6, 7], GREEDY)
    assert not any(early_calls)
    prompt = [5 + token % 400 for token in range(450)]
    first = engine.generate(prompt, GREEDY)[0]
    assert sum(early_calls) == 1
    second = engine.generate(prompt, GREEDY)[0]
    assert sum(early_calls) == 2
    assert second.cached_tokens == 448
    assert second.samples[0].token_ids == first.samples[0].token_ids
