"""Linear layers: the portable form and, in the CPU interpreter, the Mosaic kernel against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import linear as op
from tokenspeed_jax.pallas_kernels.linear import linear, mosaic_refusal
from tokenspeed_jax.pallas_kernels.linear.mosaic import (
    CHUNK,
    COLUMNS,
    LinearTiling,
    linear_mosaic,
    mosaic_shape_refusal,
)
from tokenspeed_jax.pallas_kernels.linear.reference import linear_reference

from .one_program import one_program

portable = jax.jit(linear, static_argnames=("gate", "implementation"))


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def problem(tokens, outputs, channels, bias=False, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal(shape), dtype)

    weight = normal(outputs, channels, scale=channels**-0.5)
    return normal(tokens, channels), weight, normal(outputs) if bias else None


def assert_close(actual, expected, tolerance=1e-2):
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 9),
    outputs=st.sampled_from([2, 6, 64]),
    channels=st.sampled_from([1, 5, 64]),
    bias=st.booleans(),
    gate=st.sampled_from([None, "silu", "gelu_tanh"]),
)
def test_the_portable_form_is_the_definition(tokens, outputs, channels, bias, gate):
    arguments = problem(tokens, outputs, channels, bias, jnp.float32)
    assert_close(portable(*arguments, gate=gate, implementation="xla"), linear_reference(*arguments, gate), 1e-5)


@pytest.mark.parametrize(
    ("tokens", "outputs", "channels", "tiling", "gate", "bias"),
    [
        (8, 128, 192, LinearTiling(64, 2), None, False),
        (16, 96, 256, LinearTiling(48, 3), None, True),  # two pieces of rows, an odd number of columns of 16
        (64, 64, 128, LinearTiling(32, 4), None, False),  # more stages than chunks
        (24, 128, 256, LinearTiling(64, 2), "silu", True),  # gate and up in one tile, each with its bias
        (8, 192, 128, LinearTiling(96, 2), "gelu_tanh", False),
    ],
)
def test_kernel_equals_the_definition_without_races(interpret, tokens, outputs, channels, tiling, gate, bias):
    x, weight, b = problem(tokens, outputs, channels, bias)
    out = one_program(linear_mosaic, gate=gate, tiling=tiling, interpret=interpret)(x, weight, b)
    assert out.dtype == x.dtype
    assert_close(out, linear_reference(x, weight, b, gate))


def test_a_token_that_is_not_a_number_stays_in_its_row(interpret):
    x, weight, _ = problem(16, 64, 128)
    broken = x.at[3].set(jnp.nan)
    tiling = LinearTiling(64, 2)
    run = one_program(linear_mosaic, bias=None, gate=None, tiling=tiling, interpret=interpret)
    out, clean = (run(y, weight) for y in (broken, x))
    rows = np.arange(16) != 3
    np.testing.assert_array_equal(np.asarray(out, np.float32)[rows], np.asarray(clean, np.float32)[rows])
    assert np.isnan(np.asarray(out, np.float32)[3]).all()


def test_gradients_are_those_of_the_portable_form(interpret):
    x, weight, bias = problem(8, 64, 64, bias=True)

    def of(function):
        return jax.grad(lambda x, w, b: function(x, w, b).astype(jnp.float32).sum(), argnums=(0, 1, 2))(x, weight, bias)

    tiling = LinearTiling(64, 2)
    mosaic = of(lambda x, w, b: linear_mosaic(x, w, b, "silu", tiling=tiling, interpret=interpret))
    xla = of(lambda x, w, b: linear(x, w, b, gate="silu", implementation="xla"))
    for a, b in zip(mosaic, xla, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@settings(max_examples=200, deadline=None)
@given(tokens=st.integers(17, 64), outputs=st.integers(1, 400), channels=st.integers(1, 200), gated=st.booleans())
def test_every_product_that_is_not_refused_has_a_tiling_that_covers_it(tokens, outputs, channels, gated):
    outputs *= 64
    fields = {"tokens": tokens, "outputs": outputs, "gated": gated}
    if mosaic_shape_refusal(**fields, channels=channels * CHUNK, dtypes={"bfloat16"}):
        return
    tiling = LinearTiling.choose(**fields)
    assert tiling.columns in COLUMNS
    assert outputs % tiling.columns == 0
    assert tiling.stages >= 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 65}, "65 tokens"),
        ({"tokens": 16}, "16 tokens"),
        ({"tokens": 33}, "33 tokens"),
        ({"outputs": 4097}, "4097 rows"),
        ({"outputs": 4128, "gated": True}, "4128 rows"),
        ({"channels": 4095}, "4095 input channels"),
        ({"outputs": 64}, "too small"),
        ({"dtypes": {"float32"}}, "neither bfloat16 nor float16"),
        ({"dtypes": {"float16", "bfloat16"}}, "different dtypes"),
    ],
)
def test_what_the_kernel_does_not_serve_is_refused_with_the_reason(changes, reason):
    fields = {"tokens": 32, "outputs": 4096, "channels": 4096, "gated": False, "dtypes": {"bfloat16"}} | changes
    assert reason in (mosaic_shape_refusal(**fields) or "")


def test_another_device_is_refused_when_named_and_served_by_xla_otherwise(monkeypatch):
    monkeypatch.setattr(op, "hopper_refusal", lambda: "the default device is a toaster")
    x, weight, _ = problem(2, 64, 64)
    assert mosaic_refusal(x, weight, gated=False) == "the default device is a toaster"
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a toaster"):
        linear(x, weight, implementation="mosaic")
    assert_close(linear(x, weight), linear_reference(x, weight, None, None))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": jnp.zeros((2, 3))}, "x must be"),
        ({"bias": jnp.zeros(3)}, "bias must be"),
        ({"gate": "relu"}, "gate must be"),
        ({"weight": jnp.zeros((3, 4)), "gate": "silu"}, "even number of rows"),
        ({"implementation": "cuda"}, "implementation must be"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(change, match):
    arguments = {"x": jnp.zeros((2, 4)), "weight": jnp.zeros((6, 4))} | change
    with pytest.raises(ValueError, match=match):
        linear(**arguments)
