"""The kernels of sampling on the GPU, at a real vocabulary: they leave and draw what the portable form does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.sampling import Truncation, draw, truncation_cut

VOCAB, ROWS = 151_936, 16


@pytest.fixture(autouse=True)
def _hopper():
    refusal = hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def problem(seed: int) -> tuple[jax.Array, Truncation]:
    rng = np.random.default_rng(seed)
    kinds = (
        lambda x: x * 3,
        np.round,
        lambda x: np.abs(x) * x * 3,
        lambda x: np.where(x > 2, x, -np.inf),
        lambda x: x * 0 + 1,
    )
    logits = np.stack([kinds[i % len(kinds)](rng.normal(size=VOCAB)) for i in range(ROWS)])
    limits = {
        "temperature": rng.choice([0.5, 1.0, 2.0], ROWS),
        "top_p": rng.choice([1.0, 0.95, 0.5, 1e-6], ROWS),
        "min_p": rng.choice([0.0, 0.0, 0.05], ROWS),
    }
    top_k = jnp.asarray(rng.choice([0, 0, 1, 50, 3000, VOCAB], ROWS), jnp.int32)
    floats = {name: jnp.asarray(value, jnp.float32) for name, value in limits.items()}
    return jnp.asarray(logits, jnp.float32), Truncation(top_k=top_k, **floats)


@pytest.mark.parametrize("seed", range(4))
def test_kernel_leaves_what_bisection_over_all_logits_does(seed: int) -> None:
    logits, limits = problem(seed)
    kept = [
        jax.jit(functools.partial(truncation_cut, implementation=name))(logits, limits)[:, None] <= logits
        for name in ("mosaic", "xla")
    ]
    numbers = [np.asarray(k & jnp.isfinite(logits)).sum(axis=-1) for k in kept]
    # Exponentials of two compilers differ in their last bit: the mass may be reached one token apart.
    ranked_only = np.asarray((limits.top_p >= 1.0) & (limits.min_p == 0.0))
    np.testing.assert_array_equal(numbers[0][ranked_only], numbers[1][ranked_only])
    np.testing.assert_allclose(numbers[0], numbers[1], rtol=1e-4, atol=1)


@pytest.mark.parametrize("seed", range(4))
def test_kernel_draws_what_the_portable_form_does(seed: int) -> None:
    logits, limits = problem(seed)
    rng = np.random.default_rng(seed)
    rows = (
        jnp.asarray(rng.random(ROWS) < 0.2),
        jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32),
        jnp.arange(ROWS, dtype=jnp.int32),
    )
    (tokens, logprobs), (expected, expected_logprobs) = (
        jax.jit(functools.partial(draw, implementation=name))(logits, limits, *rows) for name in ("mosaic", "xla")
    )
    np.testing.assert_array_equal(tokens, expected)
    drawn = ~np.asarray(rows[0])
    np.testing.assert_allclose(logprobs[drawn], expected_logprobs[drawn], rtol=1e-3, atol=1e-3)
