"""Recurrences by chunks against their definition in float64: any rows, any checkpoint, any gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.gated_delta_rule import gated_delta_rule
from tokenspeed_jax.pallas_kernels.gated_delta_rule.reference import gated_delta_rule_reference
from tokenspeed_jax.pallas_kernels.linear_attention import linear_attention
from tokenspeed_jax.pallas_kernels.linear_attention.reference import linear_attention_reference
from tokenspeed_jax.pallas_kernels.recurrent_problems import (
    float64_definition,
    ragged_rows,
    random_delta_rule,
    random_linear_attention,
    random_selective_scan,
)
from tokenspeed_jax.pallas_kernels.selective_scan import selective_scan
from tokenspeed_jax.pallas_kernels.selective_scan.reference import selective_scan_reference

TOKENS, ROWS = 320, 8
# Of the largest value in the compared array, for float32 inputs; measured errors are below a third of it.
BOUND = 1e-5

OPS = {
    "gdn": (gated_delta_rule, functools.partial(random_delta_rule, decay_per_channel=False), (4, 8, 16)),
    "kda": (gated_delta_rule, functools.partial(random_delta_rule, decay_per_channel=True), (4, 8, 16)),
    "linear_attention": (linear_attention, random_linear_attention, (4, 8, 16)),
    "selective_scan": (selective_scan, random_selective_scan, (6, 5)),
}
REFERENCES = {
    "gdn": gated_delta_rule_reference,
    "kda": gated_delta_rule_reference,
    "linear_attention": linear_attention_reference,
    "selective_scan": selective_scan_reference,
}
LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65]  # model-families.md, invariant 11
BODIES = [0, 1, 9, 16, 16, 17, 1, 64]


@functools.cache
def compiled(op, implementation="xla"):
    return jax.jit(functools.partial(OPS[op][0], implementation=implementation))


def problem(op, seed, tokens=TOKENS, rows=ROWS, extreme=False):
    rng = np.random.default_rng(seed)
    inputs = OPS[op][1](rng, tokens, extreme=extreme)
    return inputs, jnp.asarray(rng.normal(size=(rows, *OPS[op][2])), jnp.float32)


def assert_close(actual, expected, bound=BOUND):
    """Where the definition promises something; a NaN or Inf in `actual` fails."""
    actual = np.asarray(actual, np.float64)
    promised = ~np.isnan(expected)
    assert np.isfinite(actual[promised]).all()
    if promised.any():
        error = np.abs(actual - expected)[promised].max()
        assert error <= bound * max(np.abs(expected[promised]).max(), 1e-3)


def assert_is_the_definition(op, inputs, initial, rows, implementation="xla"):
    result = compiled(op, implementation)(inputs, initial, rows)
    for actual, expected in zip(result, float64_definition(inputs, initial, rows), strict=True):
        assert_close(actual, expected)
    return result


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_lengths_around_the_chunks_in_one_batch(op, extreme, implementation):
    inputs, initial = problem(op, 0, extreme=extreme)
    result = assert_is_the_definition(op, inputs, initial, ragged_rows(LENGTHS, BODIES), implementation)
    np.testing.assert_array_equal(result.final_states[0], initial[0])
    assert result.output.dtype == jnp.float32


@st.composite
def cuts(draw):
    lengths = draw(st.lists(st.integers(0, TOKENS // ROWS), min_size=ROWS, max_size=ROWS))
    long = draw(st.integers(0, ROWS - 1))
    lengths[long] = draw(st.integers(0, TOKENS - sum(lengths) + lengths[long]))
    return lengths, [draw(st.integers(1, length)) if length else 0 for length in lengths]


@pytest.mark.parametrize("op", OPS)
@settings(max_examples=15, deadline=None)
@given(cuts(), st.integers(0, 99), st.booleans())
def test_any_rows_and_checkpoints(op, cut, seed, extreme):
    inputs, initial = problem(op, seed, extreme=extreme)
    assert_is_the_definition(op, inputs, initial, ragged_rows(*cut))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_errors_do_not_grow_with_the_length(op, extreme):
    inputs, initial = problem(op, 1, tokens=4096, rows=1, extreme=extreme)
    assert_is_the_definition(op, inputs, initial, ragged_rows([4096], [2048]))


@pytest.mark.parametrize("op", ["gdn", "kda"])
@pytest.mark.parametrize("decay", [0.0, -1e-4])
def test_one_key_again_and_again_stays_exact(op, decay):
    """The triangular system of equal keys has an inverse whose power series overflows float32's digits."""
    inputs, initial = problem(op, 2)
    same = jnp.broadcast_to(inputs.k[:1], inputs.k.shape)
    inputs = inputs._replace(k=same, beta=jnp.ones_like(inputs.beta), log_decay=jnp.full_like(inputs.log_decay, decay))
    assert_is_the_definition(op, inputs, initial, ragged_rows([TOKENS, *[0] * (ROWS - 1)]))


