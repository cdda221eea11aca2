"""Rotary embedding: the scalings against one channel at a time, and what a rotation must preserve."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.models.hf_config import HfConfig, UnsupportedConfig
from tokenspeed_jax.models.rope import Llama3Scaling, Rope, YarnScaling

BASE = {"max_position_embeddings": 65536, "rope_theta": 500000.0}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def rope(**fields):
    return Rope.from_hf(HfConfig(BASE | fields), 128)


def llama3_channel(frequency, scaling):
    """Llama 3.1's rule for one frequency, by its wavelength."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    smooth = (scaling.original_context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@given(factor=st.floats(1.5, 40), theta=st.floats(1e4, 1e6), context=st.sampled_from([2048, 8192]))
@settings(max_examples=30, deadline=None)
def test_llama3_scaling_is_the_rule_by_wavelength(factor, theta, context):
    scaling = Llama3Scaling(factor, 1.0, 4.0, context)
    plain = Rope(theta, 64).frequencies()
    expected = [llama3_channel(float(f), scaling) for f in plain]
    np.testing.assert_allclose(Rope(theta, 64, scaling).frequencies(), expected, rtol=1e-4)


def test_yarn_keeps_fast_channels_slows_slow_ones_and_ramps_between():
    frequencies, plain = rope(rope_scaling=YARN).frequencies(), Rope(500000.0, 128).frequencies()

    # Channels that turn 32 times and once in 8192 tokens: the ramp runs between them, rounded outwards.
    def channel(turns):
        return 64 * math.log(8192 / (2 * math.pi * turns)) / math.log(500000.0)

    low, high = math.floor(channel(32)), math.ceil(channel(1))
    for i in range(64):
        slowed = min(max((i - low) / (high - low), 0.0), 1.0)
        expected = plain[i] * (1 - slowed) + plain[i] / 8 * slowed
        assert frequencies[i] == pytest.approx(expected, rel=1e-5)
    assert frequencies[0] == plain[0]
    assert frequencies[63] == pytest.approx(plain[63] / 8)


def test_yarn_stretches_the_rotation_by_its_attention_factor():
    scaled = rope(rope_scaling=YARN)
    assert isinstance(scaled.scaling, YarnScaling)
    assert scaled.scaling.attention_factor == pytest.approx(1.2079441541679836)  # as Olmo 3's own config states it
    x = jnp.ones((1, 2, 128))
    turned = scaled.at(jnp.array([7]))(x)
    assert jnp.linalg.norm(turned) == pytest.approx(float(jnp.linalg.norm(x)) * 1.2079441541679836, rel=1e-5)
    explicit = rope(rope_scaling=YARN | {"attention_factor": 1.0})
    assert explicit.scaling.attention_factor == 1.0
    deepseek = rope(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5})
    assert deepseek.scaling.attention_factor == pytest.approx(1.2079441541679836 / 1.1039720770839918)


def test_linear_scaling_divides_positions():
    plain, scaled = rope(), rope(rope_scaling={"type": "linear", "factor": 4.0})
    np.testing.assert_allclose(scaled.at(jnp.array([40])).cos, plain.at(jnp.array([10])).cos, atol=1e-5)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "default"}, {"type": "linear", "factor": 2.0}, YARN], ids=lambda s: str(s)[:20]
)
def test_new_and_old_configs_say_the_same(scaling):
    new = Rope.from_hf(HfConfig(BASE | {"rope_parameters": {"rope_theta": 500000.0, **(scaling or {})}}), 128)
    assert new == rope(rope_scaling=scaling)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, r"rope_scaling.rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 1,
                    "original_max_position_embeddings": 8192,
                }
            },
            "low_freq_factor",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields, named):
    with pytest.raises(UnsupportedConfig, match=named):
        rope(**fields)


@given(offset=st.integers(0, 500), distance=st.integers(0, 500), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_scores_depend_on_distance_alone(offset, distance, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 16)).astype(np.float32)
    turn = Rope(10000.0, 16)

    def score(base):
        a, b = turn.at(jnp.array([base + distance])), turn.at(jnp.array([base]))
        return float(jnp.sum(a(jnp.asarray(q)) * b(jnp.asarray(k))))

    assert score(0) == pytest.approx(score(offset), abs=2e-3)


def test_channels_pair_across_halves():
    x = jnp.zeros((1, 1, 8)).at[0, 0, 1].set(1.0)
    turned = Rope(10000.0, 8).at(jnp.array([3]))(x)[0, 0]
    assert set(np.flatnonzero(turned)) == {1, 5}


def test_channels_behind_the_turning_ones_pass_through():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 3, 16)), jnp.bfloat16)
    turn, positions = Rope(10000.0, 4), jnp.arange(5)
    turned = turn.at(positions)(x)
    assert turned.dtype == jnp.bfloat16
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., :4], turn.at(positions)(x[..., :4]))


@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}},
        {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 0.25}, "partial_rotary_factor": 0.25},
    ],
)
def test_a_family_that_turns_in_part_reads_the_part_in_both_spellings(fields):
    config = HfConfig(BASE | fields)
    assert Rope.from_hf(config, 128, partial_rotary_factor=1.0) == Rope(500000.0, 32)


def test_a_family_that_turns_in_part_has_a_default_part():
    assert Rope.from_hf(HfConfig(BASE), 128, partial_rotary_factor=0.5).dim == 64


@pytest.mark.parametrize("factor", [0.01, 1.5, 0.2, -0.5, "half"])
def test_a_part_that_is_no_positive_even_number_of_channels_is_refused(factor):
    with pytest.raises(UnsupportedConfig, match="partial_rotary_factor"):
        Rope.from_hf(HfConfig(BASE | {"partial_rotary_factor": factor}), 128, partial_rotary_factor=1.0)
