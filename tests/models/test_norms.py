"""The three norms differ only in the weight's offset and in where they round."""

import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.models.norms import GemmaRMSNorm, LateRoundingRMSNorm, RMSNorm, normalized

X = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)) * 3, jnp.bfloat16)


def weighted(norm_type, weight):
    norm = norm_type(64, 1e-6, dtype=jnp.bfloat16)
    norm.weight[...] = jnp.full((64,), weight, jnp.bfloat16)
    return norm(X)


def reference():
    x = np.asarray(X, np.float64)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def test_statistics_are_float32():
    unit = normalized(X, 1e-6)
    assert unit.dtype == jnp.float32
    np.testing.assert_allclose(unit, reference(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("norm_type", "neutral"), [(RMSNorm, 1.0), (LateRoundingRMSNorm, 1.0), (GemmaRMSNorm, 0.0)])
def test_fresh_norm_only_normalises(norm_type, neutral):
    fresh = norm_type(64, 1e-6, dtype=jnp.bfloat16)(X)
    assert fresh.dtype == jnp.bfloat16
    np.testing.assert_array_equal(fresh, weighted(norm_type, neutral))
    np.testing.assert_array_equal(fresh, normalized(X, 1e-6).astype(jnp.bfloat16))


def test_rounding_points_are_the_families_own():
    early, late = weighted(RMSNorm, 1.7), weighted(LateRoundingRMSNorm, 1.7)
    weight = np.float32(jnp.bfloat16(1.7))
    rounded = jnp.asarray(reference(), jnp.float32).astype(jnp.bfloat16)
    np.testing.assert_array_equal(early, jnp.bfloat16(1.7) * rounded)
    np.testing.assert_array_equal(late, (weight * normalized(X, 1e-6)).astype(jnp.bfloat16))
    assert (np.asarray(early) != np.asarray(late)).any()
    # 1 + w is formed in float32: in bfloat16, 1 + 0.0039 would be 1.
    small = weighted(GemmaRMSNorm, 0.0039)
    np.testing.assert_array_equal(
        small, ((1 + np.float32(jnp.bfloat16(0.0039))) * normalized(X, 1e-6)).astype(jnp.bfloat16)
    )
