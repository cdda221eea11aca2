"""Cutting rows into chunks: every token once, in order, and a boundary at every checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.chunks import Chunks
from tokenspeed_jax.pallas_kernels.recurrent_problems import ragged_rows
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows

SIZE = 4
TOKENS = (1, 24, 70)
"""Of a step: few, so that the examples share programs."""

cut_rows = jax.jit(Chunks.cut, static_argnums=(1, 2, 3))


@st.composite
def rows_with_checkpoints(draw):
    lengths = draw(st.lists(st.integers(0, 13), min_size=1, max_size=5))
    num_tokens = min(count for count in TOKENS if count >= sum(lengths))
    if draw(st.booleans()):
        lengths[-1] += num_tokens - sum(lengths)  # a step without padding
    bodies = [draw(st.integers(1, length)) if length else 0 for length in lengths]
    return lengths, bodies, num_tokens


@settings(max_examples=60, deadline=None)
@given(rows_with_checkpoints())
def test_chunks_hold_each_part_of_each_row_in_order(case):
    lengths, bodies, num_tokens = case
    chunks = cut_rows(ragged_rows(lengths, bodies), num_tokens, SIZE, 3)
    expected, token = [], 0
    for row, (length, body) in enumerate(zip(lengths, bodies, strict=True)):
        for begin, end in ((0, body), (body, length)):
            for first in range(begin, end, SIZE):
                last = min(first + SIZE, end)
                expected.append(
                    (row, [token + i for i in range(first, last)], first == 0, last == body, last == length)
                )
        token += length
    assert int(chunks.count) == len(expected)
    assert chunks.capacity % 3 == 0
    held = np.asarray(chunks.tokens)
    for i in range(chunks.capacity):
        live = i < len(expected)
        row, tokens, opens, closes_body, closes_row = expected[i] if live else (len(lengths), [], False, False, False)
        assert held[i].tolist() == tokens + [num_tokens] * (SIZE - len(tokens))
        flags = [bool(x[i]) for x in (chunks.opens, chunks.closes_body, chunks.closes_row)]
        assert (int(chunks.rows[i]), flags) == (row, [opens, closes_body, closes_row])
    slots = np.asarray(chunks.slots)
    np.testing.assert_array_equal(held.reshape(-1)[slots[: sum(lengths)]], np.arange(sum(lengths)))
    assert (slots[sum(lengths) :] == held.size).all()


def test_a_row_resumed_at_its_checkpoint_is_cut_where_the_cold_row_is():
    cold = cut_rows(ragged_rows([23], [12]), 23, SIZE)
    warm = cut_rows(RecurrentRows(jnp.array([0, 11], jnp.int32), jnp.array([11], jnp.int32)), 11, SIZE)
    tail = np.asarray(cold.tokens)[3:6]
    np.testing.assert_array_equal(np.where(tail < 23, tail - 12, 11), np.asarray(warm.tokens)[:3])


def test_gather_and_restore_are_inverse_and_fill_with_zeros():
    chunks = cut_rows(ragged_rows([5, 0, 3], [2, 0, 3]), 10, SIZE)
    values = jnp.arange(1.0, 21.0).reshape(10, 2)
    cut = chunks.gather(values)
    assert float(jnp.sum(cut)) == float(jnp.sum(values[:8]))
    np.testing.assert_array_equal(chunks.restore(cut), values.at[8:].set(0))
