"""What every family's module must do, with random weights."""

import importlib
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.pallas_kernels.add_norm.reference import add_norm_reference
from tokenspeed_jax.pallas_kernels.norm_rules import Norm

from ..families import DENSE

add_norm_op = importlib.import_module("tokenspeed_jax.pallas_kernels.add_norm")

pytestmark = pytest.mark.parametrize("family", DENSE)


@pytest.fixture
def build(tiny_checkpoint) -> Callable:
    def build(family, dtype=jnp.float32, **changes):
        fields = json.loads((tiny_checkpoint(family) / "config.json").read_text())
        fields["num_hidden_layers"] = 2  # keeps compilation short
        if family in ("gemma3", "olmo3"):
            fields["layer_types"] = ["sliding_attention", "full_attention"]
        resolved, config = resolve_model(fields | changes)
        return resolved, config, lambda: resolved.build(config, dtype=dtype, rngs=nnx.Rngs(3))

    return build


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 512, count))


@nnx.jit
def forward(model, token_ids, segment_ids, positions):
    return model.logits(model(token_ids, positions, PlainStep(segment_ids, positions)))


def test_weight_map_names_each_parameter_once(family, build):
    for bias in (False, True):
        changes = {"attention_bias": bias} if family != "mistral" else {}
        resolved, config, make = build(family, **changes)
        parameters = {path for path, _ in nnx.to_flat_state(nnx.state(nnx.eval_shape(make)))}
        rules = resolved.weight_map(config)
        assert sorted(map(str, (rule.parameter for rule in rules))) == sorted(map(str, parameters))
        tensors = [name for rule in rules for name in rule.tensors]
        assert len(set(tensors)) == len(tensors)
        assert any(name.endswith("q_proj.bias") for name in tensors) == (bias and family != "mistral")


def test_parameters_have_the_dtype_and_can_be_made_inside_jit(family, build):
    _, _, make = build(family, dtype=jnp.bfloat16)
    abstract, made = nnx.state(nnx.eval_shape(make)), nnx.state(nnx.jit(make)())
    for (path, shape), (_, value) in zip(nnx.to_flat_state(abstract), nnx.to_flat_state(made), strict=True):
        assert shape.shape == value.shape, path
        assert shape.dtype == value.dtype == jnp.bfloat16, path


def test_hidden_states_have_the_dtype_and_logits_are_float32(family, build):
    _, config, make = build(family, dtype=jnp.bfloat16)
    model, ids = make(), tokens(4)
    hidden = model(ids, jnp.arange(4), PlainStep(jnp.zeros(4, int), jnp.arange(4)))
    assert (hidden.shape, hidden.dtype) == ((4, config.hidden_size), jnp.bfloat16)
    logits = model.logits(hidden)
    assert (logits.shape, logits.dtype) == ((4, config.vocab_size), jnp.float32)


def test_padding_tokens_leave_live_tokens_as_they_were(family, build):
    model = build(family)[2]()
    live, total = 37, 64
    segments = jnp.where(jnp.arange(total) < live, 0, -1)
    positions = jnp.where(jnp.arange(total) < live, jnp.arange(total), 0)
    one, other = (tokens(total).at[live:].set(filler) for filler in (tokens(total - live, 1), 0))
    first, second = forward(model, one, segments, positions), forward(model, other, segments, positions)
    np.testing.assert_array_equal(first[:live], second[:live])
    assert (np.asarray(first[live:]) != np.asarray(second[live:])).any()


def test_packed_sequences_do_not_see_each_other(family, build):
    model = build(family)[2]()
    a, b = tokens(20, 1), tokens(44, 2)
    segments = jnp.repeat(jnp.array([0, 1]), jnp.array([20, 44]), total_repeat_length=64)
    positions = jnp.concatenate([jnp.arange(20), jnp.arange(44)])
    both = forward(model, jnp.concatenate([a, b]), segments, positions)
    alone = forward(model, b, jnp.zeros(44, int), jnp.arange(44))
    np.testing.assert_allclose(both[20:], alone, atol=1e-4)


