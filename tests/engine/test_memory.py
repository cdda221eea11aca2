"""How the arena is sized where the platform says how much memory there is (a GPU, or here a stand-in for one)."""

import pytest

from tokenspeed_jax import ConfigError, Engine, EngineConfig, SamplingParams
from tokenspeed_jax.engine import assembly, memory

from .conftest import GOLDEN

LIMIT = 1 << 30


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that lets JAX allocate `LIMIT` bytes."""
    for module in (assembly, memory):
        monkeypatch.setattr(module, "device_limit", lambda _device: LIMIT)


def config(**changes: object) -> EngineConfig:
    settings = {
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "warmup": False,
        "disable_progress_bars": True,
    } | changes
    return EngineConfig(model=str(GOLDEN / "tiny" / "llama"), **settings)  # type: ignore[arg-type]


@pytest.mark.usefixtures("limited")
def test_the_arena_takes_what_state_and_workspace_leave_of_the_share() -> None:
    with Engine(config(gpu_memory_utilization=0.05)) as engine:
        report = engine.memory_report
        used = report.arena + report.device_state
        assert 0.04 * LIMIT < used <= 0.05 * LIMIT
        assert (
            len(engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))[0].samples[0].token_ids) == 3
        )
        # The costliest program was compiled once more, over a small arena, to learn its temporaries.
        assert used + report.workspace <= 0.05 * LIMIT


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    ("changes", "field", "number"),
    [
        ({"kv_cache_memory_bytes": 2 * LIMIT}, "kv_cache_memory_bytes", str(2 * LIMIT)),
        ({"gpu_memory_utilization": 0.0001}, "gpu_memory_utilization", "0.0001"),
        ({"kv_cache_memory_bytes": 200_000}, "max_model_len", "256"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_number_and_what_to_change(
    changes: dict[str, object], field: str, number: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(config(**changes))
    assert caught.value.field == field
    assert number in str(caught.value)
    assert "lower" in str(caught.value) or "raise" in str(caught.value)
