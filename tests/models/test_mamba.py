"""What the goldens of the Mamba families do not show: bounds of step sizes, and the stream between layers."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model


class RecordingStep(PlainStep):
    """Keeps what the last recurrence was given."""

    def recur(self, inputs, layer):
        object.__setattr__(self, "inputs", inputs)
        return super().recur(inputs, layer)


class Threes(nnx.Module):
    """A mixer that adds 3."""

    def __call__(self, x, step):
        del step
        return jnp.full_like(x, 3.0)


class Identity(nnx.Module):
    """A norm that leaves its input."""

    def __call__(self, x):
        return x


@pytest.fixture
def build(tiny_checkpoint):
    def build(family, dtype=jnp.float32, **changes):
        fields = json.loads((tiny_checkpoint(family) / "config.json").read_text())
        resolved, config = resolve_model(fields | {"num_hidden_layers": 1} | changes)
        return resolved.build(config, dtype=dtype, rngs=nnx.Rngs(0))

    return build


def run(model):
    """(hidden states, what the last recurrence was given)."""
    ids, positions = jnp.arange(8) * 7, jnp.arange(8)
    step = RecordingStep(jnp.zeros(8, int), positions, num_segments=1)
    return model(ids, positions, step), vars(step).get("inputs")


def test_mamba2_step_sizes_stay_within_their_limits(build):
    model = build("mamba2", time_step_limit=[0.2, 0.5])
    model.mixers[0].step_bias[...] = jnp.linspace(-3, 3, 8)  # step sizes of 0.05 to 3
    _, inputs = run(model)
    step_sizes = -np.asarray(inputs.log_decay)  # rates are 1
    np.testing.assert_allclose((step_sizes.min(), step_sizes.max()), (0.2, 0.5), atol=1e-6)
    unlimited = build("mamba2")
    unlimited.mixers[0].step_bias[...] = jnp.linspace(-3, 3, 8)
    step_sizes = -np.asarray(run(unlimited)[1].log_decay)
    assert step_sizes.min() < 0.1
    assert step_sizes.max() > 2.5


@pytest.mark.parametrize("family", ["mamba2", "falcon_mamba"])
@pytest.mark.parametrize(("exact", "expected"), [(True, 1032.0), (False, 1024.0)])
def test_the_stream_between_layers_is_float32_when_the_config_says_so(family, exact, expected, build):
    """Two layers add 3 to 1024, whose neighbour in bfloat16 is 1032."""
    model = build(family, dtype=jnp.bfloat16, residual_in_fp32=exact, num_hidden_layers=2)
    model.embed.weight[...] = jnp.full_like(model.embed.weight[...], 1024.0)
    model.mixers = nnx.List([Threes(), Threes()])
    model.norm = Identity()
    assert (run(model)[0] == expected).all()
