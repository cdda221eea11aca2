"""Padding around a row changes nothing of its logits, whether layers attend or look at the tokens just before."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.rollout.padded_model import PaddedModel, padded_step, with_own_variables
from tokenspeed_jax.weights import load_model, open_checkpoint

TINY = Path(__file__).parents[1] / "golden" / "tiny"
PAD, WIDTH = 2, 10


def padded_model(family: str) -> PaddedModel:
    return PaddedModel(load_model(open_checkpoint(str(TINY / family)), dtype="float32", progress=False))


def logits_of(model: PaddedModel, tokens: list[int]) -> jax.Array:
    """Without any padding."""
    positions = jnp.arange(len(tokens))

    @nnx.jit
    def forward(inner: nnx.Module) -> jax.Array:
        step = PlainStep(jnp.zeros(len(tokens), jnp.int32), positions, num_segments=1)
        return inner.logits(inner(jnp.array(tokens), positions, step))

    return forward(model.model)


def test_rows_are_what_they_are_alone() -> None:
    model = padded_model("lfm2")  # attention, and convolutions over the tokens before
    before, text = 3, [7, 300, PAD, 45, 9]  # an id of padding within a text is a token
    row = np.full(WIDTH, PAD, np.int32)
    row[before : before + len(text)] = text
    rows = np.stack([row, np.arange(10, 10 + WIDTH)])
    logits, cache = nnx.jit(model)(
        jnp.array(rows),
        jnp.zeros_like(rows),
        None,
        jnp.ones((2, WIDTH, WIDTH), bool),
        jnp.array(rows != PAD, jnp.int32),
    )
    assert cache is None
    assert logits.shape == (2, WIDTH, model.config.vocab_size)
    np.testing.assert_allclose(logits[0, before : before + len(text)], logits_of(model, text), atol=1e-4)
    np.testing.assert_allclose(logits[1], logits_of(model, rows[1].tolist()), atol=1e-4)
    assert np.isfinite(logits).all()


def test_packed_rows_hold_several_sequences() -> None:
    model = padded_model("llama")
    rows = jnp.array([[7, 300, 45, 9, 8]])
    logits, _ = nnx.jit(model)(rows, jnp.array([[0, 1, 2, 0, 1]]), None, None, jnp.array([[1, 1, 1, 2, 2]]))
    np.testing.assert_allclose(logits[0, :3], logits_of(model, [7, 300, 45]), atol=1e-4)
    np.testing.assert_allclose(logits[0, 3:], logits_of(model, [9, 8]), atol=1e-4)
    with pytest.raises(ValueError, match="no cache"):
        model(rows, rows, {}, None, rows)


@pytest.mark.parametrize(
    ("mask", "segments", "positions"),
    [
        ("0011100", [0, 0, 1, 1, 1, 2, 2], [0, 1, 0, 1, 2, 0, 1]),
        ("1110111", [1] * 7, list(range(7))),
        ("0000001", [0] * 6 + [1], [*range(6), 0]),
        ("1000000", [1] + [2] * 6, [0, *range(6)]),
    ],
)
def test_where_a_rows_tokens_stand(mask: str, segments: list[int], positions: list[int]) -> None:
    step = padded_step(jnp.array([digit == "1" for digit in mask]))
    assert step.segment_ids.tolist() == segments
    assert step.positions.tolist() == positions


def test_own_variables_share_memory_but_not_arrays() -> None:
    model = padded_model("llama")
    other = with_own_variables(model, nnx.state(model.model))
    for mine, theirs in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True):
        assert mine is not theirs
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