@pytest.mark.parametrize("op", OPS)
def test_a_row_does_not_see_the_rows_beside_it(op):
    """Bit for bit, even where the others hold NaN and where they are cut elsewhere."""
    inputs, initial = problem(op, 3)
    ours = slice(100, 230)
    before, after = [40, 60, 0], [20, 3, 30, 0]
    result = compiled(op)(inputs, initial, ragged_rows([*before, 130, *after], [40, 20, 0, 70, 1, 3, 30, 0]))
    per_token = inputs[:4] if op == "selective_scan" else inputs
    other = tuple(jnp.full_like(x, jnp.nan).at[ours].set(x[ours]) for x in per_token)
    spoiled = inputs._replace(**dict(zip(inputs._fields, other, strict=False)))
    states = jnp.full_like(initial, jnp.nan).at[3].set(initial[3])
    rows = ragged_rows([1, 98, 1, 130, 0, 90, 0, 0], [1, 64, 1, 70, 0, 1, 0, 0])
    beside = compiled(op)(spoiled, states, rows)
    np.testing.assert_array_equal(beside.output[ours], result.output[ours])
    np.testing.assert_array_equal(beside.body_states[3], result.body_states[3])
    np.testing.assert_array_equal(beside.final_states[3], result.final_states[3])


@pytest.mark.parametrize("op", OPS)
def test_resuming_from_a_checkpoint_continues_bit_for_bit(op):
    """The chunks of the tail are those of a run that starts there (invariants 12 and 37)."""
    inputs, initial = problem(op, 4)
    empty = [0] * (ROWS - 1)
    whole = compiled(op)(inputs, initial, ragged_rows([300, *empty], [128, *empty]))
    moved = tuple(jnp.roll(x, -128, axis=0) for x in (inputs[:4] if op == "selective_scan" else inputs))
    tail = inputs._replace(**dict(zip(inputs._fields, moved, strict=False)))
    resumed = compiled(op)(tail, initial.at[0].set(whole.body_states[0]), ragged_rows([172, *empty]))
    np.testing.assert_array_equal(resumed.output[:172], whole.output[128:300])
    np.testing.assert_array_equal(resumed.final_states[0], whole.final_states[0])


@pytest.mark.parametrize("op", OPS)
def test_16_bit_inputs_come_out_in_their_dtype_as_exact_as_it_is(op):
    rng = np.random.default_rng(5)
    inputs = OPS[op][1](rng, TOKENS, dtype=jnp.bfloat16)
    initial = jnp.asarray(rng.normal(size=(ROWS, *OPS[op][2])), jnp.float32)
    rows = ragged_rows(LENGTHS, BODIES)
    result = compiled(op)(inputs, initial, rows)
    assert result.output.dtype == jnp.bfloat16
    assert result.final_states.dtype == jnp.float32
    for actual, expected in zip(result, float64_definition(inputs, initial, rows), strict=True):
        assert_close(actual, expected, 5e-3)


@pytest.mark.parametrize("op", OPS)
def test_an_implementation_it_does_not_have_is_refused_with_the_reason(op):
    inputs, initial = problem(op, 6)
    for name, word in (("mosaic", "cannot serve this call"), ("fast", "must be None or one of")):
        with pytest.raises(ValueError, match=word):
            OPS[op][0](inputs, initial, ragged_rows(LENGTHS), implementation=name)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_the_definition(op):
    """With respect to every input and the initial states, through outputs, body states and final states."""
    inputs, initial = problem(op, 8)
    rows = ragged_rows(LENGTHS, BODIES)
    assert sum(LENGTHS) < TOKENS
    rng, result = np.random.default_rng(9), compiled(op)(inputs, initial, rows)
    weights = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in result]
    # An empty row's body state means nothing.
    weights[1] = weights[1].at[0].set(0.0)
    weights[0] = weights[0].at[sum(LENGTHS) :].set(0.0)

    def loss(scan, inputs, initial):
        result = scan(inputs, initial, rows)
        return sum(jnp.vdot(x, w) for x, w in zip(result, weights, strict=True))

    gradients = [
        jax.jit(jax.grad(functools.partial(loss, scan), argnums=(0, 1)))(inputs, initial)
        for scan in (compiled(op), REFERENCES[op])
    ]
    for actual, expected in zip(*(jax.tree.leaves(x) for x in gradients), strict=True):
        assert np.abs(expected).max() > 0
        assert_close(actual, np.asarray(expected, np.float64), 1e-4)
