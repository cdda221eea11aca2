"""The residual sum and its norm in one: the kernel does what the plain form does, gradients included."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.add_norm import add_norm, mosaic_refusal
from tokenspeed_jax.pallas_kernels.add_norm.mosaic import add_norm_mosaic
from tokenspeed_jax.pallas_kernels.add_norm.reference import add_norm_reference
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

add_norm_op = importlib.import_module("tokenspeed_jax.pallas_kernels.add_norm")
RULES = {
    "llama": NormRule(1e-6),
    "olmo": NormRule(1e-5, rounds_first=False),
    "gemma": NormRule(1e-6, rounds_first=False, gain_offset=1.0),
}
EXACT = {"xla_allow_excess_precision": False}


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def rows(tokens, dim, dtype="bfloat16", seed=0):
    """x, update and weights; rows differ in size."""
    rng = np.random.default_rng(seed)
    x, update = rng.standard_normal((2, tokens, dim)) * np.geomspace(0.01, 30, tokens)[:, None]
    return tuple(jnp.asarray(a, dtype) for a in (x, update, 1 + 0.1 * rng.standard_normal(dim)))


def run_kernel(arguments, rule, interpret):
    """XLA would otherwise leave out roundings between the interpreter's operations, which the GPU does."""
    run = functools.partial(add_norm_mosaic, rule=rule, interpret=interpret)
    return jax.jit(run, compiler_options=EXACT)(*arguments)


def assert_same(actual, expected):
    """The same sums; norms but for the last bit of rare elements, where the sum of squares rounds the other way."""
    np.testing.assert_array_equal(actual[0], expected[0])
    a, b = (np.asarray(x, np.float32) for x in (actual[1], expected[1]))
    np.testing.assert_allclose(a, b, rtol=2**-7)
    assert (a != b).mean() < 1e-3


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize(("dim", "dtype"), [(2048, "bfloat16"), (768, "bfloat16"), (512, "float16")])
def test_kernel_equals_the_plain_form(interpret, rule, dim, dtype):
    x, update, weight = rows(4, dim, dtype)
    expected = add_norm(x, update, Norm(weight, rule), implementation="reference")
    assert_same(run_kernel((x, update, weight), rule, interpret), expected)


def test_a_row_depends_on_no_other(interpret):
    x, update, weight = rows(3, 1024)
    together = run_kernel((x, update, weight), RULES["llama"], interpret)
    alone = run_kernel((x.at[:2].set(jnp.nan), update, weight), RULES["llama"], interpret)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one[2], other[2])
        assert np.isnan(np.asarray(one[:2], np.float32)).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_gradients_of_the_kernel_are_those_of_the_plain_form(rule, monkeypatch):
    """The backward pass is written by hand; here the plain form stands for the kernel in the forward pass."""
    x, update, weight = (a.astype(jnp.float32) for a in rows(4, 256))
    target = jnp.asarray(np.random.default_rng(1).standard_normal((2, 4, 256)), jnp.float32)

    def loss(function, *arguments):
        return sum(jnp.vdot(out, to) for out, to in zip(function(*arguments), target, strict=True))

    def plain(x, update, weight, *, rule):
        return add_norm_reference(x, update, Norm(weight, rule))

    monkeypatch.setattr(add_norm_op, "add_norm_mosaic", plain)
    kernel = functools.partial(add_norm_op._with_gradients, rule=rule)
    expected = jax.grad(functools.partial(loss, functools.partial(plain, rule=rule)), (0, 1, 2))(x, update, weight)
    actual = jax.grad(functools.partial(loss, kernel), (0, 1, 2))(x, update, weight)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_call_that_does_not_fit_is_refused():
    x, update, weight = rows(4, 256)
    norm = Norm(weight, RULES["llama"])
    with pytest.raises(ValueError, match="cannot add"):
        add_norm(x, update[:2], norm)
    with pytest.raises(ValueError, match="cannot add"):
        add_norm(x, update.astype(jnp.float32), norm)
    with pytest.raises(ValueError, match="do not fit weights"):
        add_norm(x, update, Norm(weight[:-1], norm.rule))
    with pytest.raises(ValueError, match="'mosaic' cannot serve"):
        add_norm(x, update, norm, implementation="mosaic")
    assert "float32 is neither" in mosaic_refusal(dim=256, dtype="float32")
    assert "rows of 640" in mosaic_refusal(dim=640, dtype="bfloat16")
