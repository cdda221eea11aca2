"""Padding around a row changes nothing of its logits, and what stands between is a segment, as recurrences need it."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.llama import Llama
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.rollout.padded_model import PaddedModel, padded_step, with_own_variables
from tokenspeed_jax.weights import model_of, open_config

TINY = Path(__file__).parents[1] / "golden" / "tiny"
PAD, WIDTH = 2, 10


@pytest.fixture(scope="module")
def llama() -> PaddedModel:
    """One layer is enough."""
    config = model_of(open_config(str(TINY / "llama")))[1]
    config = dataclasses.replace(config, num_layers=1, windows=(None,), ropes=config.ropes[:1])
    return PaddedModel(Llama(config, dtype="float32", rngs=nnx.Rngs(0)))


@nnx.jit
def padded(model: PaddedModel, rows: jax.Array, is_token: jax.Array) -> jax.Array:
    mask = jnp.ones((*rows.shape, rows.shape[1]), bool)
    return model(rows, jnp.zeros_like(rows), None, mask, is_token.astype(jnp.int32))[0]


def test_padding_changes_nothing(llama: PaddedModel) -> None:
    before, text = 3, [7, 300, PAD, 45, 9]  # an id of padding within a text is a token
    rows = np.full((3, WIDTH), PAD, np.int32)
    rows[0, before : before + len(text)] = rows[1, : len(text)] = text
    rows[2] = np.arange(10, 10 + WIDTH)
    logits = padded(llama, jnp.array(rows), jnp.array(rows != PAD))
    assert logits.shape == (3, WIDTH, llama.config.vocab_size)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[0, before : before + len(text)], logits[1, : len(text)], atol=1e-4)

    @nnx.jit
    def alone(inner: nnx.Module, tokens: jax.Array) -> jax.Array:
        positions = jnp.arange(WIDTH)
        return inner.logits(inner(tokens, positions, PlainStep(jnp.zeros_like(positions), positions, num_segments=1)))

    np.testing.assert_allclose(logits[2], alone(llama.model, jnp.array(rows[2])), atol=1e-4)


def test_packed_rows_hold_several_sequences(llama: PaddedModel) -> None:
    packed = jnp.array([[7, 300, 45, 9, 8]])
    places, segments = jnp.array([[0, 1, 2, 0, 1]]), jnp.array([[1, 1, 1, 2, 2]])
    logits, cache = nnx.jit(llama)(packed, places, None, None, segments)
    assert cache is None
    rows = jnp.array([[7, 300, 45, PAD], [9, 8, PAD, PAD]])
    apart = padded(llama, rows, rows != PAD)
    np.testing.assert_allclose(logits[0, :3], apart[0, :3], atol=1e-5)
    np.testing.assert_allclose(logits[0, 3:], apart[1, :2], atol=1e-5)
    with pytest.raises(ValueError, match="no cache"):
        llama(packed, places, {}, None, segments)


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


def test_own_variables_share_memory_but_not_arrays(llama: PaddedModel) -> None:
    other = with_own_variables(llama, nnx.state(llama.model))
    for mine, theirs in zip(jax.tree.leaves(nnx.state(llama)), jax.tree.leaves(nnx.state(other)), strict=True):
        assert mine is not theirs
        assert mine.unsafe_buffer_pointer() == theirs.unsafe_buffer_pointer()
