"""Drawing under a mask: the masked sampler against a plain reference, and what a redraw leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.engine.redraw import mask_words, unpack_masks
from tokenspeed_jax.engine.sampler import sample

from .sampling_rows import VOCAB, Row, any_row, batch, reference_kept, reference_penalised

step = jax.jit(sample)
masks = st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).filter(any).map(np.array)


@settings(max_examples=40, deadline=None)
@given(st.lists(any_row, min_size=3, max_size=3), st.lists(masks, min_size=3, max_size=3))
def test_a_masked_row_draws_from_what_the_reference_keeps_of_the_allowed_tokens(
    rows: list[Row], allowed: list[np.ndarray]
) -> None:
    logits, row_sampling, state = batch(rows, [1, 2, 3])
    result, _ = step(logits, row_sampling, state, jnp.asarray(np.stack(allowed)))
    for index, (row, mask) in enumerate(zip(rows, allowed, strict=True)):
        expected = np.where(mask, reference_penalised(row), -np.inf)
        if not np.isfinite(expected).any():
            continue  # min_tokens holds back all that the mask allows
        smaller = reference_kept(expected, row, row.top_p * (1 - 1e-5) if row.top_p < 1 else 1.0)
        larger = reference_kept(expected, row, row.top_p * (1 + 1e-5) if row.top_p < 1 else 1.0)
        token = int(result.token[index])
        assert mask[token]
        assert larger[token]
        raw = np.asarray(row.logits, np.float64)
        assert result.logprob[index] == pytest.approx(raw[token] - np.logaddexp.reduce(raw), rel=1e-5, abs=2e-5)
        if (smaller == larger).all():
            kept = np.where(larger, (expected - expected.max()) / np.float32(row.temperature), -np.inf)
            log_share = kept[token] - np.logaddexp.reduce(kept)
            assert result.sampling_logprob[index] == pytest.approx(log_share, rel=1e-5, abs=2e-5)


def test_a_mask_means_what_logits_of_minus_infinity_mean_and_one_of_all_ids_nothing() -> None:
    rng = np.random.default_rng(0)
    rows = [Row(logits=tuple(rng.normal(size=VOCAB)), seed=seed, uses_history=False, top_k=5) for seed in range(3)]
    logits, row_sampling, state = batch(rows, [1, 2, 3])
    allowed = rng.random((3, VOCAB)) < 0.5
    masked, _ = step(logits, row_sampling, state, jnp.asarray(allowed))
    forbidden, _ = step(jnp.where(allowed, logits, -jnp.inf), row_sampling, state, jnp.ones((3, VOCAB), bool))
    np.testing.assert_array_equal(masked.token, forbidden.token)
    np.testing.assert_array_equal(masked.sampling_logprob, forbidden.sampling_logprob)
    plain, _ = step(logits, row_sampling, state)
    unmasked, _ = step(logits, row_sampling, state, jnp.ones((3, VOCAB), bool))
    jax.tree.map(np.testing.assert_array_equal, plain, unmasked)


@pytest.mark.parametrize("vocab", [1, 32, 33, 1000])
def test_masks_hold_an_id_per_bit_lowest_first(vocab: int) -> None:
    allowed = np.random.default_rng(vocab).random((3, vocab)) < 0.5
    padded = np.pad(allowed, ((0, 0), (0, mask_words(vocab) * 32 - vocab)), constant_values=True)
    words = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    np.testing.assert_array_equal(unpack_masks(jnp.asarray(words), vocab), allowed)
