"""Recurrences on a Hopper GPU against their references, at the shapes that models have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.linear_attention import linear_attention, linear_attention_step
from tokenspeed_jax.pallas_kernels.recurrent_problems import (
    ragged_rows,
    random_delta_rule,
    random_linear_attention,
    random_selective_scan,
)
from tokenspeed_jax.pallas_kernels.selective_scan import selective_scan
from tokenspeed_jax.pallas_kernels.state_step import state_step_refusal
from tokenspeed_jax.pallas_kernels.triton_calls import triton_missing

LENGTHS, BODIES = (700, 0, 1, 64, 65, 1000, 128), (640, 0, 1, 64, 1, 960, 100)
TOKENS = 2000
GDN = functools.partial(random_delta_rule, key_heads=16, heads=32, key_dim=128, value_dim=128, decay_per_channel=False)
KDA = functools.partial(random_delta_rule, key_heads=32, heads=32, key_dim=128, value_dim=128, decay_per_channel=True)
LINEAR = functools.partial(random_linear_attention, key_heads=8, heads=64, key_dim=128, value_dim=64)
STEPS = {
    "gdn": (gated_delta_rule_step, GDN, (32, 128, 128)),
    "kda": (gated_delta_rule_step, KDA, (32, 128, 128)),
    "linear_attention": (linear_attention_step, LINEAR, (64, 64, 128)),
}
SCANS = {
    "gdn": (gated_delta_rule, GDN, (32, 128, 128)),
    "kda": (gated_delta_rule, KDA, (32, 128, 128)),
    "linear_attention": (linear_attention, LINEAR, (64, 64, 128)),
    "selective_scan": (selective_scan, functools.partial(random_selective_scan, channels=1024, states=16), (1024, 16)),
}

WAYS = [(op, "xla") for op in SCANS] + [(op, "mosaic") for op in ("gdn", "kda", "linear_attention")]


@pytest.fixture(autouse=True)
def _hopper():
    refusal = hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def assert_close(actual, expected, bound):
    """Relative error in the norm; no NaN passes."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


def step_problem(op, rows, dtype=jnp.bfloat16, extreme=False):
    _, make, shape = STEPS[op]
    rng = np.random.default_rng(0)
    inputs = make(rng, rows, dtype=dtype, extreme=extreme)
    states = jax.random.normal(jax.random.key(1), (2 * rows + 1, *shape), jnp.float32)
    ids = rng.permutation(np.arange(1, 2 * rows + 1))
    targets, others = ids[:rows].copy(), ids[rows:]
    # A third in place, a third from other blocks, a third without history; the last row is padding.
    sources = np.where(np.arange(rows) % 3 == 0, targets, np.where(np.arange(rows) % 3 == 1, others, 0))
    targets[-1] = 0
    return inputs, BlockView.from_array(states), jnp.asarray(sources, jnp.int32), jnp.asarray(targets, jnp.int32)


def steps(op, implementation):
    return jax.jit(functools.partial(STEPS[op][0], implementation=implementation))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("op", STEPS)
def test_a_step_equals_the_reference(op, rows, extreme, dtype):
    problem = step_problem(op, rows, dtype, extreme)
    assert state_step_refusal(problem[1]) is None
    out, states = steps(op, "mosaic")(*problem)
    expected, stored = steps(op, "reference")(*problem)
    assert_close(states.array(), stored.array(), 1e-6)
    np.testing.assert_array_equal(np.asarray(out[-1], np.float32), 0.0)
    if rows > 1:
        assert_close(out[:-1], expected[:-1], 1e-6 if dtype == jnp.float32 else 4e-3)


def test_a_step_repeats_bit_for_bit_and_is_the_default():
    problem = step_problem("kda", 64)
    first = steps("kda", "mosaic")(*problem)
    for implementation in ("mosaic", None, "mosaic"):
        again = steps("kda", implementation)(*problem)
        np.testing.assert_array_equal(again[0], first[0])
        np.testing.assert_array_equal(again[1].plane, first[1].plane)


@pytest.mark.parametrize("op", STEPS)
def test_states_stay_in_their_plane(op):
    """Donated, three steps after one another alias the plane whole and hold no copy of it."""

    def thrice(inputs, states, sources, targets):
        total = 0.0
        for _ in range(3):
            out, states = STEPS[op][0](inputs, states, sources, targets, implementation="mosaic")
            total, sources = total + out, targets
        return total, states

    problem = step_problem(op, 64)
    plane_bytes = problem[1].plane.nbytes
    memory = jax.jit(thrice, donate_argnums=1).lower(*problem).compile().memory_analysis()
    assert memory.alias_size_in_bytes == plane_bytes
    assert memory.temp_size_in_bytes < plane_bytes // 8


