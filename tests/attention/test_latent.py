"""The serving side of latent attention: each row in the form that suits it, with one result."""

import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.attention import latent
from tokenspeed_jax.attention.latent import attend_latent_pages
from tokenspeed_jax.models.attention import LatentAttentionSpec, LatentExpansion
from tokenspeed_jax.pallas_kernels.latent_attention import latent_prefill_attention
from tokenspeed_jax.pallas_kernels.problems import LatentProblem

LAYER = LatentAttentionSpec(0, num_heads=3, latent_dim=24, rope_dim=8, nope_dim=12, value_dim=10, scale=0.3)


def problem_of(query_lens, kv_lens, **options) -> LatentProblem:
    return LatentProblem.random(
        np.random.default_rng(0), query_lens=query_lens, kv_lens=kv_lens, num_heads=3, latent_dim=24, rope_dim=8,
        nope_dim=12, value_dim=10, tokens_per_page=16, **options,
    )  # fmt: skip


def attend(problem: LatentProblem, *, decode: bool):
    expansion = LatentExpansion(problem.key, problem.value)
    starts = None if decode else problem.query_starts
    return attend_latent_pages(
        problem.q, problem.rows, expansion, LAYER, problem.page_table, starts, problem.kv_lens, implementation=None
    )


def test_a_step_of_chunks_and_single_tokens_is_the_expanded_attention_of_all() -> None:
    problem = problem_of((1, 9, 0, 1, 2), (50, 30, 0, 1, 90), num_tokens=16)
    expected = latent_prefill_attention(*problem.prefill_arguments(), scale=0.3, implementation="reference")
    np.testing.assert_allclose(attend(problem, decode=False), expected, atol=1e-5)
    np.testing.assert_array_equal(expected[13:], 0.0)


def test_a_decode_step_gives_each_row_the_bits_that_it_has_beside_chunks() -> None:
    mixed = problem_of((1, 9, 1), (50, 30, 40))
    alone = problem_of((1, 1, 1), (50, 0, 40))
    singles = jnp.array([0, 10])
    rows = alone.q.at[jnp.array([0, 2])].set(mixed.q[singles])
    expansion = LatentExpansion(mixed.key, mixed.value)
    decoded = attend_latent_pages(
        rows, mixed.rows, expansion, LAYER, mixed.page_table, None, alone.kv_lens, implementation=None
    )
    np.testing.assert_array_equal(decoded[jnp.array([0, 2])], attend(mixed, decode=False)[singles])
    np.testing.assert_array_equal(decoded[1], 0.0)


def test_only_chunks_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(
        latent,
        "latent_prefill_attention",
        lambda q, key, value, rows, table, starts, lens, **_: seen.update(lens=lens) or jnp.zeros((*q.shape[:2], 10)),
    )
    attend(problem_of((1, 9, 1), (50, 30, 40)), decode=False)
    assert seen["lens"].tolist() == [0, 30, 0]
