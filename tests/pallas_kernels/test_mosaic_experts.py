"""The experts' Mosaic kernel in the CPU interpreter, which models barriers and the copy engine and reports races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import experts as op
from tokenspeed_jax.pallas_kernels.experts import mosaic
from tokenspeed_jax.pallas_kernels.experts.activations import GatedActivation
from tokenspeed_jax.pallas_kernels.experts.mosaic import ProductTiling, expert_mlp_mosaic
from tokenspeed_jax.pallas_kernels.experts.problems import ExpertProblem
from tokenspeed_jax.pallas_kernels.experts.reference import expert_mlp_reference
from tokenspeed_jax.pallas_kernels.experts.weights import ExpertWeights

from .one_program import one_program

SWIGLU = GatedActivation("swiglu")
OAI = GatedActivation("swiglu_oai", alpha=1.702, limit=1.0)
SHAPE = {"hidden": 2048, "inner": 768, "top_k": 8, "dtypes": {"bfloat16"}}


@pytest.fixture
def few_blocks(monkeypatch):
    """Simulated blocks cost time even if they have nothing to do."""
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 6)


@pytest.fixture
def interpret(capsys, few_blocks):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def problem(tokens, top_k, num_experts, hidden=128, inner=64, load="even", bias=False):
    case = ExpertProblem.random(
        np.random.default_rng(0), tokens=tokens, top_k=top_k, num_experts=num_experts, hidden=hidden, inner=inner,
        load=load, dtype=jnp.bfloat16, bias=bias,
    )  # fmt: skip
    weights = ExpertWeights(case.gate_up, case.down, case.gate_up_bias, case.down_bias)
    return case.x, weights, case.expert_ids, case.expert_weights


def assert_close(actual, expected):
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "load", "activation", "bias"),
    [
        (5, 2, 4, "even", SWIGLU, False),  # tiles of 8 rows
        (20, 1, 3, "one", OAI, True),  # tiles of 16 rows, two of one expert, none of the others
        (70, 1, 1, "even", SWIGLU, False),  # a tile of 128 rows, two compute warpgroups
        (100, 1, 1, "even", OAI, True),  # a tile of 192 rows, whose third warpgroup has no token
        (3, 2, 129, "even", SWIGLU, False),  # placed by XLA: too many experts for the kernel's table
    ],
)
def test_kernel_equals_the_reference_without_races(interpret, tokens, top_k, num_experts, load, activation, bias):
    arguments = problem(tokens, top_k, num_experts, load=load, bias=bias)
    out = one_program(expert_mlp_mosaic, activation=activation, interpret=interpret)(*arguments)
    assert_close(out, one_program(expert_mlp_reference, activation=activation)(*arguments))


def test_blocks_take_several_items_and_stages_come_around(interpret, monkeypatch):
    """Two blocks for all items, and fewer stages than chunks: loads run ahead into the next item."""
    monkeypatch.setattr(mosaic, "MULTIPROCESSORS", 2)
    monkeypatch.setattr(mosaic, "MAX_STAGES", 2)
    arguments = problem(9, 2, 3, hidden=192, inner=128)
    activation = GatedActivation("swiglu", limit=50.0)  # none of another test's, whose trace would be taken again
    out = one_program(expert_mlp_mosaic, activation=activation, interpret=interpret)(*arguments)
    assert_close(out, one_program(expert_mlp_reference, activation=activation)(*arguments))


def test_no_expert_without_tokens_is_read(interpret):
    x, weights, expert_ids, expert_weights = problem(6, 2, 8, load="few")
    unchosen = np.setdiff1d(np.arange(8), np.asarray(expert_ids))
    assert len(unchosen)
    poisoned = ExpertWeights(weights.gate_up.at[unchosen].set(jnp.nan), weights.down.at[unchosen].set(jnp.nan))
    run = one_program(expert_mlp_mosaic, activation=SWIGLU, interpret=interpret)
    clean = run(x, weights, expert_ids, expert_weights)
    out = run(x, poisoned, expert_ids, expert_weights)
    np.testing.assert_array_equal(out, clean)


@pytest.mark.usefixtures("few_blocks")
def test_gradients_pass_through_the_kernel():
    x, weights, expert_ids, expert_weights = problem(5, 2, 4, bias=True)

    def loss(function, **options):
        def total(x, weights, expert_weights):
            out = function(x, weights, expert_ids, expert_weights, SWIGLU, **options)
            return jnp.sum(
                out.astype(jnp.float32) * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
            )

        return jax.tree.leaves(one_program(jax.grad(total, (0, 1, 2)))(x, weights, expert_weights))

    for actual, expected in zip(
        loss(expert_mlp_mosaic, interpret=plgpu.InterpretGPUParams()), loss(expert_mlp_reference), strict=True
    ):
        scale = np.abs(np.asarray(expected, np.float32)).max()
        assert scale > 0
        np.testing.assert_allclose(actual.astype(jnp.float32), expected.astype(jnp.float32), atol=3e-2 * scale)


def test_tilings_divide_the_outputs_and_fill_the_gpu():
    gate_up = ProductTiling.choose(64, 768, gated=True, tiles=190)
    assert (gate_up.weight_blocks, gate_up.columns) == (2, 128)
    few = ProductTiling.choose(8, 768, gated=True, tiles=8)
    assert (few.weight_blocks, few.columns) == (2, 64)
    odd = ProductTiling.choose(128, 2880, gated=False, tiles=500)  # gpt-oss
    assert (odd.weight_blocks, odd.columns) == (1, 192)
    for tiling in (gate_up, few, odd):
        assert tiling.stages >= 4


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dtypes": {"float32"}}, "float32"),
        ({"dtypes": {"bfloat16", "float16"}}, "bfloat16, float16"),
        ({"hidden": 2000}, "hidden size 2000"),
        ({"inner": 32}, "inner size 32"),
        ({"top_k": 65}, "65 experts per token"),
        ({"hidden": 16448}, "hidden size 16448"),
    ],
)
def test_the_reason_for_refusing_a_geometry_names_it(monkeypatch, change, word):
    assert "not a Hopper GPU" in op.mosaic_refusal(**SHAPE)
    monkeypatch.setattr(op, "hopper_refusal", lambda: None)
    assert op.mosaic_refusal(**SHAPE) is None
    assert word in op.mosaic_refusal(**(SHAPE | change))


def test_asking_for_mosaic_where_it_cannot_run_says_why():
    x, weights, expert_ids, expert_weights = problem(5, 2, 4)
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a cpu"):
        op.expert_mlp(x, weights.gate_up, weights.down, expert_ids, expert_weights, implementation="mosaic")
