"""The Mosaic step in the CPU interpreter, which models barriers and the copy engine and reports races."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import gated_delta_rule as delta_op
from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.gated_delta_rule.reference import gated_delta_rule_step_reference
from tokenspeed_jax.pallas_kernels.linear_attention.reference import linear_attention_step_reference
from tokenspeed_jax.pallas_kernels.recurrent_problems import random_delta_rule, random_linear_attention
from tokenspeed_jax.pallas_kernels.state_step import state_step_mosaic, state_step_refusal


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def spaced_blocks(rng, shape, gap, first_row):
    """Blocks with `gap` bytes of another field before each payload; the null block and those before it hold NaN."""
    payload = rng.normal(size=(6, int(np.prod(shape)))).astype(np.float32)
    raw = np.full((6 + first_row, gap + payload[0].nbytes), 0xFF, np.uint8)
    raw[first_row + 1 :, gap:] = payload[1:].view(np.uint8)
    return BlockView(jnp.asarray(raw), shape, "float32", raw.shape[1], gap, first_row)


def assert_same_steps(mosaic, reference, live):
    (out, states), (expected, stored) = mosaic, reference
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(out[live], expected[live], atol=1e-2)
    assert (out[[i for i in range(len(out)) if i not in live]] == 0).all()
    states, stored = (np.asarray(x.plane).view(np.float32) for x in (states, stored))
    np.testing.assert_allclose(states, stored, atol=1e-5)


# In place, from one block to another, without history, two rows of padding.
SOURCES, TARGETS = jnp.array([3, 2, 0, 5, 0], jnp.int32), jnp.array([3, 4, 1, 0, -1], jnp.int32)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("decay_per_channel", [False, True])
def test_the_delta_rule_step_equals_the_reference_without_races(interpret, decay_per_channel, extreme):
    rng = np.random.default_rng(0)
    inputs = random_delta_rule(
        rng, 5, key_heads=1, heads=2, key_dim=64, value_dim=128, decay_per_channel=decay_per_channel,
        extreme=extreme, dtype=jnp.bfloat16,
    )  # fmt: skip
    states = spaced_blocks(rng, (2, 128, 64), gap=4096, first_row=2)
    mosaic = state_step_mosaic(*inputs, states, SOURCES, TARGETS, interpret=interpret)
    assert_same_steps(mosaic, gated_delta_rule_step_reference(inputs, states, SOURCES, TARGETS), [0, 1, 2])


def test_the_linear_attention_step_equals_the_reference_without_races(interpret):
    rng = np.random.default_rng(1)
    inputs = random_linear_attention(rng, 5, key_heads=1, heads=2, key_dim=128, value_dim=64, dtype=jnp.float32)
    states = spaced_blocks(rng, (2, 64, 128), gap=0, first_row=1)
    mosaic = state_step_mosaic(*inputs, None, states, SOURCES, TARGETS, interpret=interpret)
    assert_same_steps(mosaic, linear_attention_step_reference(inputs, states, SOURCES, TARGETS), [0, 1, 2])


def test_the_reason_for_refusing_states_names_it():
    served = BlockView(jnp.zeros((2, 36864), jnp.uint8), (1, 64, 128), "float32", stride_bytes=36864, offset_bytes=4096)
    assert state_step_refusal(served) is None
    for change, word in (
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"shape": (1, 64, 96)}, "96"),
        ({"shape": (1, 80, 128)}, "80"),
        ({"offset_bytes": 512}, "from 512"),
        ({"stride_bytes": 36864 + 512}, "every 37376"),
    ):
        assert word in state_step_refusal(dataclasses.replace(served, **change))


def test_asking_for_mosaic_where_it_cannot_run_says_why():
    inputs = random_delta_rule(np.random.default_rng(2), 1, decay_per_channel=False)
    states = BlockView.from_array(jnp.zeros((2, 4, 8, 16)))
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a cpu"):
        delta_op.gated_delta_rule_step(inputs, states, one, one, implementation="mosaic")
