"""How much of a shared prefix the scheduler grants each family, by engines whose steps compute nothing.

That what is granted changes no token is shown by test_tiny_goldens.py and test_state_reuse.py.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax import SamplingParams
from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.sampling_params import MAX_TOP_LOGPROBS
from tokenspeed_jax.engine.step import DeviceOutputs

from ..families import ALL
from .conftest import EngineFactory
from .three_kinds import THREE_KINDS

ONCE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


@pytest.fixture
def _steps_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_programs: StepPrograms, built: BuiltBatch) -> DeviceOutputs:
        return DeviceOutputs(jnp.zeros((built.layout.bucket.rows, 3 + 2 * MAX_TOP_LOGPROBS), jnp.int32))

    monkeypatch.setattr(StepPrograms, "run", run)
    monkeypatch.setattr(CacheArena, "zero_blocks", lambda _arena, _blocks: None)


@pytest.mark.usefixtures("_steps_compute_nothing")
@pytest.mark.parametrize("family", [*ALL, THREE_KINDS])
def test_a_shared_prefix_of_200_tokens_hits_at_64_whatever_a_state_takes(
    tiny_engine: EngineFactory, family: str
) -> None:
    engine = tiny_engine(family, prefix_granularity=64, max_model_len=320)
    first = np.random.default_rng(6).integers(3, 500, 220).tolist()
    assert engine.generate(first, ONCE)[0].cached_tokens == 0
    assert engine.generate([*first[:200], 500, *range(3, 23)], ONCE)[0].cached_tokens == 192
    # The next one parts at 200 too, where the second left what it knew.
    assert engine.generate([*first[:200], 501, *range(3, 23)], ONCE)[0].cached_tokens == 192
