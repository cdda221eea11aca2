"""Facts of the recurrences by themselves: the numbers and invariants of model-families.md, and steps over blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.causal_convolution import causal_convolution
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule, gated_delta_rule_step
from tokenspeed_jax.pallas_kernels.linear_attention import linear_attention, linear_attention_step
from tokenspeed_jax.pallas_kernels.recurrent_problems import (
    float64_definition,
    ragged_rows,
    random_delta_rule,
    random_linear_attention,
    random_selective_scan,
)
from tokenspeed_jax.pallas_kernels.selective_scan import selective_scan, selective_scan_step

delta_rule, delta_rule_step, attention, attention_step, scan, scan_step = (
    jax.jit(op, static_argnames=("implementation",))
    for op in (
        gated_delta_rule, gated_delta_rule_step, linear_attention, linear_attention_step, selective_scan,
        selective_scan_step,
    )
)  # fmt: skip
convolution = jax.jit(causal_convolution)

EXP_A = np.exp(-0.5)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def softplus(x):
    return np.log1p(np.exp(np.asarray(x, np.float64)))


def vectors(gates, betas):
    """The tokens of F2 and F3, queries normed as the model norms them, from the identity as state."""
    q, k, v = np.array([[1, 2], [0, 1.0]]), np.array([[2, 1], [1, 1.0]]), np.array([[0.5, -1], [1, 1.0]])
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    count = len(gates)
    arrays = (q[:count] * 2**-0.5, k[:count], v[:count], np.asarray(gates), np.asarray(betas))
    return DeltaRuleInputs(*(jnp.asarray(x[:, None], jnp.float32) for x in arrays)), jnp.eye(2)[None, None]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_kda_with_bounded_gates_gives_vector_f2(implementation):
    gates = -5 * sigmoid(EXP_A * (np.array([[0.1, -0.2], [0, 0]]) + np.array([0, 0.1])))
    np.testing.assert_allclose(gates[0], (-2.575793, -2.424207), atol=1e-6)
    assert ((gates > -5) & (gates < 0)).all()
    inputs, state = vectors(gates, sigmoid([0.3, 0]))
    result = delta_rule(inputs, state, ragged_rows([2], [1]), implementation=implementation)
    np.testing.assert_allclose(result.output[0, 0], (0.164423, -0.281819), atol=2e-6)
    np.testing.assert_allclose(result.body_states[0, 0], [[0.298023, 0.110965], [-0.534143, -0.178523]], atol=2e-6)
    np.testing.assert_allclose(result.output[1, 0], (0.250153, 0.250546), atol=2e-6)
    np.testing.assert_allclose(result.final_states[0, 0], [[0.369790, 0.353770], [0.324066, 0.354326]], atol=2e-6)


def test_kda_without_a_bound_gives_vector_f2():
    gates = -EXP_A * softplus(np.array([[0.1, -0.2]]) + np.array([0, 0.1]))
    inputs, state = vectors(gates, sigmoid([0.3]))
    result = delta_rule(inputs, state, ragged_rows([1]))
    np.testing.assert_allclose(result.output[0, 0], (0.178763, 0.004583), atol=2e-6)
    np.testing.assert_allclose(result.final_states[0, 0], [[0.600986, -0.017844], [-0.669237, 0.341865]], atol=2e-6)


def test_gdn_gives_vector_f3():
    inputs, state = vectors(-EXP_A * softplus([0.2 + 0.1]), sigmoid([0.3]))
    result = delta_rule(inputs, state, ragged_rows([1]))
    np.testing.assert_allclose(result.output[0, 0], (0.177712, -0.034820), atol=2e-6)
    np.testing.assert_allclose(result.final_states[0, 0], [[0.578786, -0.008405], [-0.650651, 0.270270]], atol=2e-6)


def delta_problem(per_channel, tokens=70):
    rng = np.random.default_rng(0)
    return random_delta_rule(rng, tokens, decay_per_channel=per_channel), jnp.asarray(
        rng.normal(size=(1, 4, 8, 16)), jnp.float32
    )


@pytest.mark.parametrize("per_channel", [False, True])
def test_without_strength_the_state_only_decays(per_channel):
    """Invariants 13 and 14."""
    inputs, state = delta_problem(per_channel)
    result = delta_rule(inputs._replace(beta=jnp.zeros_like(inputs.beta)), state, ragged_rows([70]))
    decay = np.exp(np.asarray(inputs.log_decay, np.float64).sum(0))
    expected = np.asarray(state[0]) * (decay[:, None, :] if per_channel else decay[:, None, None])
    np.testing.assert_allclose(result.final_states[0], expected, rtol=1e-4, atol=1e-30)
    assert jnp.linalg.norm(result.final_states) <= jnp.linalg.norm(state)


def test_a_full_correction_stores_the_value_under_its_key():
    """Invariant 13: no decay, strength 1 and a unit key."""
    inputs, state = delta_problem(False)
    inputs = inputs._replace(beta=jnp.ones_like(inputs.beta), log_decay=jnp.zeros_like(inputs.log_decay))
    result = delta_rule(inputs, state, ragged_rows([70]))
    seen = jnp.einsum("hvk,hk->hv", result.final_states[0], jnp.repeat(inputs.k[69], 2, axis=0))
    np.testing.assert_allclose(seen, inputs.v[69], atol=1e-5)


def test_one_gate_a_head_and_the_same_gate_in_every_channel_coincide():
    """Invariant 15."""
    inputs, state = delta_problem(False)
    wide = inputs._replace(log_decay=jnp.broadcast_to(inputs.log_decay[..., None], (70, 4, 16)))
    scalar, channels = (delta_rule(x, state, ragged_rows([70])) for x in (inputs, wide))
    np.testing.assert_allclose(channels.output, scalar.output, atol=2e-6)
    np.testing.assert_allclose(channels.final_states, scalar.final_states, atol=2e-6)


def test_linear_attention_is_symmetric_in_keys_and_values():
    """Invariant 16 as far as one layout has it: exchanging keys and values transposes the state."""
    inputs = random_linear_attention(np.random.default_rng(1), 70, key_heads=4, key_dim=8, value_dim=8)
    state = jnp.asarray(np.random.default_rng(2).normal(size=(1, 4, 8, 8)), jnp.float32)
    straight = attention(inputs, state, ragged_rows([70]))
    turned = attention(inputs._replace(k=inputs.v, v=inputs.k), jnp.swapaxes(state, 2, 3), ragged_rows([70]))
    np.testing.assert_allclose(jnp.swapaxes(turned.final_states, 2, 3), straight.final_states, atol=2e-5)


@pytest.mark.parametrize("split", [1, 2, 3, 30, 69])
def test_a_convolution_window_holds_the_last_raw_inputs_and_carries_the_rest_of_the_row(split):
    """Invariants 12 and 17."""
    rng = np.random.default_rng(3)
    x, old = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((70, 6), (1, 6, 3)))
    weight = jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)
    whole = convolution(x, weight, None, old, ragged_rows([70], [split]))
    if split >= 3:
        np.testing.assert_array_equal(whole.body_states[0], x[split - 3 : split].T)
    rest = convolution(x[split:], weight, None, whole.body_states, ragged_rows([70 - split]))
    np.testing.assert_array_equal(rest.output, whole.output[split:])
    np.testing.assert_array_equal(rest.final_states, whole.final_states)


STEPS = {
    "gdn": (delta_rule_step, delta_rule, functools.partial(random_delta_rule, decay_per_channel=False)),
    "kda": (delta_rule_step, delta_rule, functools.partial(random_delta_rule, decay_per_channel=True)),
    "linear_attention": (attention_step, attention, random_linear_attention),
    "selective_scan": (scan_step, scan, random_selective_scan),
}


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("op", STEPS)
def test_a_step_reads_and_writes_the_blocks_it_names_and_no_other(op, extreme, implementation):
    step, _, make = STEPS[op]
    rng = np.random.default_rng(4)
    inputs = make(rng, 5, extreme=extreme)
    shape = (6, 5) if op == "selective_scan" else (4, 8, 16)
    stored = jnp.asarray(rng.normal(size=(7, *shape)), jnp.float32).at[0].set(jnp.nan)
    # In place, from one block to another, without history, two rows of padding.
    sources, targets = jnp.array([3, 2, 0, 5, 0], jnp.int32), jnp.array([3, 4, 1, 0, -1], jnp.int32)
    output, states = step(inputs, BlockView.from_array(stored), sources, targets, implementation=implementation)
    before = jnp.where((sources > 0).reshape(5, *[1] * len(shape)), stored[sources], 0.0)
    expected, _, after = float64_definition(inputs, before, ragged_rows([1] * 5))
    np.testing.assert_allclose(output[:3], expected[:3], rtol=1e-5, atol=1e-5 * np.abs(expected[:3]).max())
    blocks = np.asarray(stored, np.float64)
    blocks[[3, 4, 1]] = after[:3]
    written = np.asarray(states.plane).view(np.float32).reshape(stored.shape)
    np.testing.assert_allclose(written, blocks, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(blocks)))
    untouched = [0, 2, 5, 6]
    np.testing.assert_array_equal(written[untouched], stored[jnp.array(untouched)])


@pytest.mark.parametrize("op", STEPS)
def test_steps_continue_what_chunks_began(op):
    """Invariant 36 for one recurrence: 70 tokens at once, or 66 and four steps."""
    step, scan, make = STEPS[op]
    rng = np.random.default_rng(5)
    inputs = make(rng, 70)
    shape = (6, 5) if op == "selective_scan" else (4, 8, 16)
    zeros = jnp.zeros((1, *shape), jnp.float32)
    whole = scan(inputs, zeros, ragged_rows([70], [66]))
    view = BlockView.from_array(jnp.concatenate([zeros, whole.body_states]))
    one = jnp.array([1], jnp.int32)
    for token in range(66, 70):
        now = [x if name == "rate" else x[token : token + 1] for name, x in inputs._asdict().items()]
        output, view = step(type(inputs)(*now), view, one, one)
        np.testing.assert_allclose(output[0], whole.output[token], atol=1e-5)
    np.testing.assert_allclose(view.array()[1], whole.final_states[0], atol=1e-5)
