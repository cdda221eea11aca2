"""`token_log_probabilities`: what log softmax says, however sequences are padded, packed and cut into blocks."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models import log_probabilities, plain_step
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.rollout import token_log_probabilities

LENGTHS = (9, 1, 14, 6)
SEQUENCES = [np.random.default_rng(seed).integers(3, 500, length) for seed, length in enumerate(LENGTHS)]

score = nnx.jit(token_log_probabilities, static_argnames=("max_segments", "remat"))


@pytest.fixture(scope="module")
def build(tiny_checkpoint):
    """`build(family, **changes)`: a tiny model of few layers whose random weights are large enough to matter."""

    def make(family, layers, **changes):
        fields = json.loads((tiny_checkpoint(family) / "config.json").read_text())
        resolved, config = resolve_model(fields | {"num_hidden_layers": layers} | changes)
        graph, state = nnx.split(resolved.build(config, dtype=jnp.float32, rngs=nnx.Rngs(1)))
        return nnx.merge(graph, jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, state))

    return make


@nnx.jit
def logits_of(model, tokens, length):
    positions = jnp.arange(len(tokens))
    return model.logits(model(tokens, positions, PlainStep((positions >= length).astype(int), positions, 2)))


def alone(model, sequence, temperature):
    """Of one sequence, from all of its logits."""
    padded = np.zeros(24, int)
    padded[: len(sequence)] = sequence
    logits = np.asarray(logits_of(model, padded, len(sequence)), np.float64) / temperature
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return np.concatenate([[0.0], logprobs[np.arange(len(sequence) - 1), sequence[1:]]])


def laid_out(rows, length=24):
    """Tokens and segment ids of rows of (gap in front, sequence) pairs; padding holds tokens that must not matter."""
    tokens, segments = np.full((len(rows), length), 7), np.zeros((len(rows), length), int)
    places = {}
    for row, items in enumerate(rows):
        at = 0
        for segment, (gap, index) in enumerate(items, 1):
            at += gap
            places[index] = row, slice(at, at + LENGTHS[index])
            tokens[places[index]], segments[places[index]] = SEQUENCES[index], segment
            at += LENGTHS[index]
    return jnp.asarray(tokens), jnp.asarray(segments), places


LAYOUTS = {
    "padded behind": [[(0, 0)], [(0, 1)], [(0, 2)], [(0, 3)]],
    "padded in front": [[(15, 0)], [(23, 1)], [(10, 2)], [(18, 3)]],
    "packed": [[(0, 0), (0, 2)], [(0, 3), (0, 1)], [], []],
    "packed with gaps": [[(0, 0), (1, 2)], [(3, 3), (8, 1)], [], []],
}


@pytest.mark.parametrize("family", ["gemma3", "mamba2"])
def test_every_layout_gives_what_each_sequence_gives_alone(build, family) -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    model = build(family, 2 if family == "gemma3" else 1, **(sliding if family == "gemma3" else {}))
    expected = {index: alone(model, sequence, 0.7) for index, sequence in enumerate(SEQUENCES)}
    assert np.std(np.concatenate(list(expected.values()))) > 1
    for name, rows in LAYOUTS.items():
        tokens, segments, places = laid_out(rows)
        values = np.asarray(score(model, tokens, segments, max_segments=2, temperature=jnp.full(4, 0.7)))
        for index, place in places.items():
            np.testing.assert_allclose(values[place], expected[index], atol=1e-4, err_msg=name)
        assert (values[np.asarray(segments) == 0] == 0).all()
    # More sequences than were declared would share the recurrent states of others.
    assert np.isnan(score(model, tokens, segments + (segments > 0), max_segments=2)).all()


def loss_of(model, remat):
    tokens, segments, _ = laid_out(LAYOUTS["packed with gaps"])
    return token_log_probabilities(model, tokens, segments, max_segments=2, remat=remat).sum()


def test_blocks_and_remat_give_the_gradients_of_the_whole(build, monkeypatch) -> None:
    model = build("llama", 1)
    whole = nnx.jit(nnx.value_and_grad(functools.partial(loss_of, remat=False)))(model)
    monkeypatch.setattr(plain_step, "_QUERY_BLOCK", 10)
    monkeypatch.setattr(log_probabilities, "_ROWS_PER_BLOCK", 36)
    again = nnx.jit(nnx.value_and_grad(functools.partial(loss_of, remat=True)))(model)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-3), whole, again)


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_remat_holds_for_every_layer(tiny_checkpoint, family) -> None:
    """Traced, not run."""
    resolved, config = resolve_model(json.loads((tiny_checkpoint(family) / "config.json").read_text()))
    model = nnx.eval_shape(lambda: resolved.build(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def rematerialised(remat):
        jaxpr = jax.make_jaxpr(lambda state: loss_of(nnx.merge(graph, state), remat))(state)
        return sum(equation.primitive.name in ("checkpoint", "remat2") for equation in jaxpr.eqns)

    assert rematerialised(True) - rematerialised(False) == config.num_layers


def test_remat_is_refused_for_a_step_that_is_no_plain_one(build) -> None:
    class CachedStep:
        pass

    with pytest.raises(ValueError, match=r"remat needs a PlainStep.*CachedStep"):
        build("llama", 1)(jnp.zeros(4, int), jnp.arange(4), CachedStep(), remat=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": jnp.zeros(4, int)}, "tokens must be"),
        ({"segment_ids": jnp.ones((2, 3), int)}, "segment_ids have shape"),
        ({"max_segments": 0}, "max_segments must be at least 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"temperature": jnp.ones(3)}, "temperature must be one number or"),
    ],
)
def test_what_does_not_fit_is_refused(build, changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        token_log_probabilities(**({"model": build("llama", 1), "tokens": jnp.zeros((2, 4), int)} | changes))
