"""The experts' products: the portable form against the definition, under every kind of load."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.experts import expert_mlp
from tokenspeed_jax.pallas_kernels.experts.activations import GatedActivation
from tokenspeed_jax.pallas_kernels.experts.problems import ExpertProblem
from tokenspeed_jax.pallas_kernels.experts.tiles import ExpertTiles, mosaic_tile_rows, tile_capacity, tile_rows_for


def problem(seed=0, *, tokens=40, top_k=2, num_experts=8, load="even", dtype=jnp.float32, bias=False):
    return ExpertProblem.random(
        np.random.default_rng(seed), tokens=tokens, top_k=top_k, num_experts=num_experts, hidden=32, inner=16,
        load=load, dtype=dtype, bias=bias,
    )  # fmt: skip


place = jax.jit(ExpertTiles.of, static_argnums=(1, 2))
compiled_mlp = jax.jit(expert_mlp, static_argnames=("activation", "alpha", "limit", "implementation"))


def run(problem, implementation=None, **options):
    return compiled_mlp(*problem.arguments(), implementation=implementation, **options)


@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([1, 600]),
    shape=st.sampled_from([(1, 1), (2, 8), (4, 64)]),
    load=st.sampled_from(["even", "one", "few"]),
)
@settings(max_examples=20, deadline=None)
def test_tiles_of_experts_give_what_every_expert_gives(seed, tokens, shape, load):
    top_k, num_experts = shape
    case = problem(seed, tokens=tokens, top_k=top_k, num_experts=num_experts, load=load)
    np.testing.assert_allclose(run(case), run(case, "reference"), atol=2e-5, rtol=1e-5)


def test_gpt_oss_activation_with_biases_equals_the_reference():
    case = problem(bias=True)
    options = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 1.0} | case.biases()
    out = run(case, **options)
    np.testing.assert_allclose(out, run(case, "reference", **options), atol=2e-5)
    assert np.abs(out - run(case, **(options | {"down_bias": None}))).max() > 0.1


def test_bfloat16_rounds_where_the_reference_does():
    case = problem(dtype=jnp.bfloat16)
    out, expected = run(case), run(case, "reference")
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), rtol=1e-2, atol=1e-2)


def test_a_result_depends_on_no_token_beside_it():
    """Bit for bit: the others change, and with them the token's place among its expert's tokens."""
    case, other = problem(0), problem(1)
    mine = jnp.arange(40) % 3 == 0

    def mixed(a, b):
        return jnp.where(mine.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    beside = case._replace(
        x=mixed(case.x, other.x),
        expert_ids=mixed(case.expert_ids, other.expert_ids),
        expert_weights=mixed(case.expert_weights, other.expert_weights),
    )
    np.testing.assert_array_equal(run(case)[mine], run(beside)[mine])


def test_a_padding_token_of_nan_stays_in_its_row():
    case = problem(0)
    dirty = case._replace(x=case.x.at[39].set(jnp.nan), expert_weights=case.expert_weights.at[39].set(jnp.nan))
    np.testing.assert_array_equal(run(case)[:39], run(dirty)[:39])


def test_gradients_reach_tokens_weights_and_experts():
    case = problem(0, tokens=12)

    def loss(implementation):
        def total(x, gate_up, down, weights):
            out = expert_mlp(x, gate_up, down, case.expert_ids, weights, implementation=implementation)
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(total, (0, 1, 2, 3)))(case.x, case.gate_up, case.down, case.expert_weights)

    for actual, expected in zip(loss("xla"), loss("reference"), strict=True):
        assert np.abs(expected).max() > 0
        np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_memory_does_not_grow_with_tokens_times_experts():
    case = problem(tokens=1024, top_k=2, num_experts=64)
    compiled = jax.jit(lambda arguments: expert_mlp(*arguments)).lower(case.arguments()).compile()
    every_expert = 1024 * 64 * 2 * 16 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < every_expert / 4


@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([21, 600]),
    load=st.sampled_from(["even", "one", "few"]),
    rows=st.sampled_from([1, 8, 16]),
)
@settings(max_examples=30, deadline=None)
def test_tiles_hold_every_choice_once_and_one_expert_each(seed, tokens, load, rows):
    case = problem(seed, tokens=tokens, load=load)
    tiles = place(case.expert_ids, 8, rows)
    slots = np.asarray(tiles.slot_of_choice)
    assert len(np.unique(slots)) == slots.size
    np.testing.assert_array_equal(np.asarray(tiles.expert_of_tile)[slots // rows], case.expert_ids)
    np.testing.assert_array_equal(np.asarray(tiles.token_of_slot)[slots], np.arange(tokens)[:, None] + np.zeros((1, 2)))
    counts = np.bincount(np.asarray(case.expert_ids).reshape(-1), minlength=8)
    assert (
        int(tiles.num_live)
        == sum(-(-counts // rows))
        <= tile_capacity(2 * tokens, 8, rows)
        == len(tiles.expert_of_tile)
    )
    order = np.argsort(slots.reshape(-1))
    chosen = np.asarray(case.expert_ids).reshape(-1)[order]
    assert (np.diff(chosen * 1000 + order // 2) >= 0).all()  # by expert, and by token within one


def test_tiles_grow_with_the_load():
    assert tile_rows_for(16, 128) == 8
    assert tile_rows_for(512 * 8, 128) == 32
    assert tile_rows_for(8192 * 8, 128) == 128
    assert mosaic_tile_rows(512 * 8, 128) == 64


@pytest.mark.parametrize(("gate", "up", "expected"), [(1, 2, 2.537387), (10, -9, -41.999719), (-3, 0.5, -0.027107)])
def test_gpt_oss_activation_is_the_worked_example(gate, up, expected):
    """model-families.md F1."""
    function = GatedActivation("swiglu_oai", 1.702, 7.0)
    assert function(jnp.float32(gate), jnp.float32(up)) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("gate", "up", "expected"), [(12, -11, -99.995460), (-12, 3, -0.000221)])
def test_clamped_swiglu_is_the_worked_example(gate, up, expected):
    """model-families.md F1."""
    function = GatedActivation("swiglu", limit=10.0)
    assert function(jnp.float32(gate), jnp.float32(up)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"x": jnp.zeros((40, 31))}, {}, "do not fit"),
        ({"down": jnp.zeros((8, 32, 15))}, {}, "do not fit"),
        ({"gate_up": jnp.zeros((8, 31, 32))}, {}, "2 \\* inner"),
        ({"expert_ids": jnp.zeros((39, 2), jnp.int32)}, {}, "expert_ids"),
        ({"expert_ids": jnp.zeros((40, 2))}, {}, "float32"),
        ({"expert_weights": jnp.zeros((40, 3))}, {}, "weights"),
        ({}, {"down_bias": jnp.zeros((8, 31))}, "down_bias"),
        ({}, {"alpha": 1.0}, "alpha"),
        ({}, {"activation": "swiglu_oai"}, "alpha"),
        ({}, {"activation": "relu"}, "relu"),
        ({}, {"limit": -1.0}, "limit"),
        ({}, {"implementation": "cuda"}, "cuda"),
    ],
)
def test_what_does_not_fit_is_refused(change, options, message):
    with pytest.raises(ValueError, match=message):
        expert_mlp(*problem()._replace(**change).arguments(), **options)
