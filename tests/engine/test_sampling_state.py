"""What sampling remembers of a request: written for its own slot only, and restored after a retraction."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.engine.sampler import sample
from tokenspeed_jax.engine.sampling_state import init_sampling_state

from .sampling_rows import SLOTS, VOCAB, Row, batch, begin

step = jax.jit(sample)


def test_only_rows_that_sample_and_use_history_count_their_token() -> None:
    row = Row(logits=tuple(np.linspace(0, 1, VOCAB)), prompt=(1, 2), output=(3, 3), bias=((5, 1.0),), blocked=(7,))
    rows = [row, replace(row, samples=False), replace(row, uses_history=False), replace(row, samples=True)]
    logits, row_sampling, state = batch(rows, [1, 2, 3, 0])
    state = begin(state, 4, row)
    before = jax.tree.map(np.asarray, state)
    result, after = step(logits, row_sampling, state)
    expected = before.output_counts.copy()
    expected[1, int(result.token[0])] += 1
    np.testing.assert_array_equal(after.output_counts, expected)
    np.testing.assert_array_equal(after.token_flags, before.token_flags)
    np.testing.assert_array_equal(after.logit_bias, before.logit_bias)


def test_begin_request_replaces_its_own_row_and_no_other() -> None:
    row = Row(logits=(0.0,) * VOCAB, prompt=(1, 2), output=(2, 3, 3), bias=((5, 1.5),), blocked=(7, 1))
    state = begin(begin(init_sampling_state(SLOTS, VOCAB), 2, row), 3, row)
    counts, flags, bias = np.zeros(VOCAB, int), np.zeros(VOCAB, int), np.zeros(VOCAB)
    counts[[2, 3]] = [1, 2]
    flags[[1, 2, 7]] = [3, 1, 2]
    bias[5] = 1.5
    for slot in (2, 3):
        np.testing.assert_array_equal(state.output_counts[slot], counts)
        np.testing.assert_array_equal(state.token_flags[slot], flags)
        np.testing.assert_array_equal(state.logit_bias[slot], bias)
    state = begin(state, 2, Row(logits=(0.0,) * VOCAB))
    for array in jax.tree.leaves(state):
        np.testing.assert_array_equal(array[2], 0)
        np.testing.assert_array_equal(array[0], 0)
    np.testing.assert_array_equal(state.output_counts[3], counts)


def test_penalties_after_a_retraction_equal_those_of_the_undisturbed_request() -> None:
    start = Row(
        logits=tuple(np.linspace(0, 1, VOCAB)), frequency=0.5, presence=0.3, repetition=1.3, prompt=(4,), seed=9
    )
    logits, row_sampling, state = batch([start], [1])
    output: list[int] = []
    for index in range(6):
        result, state = step(logits, replace(row_sampling, output_index=jnp.asarray([index], jnp.int32)), state)
        output.append(int(result.token[0]))
    resumed, resumed_rows, resumed_state = batch([replace(start, output=tuple(output))], [2])
    np.testing.assert_array_equal(resumed_state.output_counts[2], state.output_counts[1])
    continued, _ = step(logits, replace(row_sampling, output_index=jnp.asarray([6], jnp.int32)), state)
    again, _ = step(resumed, resumed_rows, resumed_state)
    assert int(continued.token[0]) == int(again.token[0])
