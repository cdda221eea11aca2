"""The linear kernel on a GPU, in all its tilings, against the definition in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.linear import linear
from tokenspeed_jax.pallas_kernels.linear.mosaic import LinearTiling, linear_mosaic
from tokenspeed_jax.pallas_kernels.linear.reference import linear_reference

# Rows of the weight, input channels, gate: Qwen3-8B, Gemma 3 27B, and a vocabulary.
SHAPES = [
    (6144, 4096, None),
    (4096, 4096, None),
    (4096, 12288, None),
    (24576, 4096, "silu"),
    (43008, 5376, "gelu_tanh"),
    (151936, 1024, None),
]


def problem(tokens, outputs, channels, bias):
    keys = jax.random.split(jax.random.key(outputs + tokens), 3)
    x = jax.random.normal(keys[0], (tokens, channels), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (outputs, channels), jnp.bfloat16) / channels**0.5
    return x, weight, jax.random.normal(keys[2], (outputs,), jnp.bfloat16) if bias else None


def error(out, x, weight, bias, gate):
    expected = np.asarray(linear_reference(x, weight, bias, gate), np.float32)
    return np.linalg.norm(np.asarray(out, np.float32) - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("tokens", [17, 24, 40, 63, 64])
@pytest.mark.parametrize(("outputs", "channels", "gate"), SHAPES)
def test_products_equal_the_definition_and_repeat_bit_for_bit(tokens, outputs, channels, gate):
    x, weight, bias = problem(tokens, outputs, channels, bias=tokens % 2 == 0)
    first, second = (linear(x, weight, bias, gate=gate, implementation="mosaic") for _ in range(2))
    assert error(first, x, weight, bias, gate) < 4e-3
    np.testing.assert_array_equal(np.asarray(first, np.float32), np.asarray(second, np.float32))


@pytest.mark.parametrize("columns", [32, 48, 64, 96, 128, 192])
def test_every_width_of_tiles_gives_the_product_of_any_number_of_tokens(columns):
    for tokens in (1, 9, 64):
        x, weight, bias = problem(tokens, 6144, 4096, bias=True)
        out = linear_mosaic(x, weight, bias, None, tiling=LinearTiling.with_all_stages(columns))
        assert error(out, x, weight, bias, None) < 4e-3, tokens


def test_a_token_that_is_not_a_number_stays_in_its_row():
    x, weight, _ = problem(64, 4096, 4096, bias=False)
    out = np.asarray(linear(x.at[5].set(jnp.nan), weight, implementation="mosaic"), np.float32)
    rows = np.arange(64) != 5
    np.testing.assert_array_equal(out[rows], np.asarray(linear(x, weight, implementation="mosaic"), np.float32)[rows])
    assert np.isnan(out[5]).all()
