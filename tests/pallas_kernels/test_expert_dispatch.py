"""The kernels around the experts' products in the CPU interpreter, which reports races: placing and copying tokens, and
summing their choices.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.experts import dispatch
from tokenspeed_jax.pallas_kernels.experts.combination import combination_refusal, combine_mosaic
from tokenspeed_jax.pallas_kernels.experts.dispatch import dispatch_mosaic
from tokenspeed_jax.pallas_kernels.experts.tiles import ExpertTiles
from tokenspeed_jax.pallas_kernels.experts.xla import combine

from .one_program import one_program


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def choices(tokens, top_k, num_experts, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.stack([rng.permutation(num_experts)[:top_k] for _ in range(tokens)]), jnp.int32)


def rows(tokens, hidden, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, hidden)), jnp.bfloat16)


def assert_placed(x, expert_ids, num_experts, tile_rows, interpret):
    """Same places as the portable form's, and each choice's token in its slot, bit for bit."""
    place = one_program(dispatch_mosaic, num_experts=num_experts, tile_rows=tile_rows, interpret=interpret)
    x_slots, tiles = place(x, expert_ids)
    expected = one_program(ExpertTiles.of, num_experts=num_experts, tile_rows=tile_rows)(expert_ids)
    live = int(expected.num_live)
    slots = np.asarray(expected.slot_of_choice)
    np.testing.assert_array_equal(tiles.slot_of_choice, slots)
    np.testing.assert_array_equal(tiles.num_live, [live])
    np.testing.assert_array_equal(tiles.expert_of_tile[:live], expected.expert_of_tile[:live])
    used = np.bincount(slots.reshape(-1) // tile_rows, minlength=tiles.rows_of_tile.size)
    np.testing.assert_array_equal(tiles.rows_of_tile, used)
    np.testing.assert_array_equal(np.asarray(x_slots)[slots], np.broadcast_to(x[:, None], (*slots.shape, x.shape[1])))


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "tile_rows"),
    [
        (1, 1, 1, 8),
        (5, 2, 4, 8),
        (20, 1, 3, 16),  # several tiles of one expert
        (21, 6, 70, 8),  # experts in two matrices, top_k divides none
    ],
)
def test_choices_stand_where_the_portable_form_puts_them(interpret, tokens, top_k, num_experts, tile_rows):
    assert_placed(rows(tokens, 128), choices(tokens, top_k, num_experts), num_experts, tile_rows, interpret)


@pytest.mark.parametrize("summed", [8, 1])
def test_groups_of_choices_are_counted_one_by_one(interpret, monkeypatch, summed):
    """As in long steps: several groups, whose counts a block or XLA adds up."""
    monkeypatch.setattr(dispatch, "GROUP", 64)
    monkeypatch.setattr(dispatch, "SUMMED_GROUPS", summed)
    assert_placed(rows(75, 64), choices(75, 2, 5), 5, 8, interpret)


def test_the_last_block_starts_before_its_own_tokens(interpret):
    """17 tokens in blocks of 16; all of one expert, so that a choice counted twice would move the rest."""
    assert_placed(rows(17, 64), jnp.zeros((17, 1), jnp.int32), 2, 8, interpret)


def test_a_token_of_nan_moves_nothing(interpret):
    x, expert_ids = rows(9, 64), choices(9, 2, 4)
    place = one_program(dispatch_mosaic, num_experts=4, tile_rows=8, interpret=interpret)
    clean, tiles = place(x, expert_ids)
    dirty, _ = place(x.at[4].set(jnp.nan), expert_ids)
    others = np.delete(np.asarray(tiles.slot_of_choice), 4, axis=0)
    np.testing.assert_array_equal(np.asarray(dirty)[others], np.asarray(clean)[others])


@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(3, 2, 128), (2, 8, 384), (1, 1, 2048)])
def test_the_weighted_sum_equals_the_portable_form(interpret, tokens, top_k, hidden):
    y = rows(tokens * top_k + 5, hidden).at[-5:].set(jnp.nan)  # slots that nobody reads
    slots = jnp.asarray(np.random.default_rng(2).permutation(tokens * top_k).reshape(tokens, top_k), jnp.int32)
    weights = jnp.asarray(np.random.default_rng(3).uniform(size=(tokens, top_k)), jnp.float32)
    out = one_program(combine_mosaic, interpret=interpret)(y, slots, weights)
    expected = one_program(combine)(y, slots, weights).astype(y.dtype)
    np.testing.assert_allclose(out.astype(jnp.float32), expected.astype(jnp.float32), rtol=2**-7, atol=1e-6)


def test_rows_that_no_warpgroup_divides_are_left_to_xla():
    assert combination_refusal(2048) is None
    assert "64" in combination_refusal(64)
