"""The experts' Mosaic kernel on a Hopper GPU against the reference, at the shapes that models have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.experts import Router
from tokenspeed_jax.pallas_kernels import experts as op
from tokenspeed_jax.pallas_kernels.experts import RoutingRule, expert_mlp, route
from tokenspeed_jax.pallas_kernels.experts.combination import combine_mosaic
from tokenspeed_jax.pallas_kernels.experts.dispatch import dispatch_mosaic
from tokenspeed_jax.pallas_kernels.experts.problems import ExpertProblem
from tokenspeed_jax.pallas_kernels.experts.tiles import ExpertTiles, mosaic_tile_rows
from tokenspeed_jax.pallas_kernels.experts.xla import combine

# (experts, top k, hidden, inner): Qwen3-30B-A3B, MiniMax-M2, Qwen3-Next, gpt-oss, one expert, and a tiny layer.
GEOMETRIES = [
    (128, 8, 2048, 768), (64, 8, 3072, 1536), (64, 10, 2048, 512), (32, 4, 2880, 2880), (1, 1, 256, 128), (8, 2, 64, 64)
]  # fmt: skip
OAI = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0}


@pytest.fixture(autouse=True)
def _hopper():
    refusal = op.hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def assert_close(actual, expected):
    """Relative error in the norm, as bf16 outputs of a float32 computation allow; no NaN passes."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= 6e-3 * np.linalg.norm(expected)


def problem(geometry, tokens, load="even", seed=0, dtype=jnp.bfloat16, bias=False):
    num_experts, top_k, hidden, inner = geometry
    return ExpertProblem.random(
        np.random.default_rng(seed), tokens=tokens, top_k=top_k, num_experts=num_experts, hidden=hidden, inner=inner,
        load=load, dtype=dtype, bias=bias,
    )  # fmt: skip


def run(case, implementation, **options):
    function = functools.partial(expert_mlp, implementation=implementation, **options)
    return jax.jit(function)(*case.arguments())


@pytest.mark.parametrize("load", ["even", "one", "few"])
@pytest.mark.parametrize("tokens", [1, 64, 300])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_kernel_equals_the_reference(geometry, tokens, load):
    case = problem(geometry, tokens, load)
    assert_close(run(case, "mosaic"), run(case, "reference"))


def test_long_steps_equal_the_portable_form():
    case = problem(GEOMETRIES[0], 8192)
    assert_close(run(case, "mosaic"), run(case, "xla"))


# Tokens, experts, experts per token: blocks count for themselves; a kernel counts before; XLA adds up its counts.
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"),
    [(1, 128, 8), (64, 128, 8), (64, 512, 10), (100, 4, 4), (1000, 128, 8), (8192, 128, 8), (9000, 1, 1)],
)
@pytest.mark.parametrize("load", ["even", "one", "few"])
def test_tokens_stand_where_the_portable_form_puts_them(tokens, num_experts, top_k, load):
    case = problem((num_experts, top_k, 2048, 64), tokens, load)
    rows = mosaic_tile_rows(tokens * top_k, num_experts)
    x_slots, tiles = jax.jit(dispatch_mosaic, static_argnums=(2, 3))(case.x, case.expert_ids, num_experts, rows)
    expected = ExpertTiles.of(case.expert_ids, num_experts, rows)
    live, slots = int(expected.num_live), expected.slot_of_choice
    np.testing.assert_array_equal(tiles.slot_of_choice, slots)
    np.testing.assert_array_equal(tiles.num_live, [live])
    np.testing.assert_array_equal(tiles.expert_of_tile[:live], expected.expert_of_tile[:live])
    used = np.bincount(np.asarray(slots).reshape(-1) // rows, minlength=tiles.rows_of_tile.size)
    np.testing.assert_array_equal(tiles.rows_of_tile, used)
    assert bool(jnp.all(x_slots[slots] == case.x[:, None]))


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 8, 2048), (64, 10, 2048), (300, 8, 3072), (8192, 8, 2048)])
def test_the_weighted_sum_equals_the_portable_form(tokens, top_k, hidden):
    keys = jax.random.split(jax.random.key(0), 3)
    y = jax.random.normal(keys[0], (tokens * top_k, hidden), jnp.bfloat16)
    slots = jax.random.permutation(keys[1], tokens * top_k).reshape(tokens, top_k).astype(jnp.int32)
    weights = jax.random.uniform(keys[2], (tokens, top_k))
    assert_close(jax.jit(combine_mosaic)(y, slots, weights), jax.jit(combine)(y, slots, weights))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("tokens", [3, 100, 2000])
def test_gpt_oss_experts_with_biases_equal_the_portable_form(tokens, dtype):
    case = problem(GEOMETRIES[3], tokens, dtype=dtype, bias=True)
    options = OAI | case.biases()
    assert_close(run(case, "mosaic", **options), run(case, "xla", **options))


def test_no_expert_without_tokens_is_read():
    case = problem(GEOMETRIES[0], 16, "few")
    unchosen = np.setdiff1d(np.arange(128), np.asarray(case.expert_ids))
    poisoned = case._replace(gate_up=case.gate_up.at[unchosen].set(jnp.nan), down=case.down.at[unchosen].set(jnp.nan))
    np.testing.assert_array_equal(run(poisoned, "mosaic"), run(case, "mosaic"))


def test_a_padding_token_of_nan_stays_in_its_row():
    case = problem(GEOMETRIES[0], 64)
    dirty = case._replace(x=case.x.at[63].set(jnp.nan))
    np.testing.assert_array_equal(run(dirty, "mosaic")[:63], run(case, "mosaic")[:63])


def test_the_kernel_repeats_bit_for_bit():
    """A race would move the bits."""
    for tokens in (64, 2000):
        case = problem(GEOMETRIES[0], tokens)
        first = run(case, "mosaic")
        for _ in range(5):
            np.testing.assert_array_equal(run(case, "mosaic"), first)


def test_mosaic_serves_bf16_by_default_and_xla_serves_float32():
    case = problem((8, 2, 128, 64), 20)
    np.testing.assert_array_equal(run(case, None), run(case, "mosaic"))
    exact = problem((8, 2, 128, 64), 20, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(run(exact, None), run(exact, "reference"), atol=2e-5)


def test_the_router_does_not_round_its_weights():
    """TF32 would make ties of weights that differ in the 14th bit."""
    router = Router(64, 128, dtype=jnp.float32, rngs=nnx.Rngs(0))
    places = np.random.default_rng(0).permutation(128)
    router.weight[...] = jnp.zeros((128, 64)).at[:, 0].set(1 + places * 2.0**-14)
    logits = nnx.jit(lambda router, x: router(x))(router, jnp.ones((1, 64)))
    ids, _ = route(logits, RoutingRule(8))
    np.testing.assert_array_equal(ids[0], np.argsort(-places)[:8])


def test_the_weights_are_read_in_place():
    """No copy of them: the compiled step's temporaries stay far below."""
    case = problem(GEOMETRIES[0], 64)
    compiled = jax.jit(functools.partial(expert_mlp, implementation="mosaic")).lower(*case.arguments()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < case.down.nbytes // 8
