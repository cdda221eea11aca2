"""Router recipes: which experts are chosen, and the weights they get."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.experts import RoutingRule, route

RULES = [
    RoutingRule(3),
    RoutingRule(2, "softmax_topk", scale=2.0),
    RoutingRule(3, "sigmoid", scale=2.5),
    RoutingRule(3, "sigmoid", num_groups=4, top_groups=2, scale=1.5),
]


def random_logits(seed, tokens=6, experts=8):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((tokens, experts)), jnp.float32)


def of_sigmoids(*scores):
    scores = jnp.asarray([scores], jnp.float32)
    return jnp.log(scores) - jnp.log1p(-scores)


def test_grouped_sigmoid_routing_is_the_worked_example():
    """model-families.md F6, R3: groups 3 and 0 are kept, the tie with group 1 going to the lower index."""
    logits = of_sigmoids(0.9, 0.1, 0.8, 0.7, 0.2, 0.95, 0.3, 0.4)
    bias = jnp.asarray([0, 0.5, 0, 0, 0, 0, 0.9, 0], jnp.float32)
    rule = RoutingRule(3, "sigmoid", scale=2.5, num_groups=4, top_groups=2)
    ids, weights = route(logits, rule, bias)
    np.testing.assert_array_equal(ids, [[6, 0, 1]])
    np.testing.assert_allclose(weights, [[0.576923, 1.730769, 0.192308]], atol=1e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_renormalised_weights_sum_to_the_scale(rule, seed):
    ids, weights = route(random_logits(seed), rule)
    np.testing.assert_allclose(weights.sum(-1), rule.scale, rtol=1e-5)
    assert ids.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    assert all(len(set(row)) == rule.top_k for row in np.asarray(ids).tolist())


def test_without_renormalisation_weights_are_the_scores():
    logits = random_logits(0)
    ids, weights = route(logits, RoutingRule(2, renormalize=False, scale=3.0))
    chosen = jnp.take_along_axis(jax.nn.softmax(logits), ids, axis=-1)
    np.testing.assert_allclose(weights, 3.0 * chosen, rtol=1e-6)


def test_softmax_over_the_selected_ignores_the_others():
    logits = random_logits(1)
    ids, weights = route(logits, RoutingRule(2, "softmax_topk"))
    others = jnp.full(logits.shape, -50.0).at[jnp.arange(6)[:, None], ids].set(jnp.take_along_axis(logits, ids, -1))
    np.testing.assert_allclose(route(others, RoutingRule(2))[1], weights, rtol=1e-5)


@given(seed=st.integers(0, 10_000), shift=st.floats(-3, 3))
@settings(max_examples=20, deadline=None)
def test_a_constant_selection_bias_changes_nothing(seed, shift):
    logits = jnp.round(random_logits(seed) * 16) / 16  # so that the shift cannot make a near tie a tie
    for rule in RULES[2:]:
        plain, biased = route(logits, rule), route(logits, rule, jnp.full((8,), np.float32(shift)))
        np.testing.assert_array_equal(plain[0], biased[0])
        np.testing.assert_array_equal(plain[1], biased[1])


def test_a_selection_bias_never_enters_the_weights():
    logits = random_logits(2)
    ids, weights = route(logits, RoutingRule(8, "sigmoid"), jnp.arange(8.0))
    scores = jnp.take_along_axis(jax.nn.sigmoid(logits), ids, axis=-1)
    np.testing.assert_array_equal(ids, np.tile(np.arange(7, -1, -1), (6, 1)))
    np.testing.assert_allclose(weights, scores / scores.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_ties_go_to_the_lower_index(rule):
    ids, _ = route(jnp.zeros((1, 8)), rule)
    np.testing.assert_array_equal(ids[0], np.arange(rule.top_k))


def test_experts_outside_the_best_groups_are_never_chosen_even_below_zero():
    """A negative biased score inside a kept group still beats every expert outside it."""
    rule = RoutingRule(2, "sigmoid", num_groups=2, top_groups=1)
    logits = of_sigmoids(0.9, 0.1, 0.4, 0.5)
    ids, _ = route(logits, rule, jnp.asarray([1.0, -0.5, 0.0, 0.0]))
    np.testing.assert_array_equal(ids, [[0, 1]])


def test_a_token_of_nan_stays_in_its_row():
    logits = random_logits(3)
    for rule in RULES:
        clean = route(logits, rule)
        ids, weights = route(logits.at[2].set(jnp.nan), rule)
        assert ((ids >= 0) & (ids < 8)).all()
        keep = np.arange(6) != 2
        np.testing.assert_array_equal(ids[keep], clean[0][keep])
        np.testing.assert_array_equal(weights[keep], clean[1][keep])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoutingRule(0), "top_k"),
        (lambda: RoutingRule(2, "tanh"), "tanh"),
        (lambda: RoutingRule(2, "softmax_topk", renormalize=False), "renormalize"),
        (lambda: RoutingRule(2, num_groups=2, top_groups=3), "top_groups"),
        (lambda: route(random_logits(0), RoutingRule(9)), "top_k 9"),
        (lambda: route(random_logits(0), RoutingRule(2, num_groups=3)), "3 equal groups"),
        (lambda: route(random_logits(0), RoutingRule(2, num_groups=8)), "groups of 1"),
        (lambda: route(random_logits(0), RoutingRule(2), jnp.zeros(8)), "selection bias"),
    ],
)
def test_rules_that_cannot_choose_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
