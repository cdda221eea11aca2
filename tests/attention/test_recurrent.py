"""Recurrent layers over cached states: which bytes the window at a checkpoint is made of."""

import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.attention.recurrent import convolve_cached
from tokenspeed_jax.cache.state_blocks import StateBlocks
from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.recurrent_problems import ragged_rows

CHANNELS, WIDTH = 5, 4
KEPT = WIDTH - 1


def convolved(
    source: int, length: int, body: int, checkpoint: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """One row behind another of 7 tokens, from block `source` by way of block 3 to block 4.

    Returns the inputs, the stored windows before and after, and S_i, where the row's inputs begin.
    """
    rng = np.random.default_rng(13)
    x = rng.normal(size=(7 + length, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(CHANNELS, WIDTH)).astype(np.float32)
    # The null block is full of what must never be read.
    stored = rng.normal(size=(6, CHANNELS, KEPT)).astype(np.float32)
    stored[0] = np.nan
    blocks = StateBlocks(*(jnp.array([first, row]) for first, row in ((1, source), (0, checkpoint), (5, 4))))
    _, view = convolve_cached(
        jnp.asarray(x), jnp.asarray(weight), None, BlockView.from_array(jnp.asarray(stored)), blocks,
        ragged_rows([7, length], [7, body]),
    )  # fmt: skip
    written = np.asarray(view.plane).view(np.float32).reshape(stored.shape)
    return x, stored, written, 7


def test_t13_a_short_body_takes_the_rest_of_its_window_from_the_one_before() -> None:
    x, old, new, start = convolved(source=2, length=6, body=2)
    np.testing.assert_array_equal(new[3], np.stack([old[2][:, 2], x[start], x[start + 1]], axis=1))
    # The final window comes from the row's raw inputs alone.
    np.testing.assert_array_equal(new[4], x[start + 3 : start + 6].T)
    np.testing.assert_array_equal(new[2], old[2])
    np.testing.assert_array_equal(new[0], old[0])


@pytest.mark.parametrize("body", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("source", [0, 2])
def test_t13_every_position_follows_the_rule_with_and_without_history(body: int, source: int) -> None:
    x, old, new, start = convolved(source, length=6, body=body)
    before = np.zeros((CHANNELS, KEPT)) if source == 0 else old[source]
    expected = np.empty((CHANNELS, KEPT), np.float32)
    for t in range(KEPT):
        rel = body - KEPT + t
        expected[:, t] = x[start + rel] if rel >= 0 else before[:, KEPT + rel]
    np.testing.assert_array_equal(new[3], expected)


def test_t13_a_checkpoint_without_a_block_is_not_stored() -> None:
    _, old, new, _ = convolved(source=2, length=6, body=2, checkpoint=0)
    np.testing.assert_array_equal(new[[0, 1, 2, 3]], old[[0, 1, 2, 3]])
