"""The Mosaic walk over chunks in the CPU interpreter, which models barriers and the copy engine and reports races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import gated_delta_rule as delta_op
from tokenspeed_jax.pallas_kernels import linear_attention as linear_op
from tokenspeed_jax.pallas_kernels.gated_delta_rule.mosaic import gated_delta_rule_mosaic
from tokenspeed_jax.pallas_kernels.linear_attention.mosaic import linear_attention_mosaic
from tokenspeed_jax.pallas_kernels.recurrent_problems import (
    float64_definition,
    ragged_rows,
    random_delta_rule,
    random_linear_attention,
)

BOUND = 4e-3  # of the norm; an output's rounding to bfloat16 alone makes 1.7e-3


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def assert_is_the_definition(scan, inputs, initial, rows, interpret):
    """Relative error in the norm where the definition promises something; no NaN passes."""
    run = jax.jit(lambda inputs, initial, rows: scan(inputs, initial, rows, interpret=interpret))
    result = run(inputs, initial, rows)
    assert result.output.dtype == jnp.bfloat16
    for actual, expected in zip(result, float64_definition(inputs, initial, rows), strict=True):
        promised = ~np.isnan(expected)
        error = np.asarray(actual, np.float64)[promised] - expected[promised]
        assert np.linalg.norm(error) <= BOUND * np.linalg.norm(expected[promised])
    return result


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("decay_per_channel", [False, True])
def test_the_delta_rule_is_its_definition_without_races(interpret, decay_per_channel, extreme):
    """A checkpoint at the end of a chunk, after one token, inside a chunk, none; an empty row; tokens of no row."""
    rng = np.random.default_rng(0)
    inputs = random_delta_rule(
        rng, 350, key_heads=1, heads=2, key_dim=64, value_dim=64, decay_per_channel=decay_per_channel,
        extreme=extreme, dtype=jnp.bfloat16,
    )  # fmt: skip
    initial = jnp.asarray(rng.normal(size=(5, 2, 64, 64)), jnp.float32)
    rows = ragged_rows([70, 0, 66, 130, 64], [64, 0, 1, 100, 64])
    result = assert_is_the_definition(gated_delta_rule_mosaic, inputs, initial, rows, interpret)
    np.testing.assert_array_equal(result.final_states[1], initial[1])
    np.testing.assert_array_equal(result.output[330:], 0.0)


def test_a_state_outlives_many_chunks_in_tiles_of_its_values(interpret):
    """More chunks than slots, twice around; K and V of the models."""
    rng = np.random.default_rng(1)
    inputs = random_delta_rule(
        rng, 400, key_heads=1, heads=1, key_dim=128, value_dim=128, decay_per_channel=False, dtype=jnp.bfloat16
    )
    initial = jnp.asarray(rng.normal(size=(1, 1, 128, 128)), jnp.float32)
    assert_is_the_definition(gated_delta_rule_mosaic, inputs, initial, ragged_rows([400], [256]), interpret)


def test_linear_attention_is_its_definition_without_races(interpret):
    rng = np.random.default_rng(2)
    inputs = random_linear_attention(rng, 140, key_heads=1, heads=2, key_dim=128, value_dim=64, dtype=jnp.bfloat16)
    initial = jnp.asarray(rng.normal(size=(2, 2, 64, 128)), jnp.float32)
    assert_is_the_definition(linear_attention_mosaic, inputs, initial, ragged_rows([130, 10], [65, 10]), interpret)


@pytest.mark.parametrize("op", ["delta", "linear"])
def test_a_refusal_names_the_reason_and_the_call_falls_back(op, monkeypatch):
    def call(implementation="mosaic", dtype=jnp.bfloat16, key_dim=64, value_dim=64):
        rng = np.random.default_rng(3)
        shape = {"key_heads": 1, "heads": 1, "key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}
        initial = jnp.zeros((1, 1, value_dim, key_dim))
        if op == "linear":
            inputs, scan = random_linear_attention(rng, 1, **shape), linear_op.linear_attention
        else:
            inputs, scan = random_delta_rule(rng, 1, decay_per_channel=False, **shape), delta_op.gated_delta_rule
        return scan(inputs, initial, ragged_rows([1]), implementation=implementation)

    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a cpu"):
        call()
    monkeypatch.setattr(linear_op if op == "linear" else delta_op, "hopper_refusal", lambda: None)
    for change, word in (({"dtype": jnp.float32}, "float32"), ({"key_dim": 96}, "96"), ({"value_dim": 80}, "80")):
        with pytest.raises(ValueError, match=word):
            call(**change)
        assert np.isfinite(np.asarray(call(None, **change).output, np.float32)).all()