@pytest.mark.parametrize("op", STEPS)
def test_a_step_reaches_the_last_blocks_of_a_plane_beyond_four_gib(op):
    """Reads and writes lie at both ends of five GiB, where 32-bit byte offsets have wrapped around."""
    rows = 16
    inputs, small, sources, targets = step_problem(op, rows)
    block_bytes, used = small.stride_bytes, small.num_rows - 1
    blocks = -(-5 * 2**30 // block_bytes)
    # Even ids stay low, odd ones go to the end of the plane.
    far = jnp.arange(used + 1)
    far = jnp.where(far % 2 == 1, blocks - used - 1 + far, far)
    plane = jnp.zeros((blocks, block_bytes), jnp.uint8)
    large = dataclasses.replace(small, plane=plane)
    fill = jax.jit(lambda view, ids, values: view.write(ids, values), donate_argnums=0)
    large = fill(large, far[1:], small.array()[1:])
    run = jax.jit(functools.partial(STEPS[op][0], implementation="mosaic"), donate_argnums=1)
    expected, stored = steps(op, "mosaic")(inputs, small, sources, targets)
    out, large = run(inputs, large, far[sources], far[targets])
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(large.take(far), stored.take(jnp.arange(used + 1)))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize(
    ("op", "implementation", "dtype"),
    # The kernel of chunks takes bfloat16 only.
    [(*way, jnp.bfloat16) for way in WAYS] + [(*way, jnp.float32) for way in WAYS if way[1] != "mosaic"],
)
def test_chunks_equal_the_reference(op, implementation, dtype, extreme):
    scan, make, shape = SCANS[op]
    inputs = make(np.random.default_rng(2), TOKENS, dtype=dtype, extreme=extreme)
    initial = jax.random.normal(jax.random.key(3), (len(LENGTHS), *shape), jnp.float32)
    rows = ragged_rows(LENGTHS, BODIES)
    result = jax.jit(functools.partial(scan, implementation=implementation))(inputs, initial, rows)
    expected = jax.jit(functools.partial(scan, implementation="reference"))(inputs, initial, rows)
    bound = 1e-5 if dtype == jnp.float32 else 5e-3
    live = [0, *range(2, len(LENGTHS))]
    assert_close(result.output[: sum(LENGTHS)], expected.output[: sum(LENGTHS)], bound)
    assert_close(result.body_states[jnp.array(live)], expected.body_states[jnp.array(live)], bound)
    assert_close(result.final_states, expected.final_states, bound)


@pytest.mark.parametrize("op", [op for op, implementation in WAYS if implementation == "mosaic"])
def test_the_kernel_is_the_default_repeats_its_bits_and_takes_any_checkpoint(op):
    """Long rows, whose slots go around many times; the same tokens whichever chunks the checkpoint makes of them.

    Where Triton serves the rule with channel gates, it is the default (test_triton_kernels.py).
    """
    scan, make, shape = SCANS[op]
    in_triton = op == "kda" and triton_missing() is None
    inputs = make(np.random.default_rng(6), 3000, dtype=jnp.bfloat16)
    initial = jax.random.normal(jax.random.key(7), (2, *shape), jnp.float32)
    run = {way: jax.jit(functools.partial(scan, implementation=way)) for way in ("reference", "mosaic", None)}
    expected = run["reference"](inputs, initial, ragged_rows([2000, 1000]))
    for bodies in ([2000, 1000], [1, 999], [1024, 77]):
        rows = ragged_rows([2000, 1000], bodies)
        first = run["mosaic"](inputs, initial, rows)
        assert_close(first.output, expected.output, 5e-3)
        assert_close(first.final_states, expected.final_states, 5e-3)
        for way in ("mosaic",) if in_triton else ("mosaic", None):
            for again, before in zip(run[way](inputs, initial, rows), first, strict=True):
                np.testing.assert_array_equal(again, before)


@pytest.mark.parametrize(("op", "implementation"), WAYS)
def test_a_row_gets_the_same_bits_beside_other_rows(op, implementation):
    scan, make, shape = SCANS[op]
    run = jax.jit(functools.partial(scan, implementation=implementation))
    inputs = make(np.random.default_rng(4), TOKENS, dtype=jnp.bfloat16)
    initial = jax.random.normal(jax.random.key(5), (3, *shape), jnp.float32)
    one = run(inputs, initial, ragged_rows([700, 500, 300], [1, 448, 300]))
    other = run(inputs, initial.at[0].set(7.0), ragged_rows([700, 500, 0], [640, 448, 0]))
    np.testing.assert_array_equal(one.output[700:1200], other.output[700:1200])
    np.testing.assert_array_equal(one.final_states[1], other.final_states[1])
    np.testing.assert_array_equal(one.body_states[1], other.body_states[1])