def test_one_layer_reaches_exactly_its_window(family, build):
    """Invariant 5: a token further back than the window changes nothing, the last one inside it does."""
    window = 32
    kinds = {"layer_types": ["sliding_attention"]} if family in ("gemma3", "olmo3") else {}
    model = build(family, num_hidden_layers=1, **kinds)[2]()
    if family in ("llama", "qwen3"):
        window = 60  # all of them
    ids, segments, positions = tokens(60), jnp.zeros(60, int), jnp.arange(60)
    before = forward(model, ids, segments, positions)[-1]

    def change(place):
        return np.abs(forward(model, ids.at[place].set((ids[place] + 1) % 512), segments, positions)[-1] - before).max()

    assert change(60 - window) > 1e-6
    if window < 60:
        assert change(60 - window - 1) == 0


def loss(model):
    """Of predicting some tokens."""
    ids, positions = tokens(24), jnp.arange(24)
    scores = jax.nn.log_softmax(model.logits(model(ids, positions, PlainStep(jnp.zeros(24, int), positions))))
    return -jnp.take_along_axis(scores[:-1], ids[1:, None], axis=-1).mean()


def test_gradients_through_a_plain_forward_are_finite(family, build):
    value, gradients = nnx.jit(nnx.value_and_grad(loss))(build(family)[2]())
    assert np.isfinite(value)
    for path, gradient in nnx.to_flat_state(gradients):
        assert np.isfinite(gradient[...]).all(), path
        assert np.abs(gradient[...]).max() > 0, path


def test_gradients_are_the_slopes_of_the_loss(family, build):
    """Of every parameter at once: a step down the gradient lowers the loss by its length times the gradient's."""
    model = build(family)[2]()
    gradients = nnx.jit(nnx.value_and_grad(loss))(model)[1]
    graph, state = nnx.split(model)
    length = float(jnp.sqrt(sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradients))))

    @jax.jit
    def moved(by):
        return loss(nnx.merge(graph, jax.tree.map(lambda x, slope: x + by / length * slope, state, gradients)))

    step = 0.003
    np.testing.assert_allclose((moved(step) - moved(-step)) / (2 * step), length, rtol=0.02)


def test_the_backward_pass_of_the_norm_kernel_gives_the_same_gradients(family, build, monkeypatch):
    """The plain form stands for the kernel, whose backward pass is written by hand."""
    model = build(family)[2]()
    expected = nnx.value_and_grad(loss)(model)[1]
    calls = []

    def kernel(x, update, weight, *, rule):
        calls.append(rule)
        return add_norm_reference(x, update, Norm(weight, rule))

    monkeypatch.setattr(add_norm_op, "mosaic_refusal", lambda **_: None)
    monkeypatch.setattr(add_norm_op, "add_norm_mosaic", kernel)
    actual = nnx.value_and_grad(loss)(model)[1]
    assert len(calls) >= (1 if family == "olmo3" else 2 * len(model.layers))
    for (path, one), (_, other) in zip(nnx.to_flat_state(actual), nnx.to_flat_state(expected), strict=True):
        np.testing.assert_allclose(one[...], other[...], rtol=1e-4, atol=1e-6, err_msg=str(path))


def test_projection_biases_are_added(family, build):
    if family == "mistral":
        assert not build(family, attention_bias=True)[1].attention_bias  # its Hugging Face class has none
        return
    model = build(family, attention_bias=True)[2]()
    ids, zeros, positions = tokens(8), jnp.zeros(8, int), jnp.arange(8)
    before = forward(model, ids, zeros, positions)
    for projection in (model.layers[0].attention.qkv.proj, model.layers[0].attention.out):
        projection.bias[...] = jnp.linspace(-1, 1, projection.bias.shape[0])
        after = forward(model, ids, zeros, positions)
        assert np.abs(after - before).max() > 1e-4
        before = after
