"""A decoder layer after its attention: the portable form and, in the CPU interpreter, the Mosaic kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import decoder_tail as op
from tokenspeed_jax.pallas_kernels.decoder_tail import decoder_tail
from tokenspeed_jax.pallas_kernels.decoder_tail.mosaic import (
    MULTIPROCESSORS,
    SHARED_BYTES,
    TailTiling,
    decoder_tail_mosaic,
    mosaic_shape_refusal,
)
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

LLAMA, GEMMA = NormRule(1e-6), NormRule(1e-5, rounds_first=False, gain_offset=1.0)


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def problem(tokens, hidden, mixed, inner, rule=LLAMA, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return (
        normal(tokens, hidden),
        normal(tokens, mixed),
        normal(hidden, mixed) / mixed**0.5,
        Norm(normal(hidden), rule),
        normal(2 * inner, hidden) / hidden**0.5,
        normal(hidden, inner) / inner**0.5,
    )


def expected(x, mixed, out_weight, norm, gate_up, down, activation):
    """In numpy, float32."""
    x, mixed, out_weight, gain, gate_up, down = (
        np.asarray(a, np.float32) for a in (x, mixed, out_weight, norm.weight, gate_up, down)
    )
    total = x + mixed @ out_weight.T
    normed = total / np.sqrt((total**2).mean(-1, keepdims=True) + norm.rule.epsilon) * (gain + norm.rule.gain_offset)
    left, right = np.split(normed @ gate_up.T, 2, axis=1)
    gate = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}[activation]
    return total + (np.asarray(gate(left)) * right) @ down.T


def whole(result):
    stream, update = result
    return np.asarray(stream, np.float32) + (0 if update is None else np.asarray(update, np.float32))


def assert_close(actual, wanted, tolerance):
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(("rule", "activation"), [(LLAMA, "silu"), (GEMMA, "gelu_tanh")])
def test_the_portable_forms_are_the_definition(implementation, rule, activation):
    arguments = problem(5, 24, 40, 16, rule, jnp.float32)
    out = decoder_tail(*arguments, activation=activation, implementation=implementation)
    assert_close(whole(out), expected(*arguments, activation), 1e-5)


@pytest.mark.parametrize(
    ("tokens", "sizes", "rule", "activation"),
    [
        (5, (64, 128, 128), LLAMA, "silu"),  # more blocks for the gated product than for the others
        (64, (128, 64, 64), GEMMA, "gelu_tanh"),  # and fewer
    ],
)
def test_the_kernel_equals_the_definition(interpret, tokens, sizes, rule, activation):
    arguments = problem(tokens, *sizes, rule)
    x, mixed, out_weight, norm, gate_up, down = arguments
    weights = (out_weight, norm.weight, gate_up, down)
    out = decoder_tail_mosaic(x, mixed, *weights, rule=rule, activation=activation, interpret=interpret)
    assert_close(np.asarray(out, np.float32), expected(*arguments, activation), 6e-3)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), *(st.integers(1, 200).map(lambda n: 64 * n) for _ in range(3)))
def test_a_tiling_covers_every_output_once_and_fits_in_a_multiprocessor(tokens, hidden, mixed, inner):
    tiling = TailTiling.choose(tokens=tokens, hidden=hidden, mixed=mixed, inner=inner)
    if tiling is None:
        assert mosaic_shape_refusal(tokens=tokens, hidden=hidden, mixed=mixed, inner=inner, dtypes={"bfloat16"})
        return
    out, gate_up, down = tiling.products
    assert [p.columns * p.tiles for p in tiling.products] == [hidden, inner, hidden]
    assert [p.channels for p in tiling.products] == [mixed, hidden, inner]
    # C adds what A left in the same block.
    assert (out.columns, out.tiles) == (down.columns, down.tiles)
    assert tiling.blocks <= MULTIPROCESSORS
    assert all(p.chunks % p.span == 0 and p.width <= 256 for p in tiling.products)
    rows = -(-tokens // 8) * 8
    assert tiling.token_stages >= 8
    stages = 2 * 64 * (tiling.weight_stages * tiling.stage_rows + (tiling.token_stages - 1) * rows + 64)
    assert stages + 2 * 64 * (2 * out.columns + gate_up.columns) + 4 * 64 <= SHARED_BYTES
    assert tiling.weight_stages >= 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": 65}, "65 tokens"),
        ({"tokens": 0}, "0 tokens"),
        ({"dtypes": {"bfloat16", "float32"}}, "bfloat16, float32"),
        ({"dtypes": {"float16"}}, "float16"),
        ({"hidden": 8512}, "8512"),
        ({"inner": 1000}, "1000"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused_with_the_reason(change, reason):
    served = {"tokens": 64, "hidden": 4096, "mixed": 4096, "inner": 12288, "dtypes": {"bfloat16"}}
    assert mosaic_shape_refusal(**served) is None
    assert reason in (mosaic_shape_refusal(**served | change) or "")


def test_shapes_that_do_not_fit_are_named():
    x, mixed, out_weight, norm, gate_up, down = problem(3, 16, 8, 4)
    for name, arguments in {
        "mixed": (x, mixed[:2], out_weight, norm, gate_up, down),
        "out_weight": (x, mixed, out_weight[:, :4], norm, gate_up, down),
        "norm": (x, mixed, out_weight, norm._replace(weight=norm.weight[:2]), gate_up, down),
        "gate_up": (x, mixed, out_weight, norm, gate_up[:-1], down),
        "down": (x, mixed, out_weight, norm, gate_up, down[1:]),
    }.items():
        with pytest.raises(ValueError, match=name):
            decoder_tail(*arguments, activation="silu")
    with pytest.raises(ValueError, match="mosaic"):
        decoder_tail(x, mixed, out_weight, norm, gate_up, down, activation="silu", implementation="mosaic")


def test_gradients_are_those_of_the_separate_operations(monkeypatch):
    """Where the kernel serves the forward pass, which here stands for it."""
    arguments = problem(4, 16, 8, 12, dtype=jnp.float32)
    x, mixed, out_weight, norm, gate_up, down = arguments

    def forward(x, mixed, out_weight, weight, gate_up, down, *, rule, activation):
        stream, update = decoder_tail(
            x, mixed, out_weight, Norm(weight, rule), gate_up, down, activation=activation, implementation="xla"
        )
        return stream + update

    monkeypatch.setattr(op, "decoder_tail_mosaic", forward)
    weights = (x, mixed, out_weight, norm.weight, gate_up, down)

    def loss(function, weights):
        return jnp.sum(jnp.square(function(*weights)))

    fused = jax.grad(functools.partial(loss, functools.partial(op._fused, LLAMA, "silu")))(weights)
    plain = jax.grad(functools.partial(loss, functools.partial(forward, rule=LLAMA, activation="silu")))(weights)
    for one, other in zip(fused, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
