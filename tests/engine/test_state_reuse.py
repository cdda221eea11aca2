"""A prefix taken from the cache gives what computing it gives, for every family that carries states.

Bits depend on the shapes of a step: on a CPU a product of one row is summed in another order than one of sixteen,
and XLA fuses a layer differently for 64 tokens than for 256. Both change a log-probability by up to 2e-5. Exactness is
therefore claimed where cold and warm runs take the same buckets: one request at a time has one shape of each.
"""

import numpy as np
import pytest

from tokenspeed_jax import Engine

from ..families import RECURRENT
from ..tiny_sizes import BLOCK
from .conftest import EngineFactory, of_shared_sizes
from .reuse_pairs import Triple, draw_triples, forget_prefixes, run_one_after_another
from .three_kinds import THREE_KINDS

CHUNK = 64
STATE_FAMILIES = (*RECURRENT, THREE_KINDS)
STATES_ALONE = ("mamba2", "falcon_mamba")
"""Without keys and values nothing says how far a prompt is known, and no snapshot is made there for the next one."""


def engine_with(tiny_engine: EngineFactory, family: str, granularity: int) -> Engine:
    return of_shared_sizes(tiny_engine, family, max_num_batched_tokens=CHUNK, checkpoint_granularity=granularity)


def assert_reuse_is_exact(engine: Engine, family: str, triples: list[Triple]) -> None:
    forget_prefixes(engine)
    cold = run_one_after_another(engine, [t.second for t in triples])
    forget_prefixes(engine)
    cold += run_one_after_another(engine, [t.third for t in triples])
    assert all(run.granted == 0 for run in cold)
    forget_prefixes(engine)
    lost = engine.stats().checkpoint_lost_tokens
    order = [prompt for t in triples for prompt in (t.first, t.second, t.third)]
    warm = run_one_after_another(engine, order)
    pairs = list(zip(cold, warm[1::3] + warm[2::3], strict=True))
    for before, after in pairs:
        assert after.output.cached_tokens == after.granted
        assert after.token_ids == before.token_ids
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        same_cuts = after.ends == tuple(end for end in before.ends if end > after.granted)
        if same_cuts and after.granted in (0, *before.ends):
            assert after.logprobs == before.logprobs
    # The first triple shares exactly the cold runs' first chunk.
    assert warm[1].granted == warm[2].granted == cold[0].ends[0] == CHUNK
    missed = 0
    for triple, second, third in zip(triples, warm[1::3], warm[2::3], strict=True):
        known = triple.shared // BLOCK * BLOCK
        assert second.granted % BLOCK == 0
        assert second.granted <= known
        if known == len(triple.first) // BLOCK * BLOCK:
            assert second.granted == known
        if family not in STATES_ALONE:
            # The second prompt left a snapshot where the third one parts from it.
            assert third.granted == known
            missed += known - second.granted
    assert engine.stats().checkpoint_lost_tokens - lost == missed


@pytest.mark.parametrize("granularity", [4, BLOCK])
@pytest.mark.parametrize("family", STATE_FAMILIES, scope="module")
def test_a_shared_prefix_changes_no_token_and_no_log_probability(
    tiny_engine: EngineFactory, family: str, granularity: int
) -> None:
    """Six triples, two pairs each, for nine families and two granularities: 216 pairs."""
    rng = np.random.default_rng([STATE_FAMILIES.index(family), granularity])
    assert_reuse_is_exact(engine_with(tiny_engine, family, granularity), family, draw_triples(rng, 6, BLOCK, CHUNK))


@pytest.mark.long
@pytest.mark.parametrize("granularity", [4, BLOCK])
@pytest.mark.parametrize("family", STATE_FAMILIES, scope="module")
def test_many_shared_prefixes(tiny_engine: EngineFactory, family: str, granularity: int) -> None:
    engine = engine_with(tiny_engine, family, granularity)
    for seed in range(20):
        rng = np.random.default_rng([seed, STATE_FAMILIES.index(family), granularity, 1])
        assert_reuse_is_exact(engine, family, draw_triples(rng, 12, BLOCK, CHUNK))
