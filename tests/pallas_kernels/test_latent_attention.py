import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_xla import ExpansionTiling, latent_prefill_attention_xla
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.problems import LatentProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

LATENT = 24
SCALE = 0.3


def latent_problem(seed=0, query_lens=None, kv_lens=(130, 1, 0, 64, 65), **options):
    query_lens = [1] * len(kv_lens) if query_lens is None else query_lens
    sizes = {"num_heads": 3, "latent_dim": LATENT, "rope_dim": 8, "nope_dim": 12, "value_dim": 10}
    sizes |= {"tokens_per_page": 16, **options}
    return LatentProblem.random(np.random.default_rng(seed), query_lens=query_lens, kv_lens=kv_lens, **sizes)


@functools.partial(jax.jit, static_argnames=("implementation",))
def decode(*arguments, implementation=None):
    return latent_decode_attention(*arguments, latent_dim=LATENT, scale=SCALE, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("implementation",))
def prefill(*arguments, implementation=None):
    return latent_prefill_attention(*arguments, scale=SCALE, implementation=implementation)


def by_hand(problem, row, token):
    """Token `token` of the step, of row `row`, in float64: keys and values of every head written out."""
    q, key, value = (np.asarray(x, np.float64) for x in (problem.q[token], problem.key, problem.value))
    pages, size = np.asarray(problem.rows.typed(), np.float64), problem.rows.tokens_per_page
    position = int(problem.kv_lens[row] - problem.query_starts[row + 1]) + token
    cached = np.stack([pages[int(problem.page_table[row, t // size]), t % size, 0] for t in range(position + 1)])
    latent, shared = cached[:, :LATENT], cached[:, LATENT:]
    out = []
    for head in range(q.shape[0]):
        keys = np.concatenate([latent @ key[head].T, shared], axis=-1)
        scores = SCALE * keys @ q[head]
        weights = np.exp(scores - scores.max())
        out.append(weights / weights.sum() @ (latent @ value[head].T))
    return np.stack(out)


def expanded(problem, latents):
    return np.einsum("thl,hvl->thv", np.asarray(latents, np.float64), np.asarray(problem.value, np.float64))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_decode_attends_as_written_out_by_hand(implementation):
    problem = latent_problem(kv_lens=(37, 1, 16))
    out = expanded(problem, decode(*problem.decode_arguments(), implementation=implementation))
    for row in range(3):
        np.testing.assert_allclose(out[row], by_hand(problem, row, row), atol=3e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_prefill_attends_as_written_out_by_hand(implementation):
    problem = latent_problem(query_lens=(5, 0, 40, 1), kv_lens=(37, 0, 40, 18), num_tokens=50)
    out = prefill(*problem.prefill_arguments(), implementation=implementation)
    for row, token in ((0, 0), (0, 4), (2, 5), (2, 20), (2, 44), (3, 45)):
        np.testing.assert_allclose(out[token], by_hand(problem, row, token), atol=3e-6)
    np.testing.assert_array_equal(out[46:], 0.0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), kv_lens=st.lists(st.integers(0, 300), min_size=4, max_size=4))
def test_absorbed_and_expanded_agree_on_any_lengths(seed, kv_lens):
    """Invariant 6; prefill of one token per row is decode."""
    problem = latent_problem(seed, [min(1, n) for n in kv_lens], kv_lens, num_tokens=4, columns=20, num_pages=80)
    q, rows, table, lens = problem.decode_arguments()
    tokens = np.asarray(problem.query_starts[:-1])
    decoded = decode(jnp.asarray(np.asarray(q)[np.minimum(tokens, 3)]), rows, table, lens, implementation="xla")
    decoded = expanded(problem, decoded)
    for implementation in ("reference", "xla"):
        out = prefill(*problem.prefill_arguments(), implementation=implementation)
        for row, (token, length) in enumerate(zip(tokens, kv_lens, strict=True)):
            if length:
                np.testing.assert_allclose(out[token], decoded[row], atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 150)), min_size=3, max_size=3),
)
def test_xla_prefill_equals_the_reference_on_any_rows(dtype, seed, rows):
    query_lens = [new for new, _ in rows]
    kv_lens = [new + old if new else 0 for new, old in rows]
    problem = latent_problem(seed, query_lens, kv_lens, num_tokens=220, columns=15, num_pages=50, dtype=dtype)
    expected = prefill(*problem.prefill_arguments(), implementation="reference")
    actual = prefill(*problem.prefill_arguments(), implementation="xla")
    assert actual.dtype == expected.dtype == dtype
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=1e-5 if dtype == jnp.float32 else 4e-2)


@pytest.mark.parametrize("tiling", [ExpansionTiling(8, 16), ExpansionTiling(256, 512)])
def test_prefill_is_the_same_for_any_tiling(tiling):
    problem = latent_problem(query_lens=(30, 1, 9), kv_lens=(75, 40, 9))
    actual = latent_prefill_attention_xla(*problem.prefill_arguments(), ScoreRule(SCALE), tiling=tiling)
    np.testing.assert_allclose(actual, prefill(*problem.prefill_arguments(), implementation="reference"), atol=1e-5)


def test_a_decoded_row_is_bit_identical_alone_in_a_batch_and_in_a_wider_table():
    problem = latent_problem(kv_lens=(130, 70, 0, 300, 5))
    q, rows, table, lens = problem.decode_arguments()
    batch = decode(q, rows, table, lens, implementation="xla")
    wide = jnp.pad(table, ((0, 0), (0, 40)))
    np.testing.assert_array_equal(decode(q, rows, wide, lens, implementation="xla"), batch)
    for row in (0, 1, 4):
        one = slice(row, row + 1)
        alone = decode(q[one], rows, table[one], lens[one], implementation="xla")
        np.testing.assert_array_equal(alone[0], batch[row])


def test_a_chunk_is_bit_identical_beside_others_and_in_a_wider_table():
    problem = latent_problem(query_lens=(20, 50, 1), kv_lens=(90, 50, 140), num_tokens=80)
    q, key, value, rows, table, starts, lens = problem.prefill_arguments()
    batch = prefill(q, key, value, rows, table, starts, lens, implementation="xla")
    wide = jnp.pad(table, ((0, 0), (0, 40)))
    np.testing.assert_array_equal(prefill(q, key, value, rows, wide, starts, lens, implementation="xla"), batch)
    for row in range(3):
        # The row alone: every other one without tokens. The step keeps its width, as it does in a bucket.
        own = slice(int(starts[row]), int(starts[row + 1]))
        moved = jnp.zeros_like(q).at[: own.stop - own.start].set(q[own])
        ends = jnp.where(jnp.arange(4) > row, own.stop - own.start, 0)
        only = jnp.where(jnp.arange(3) == row, lens, 0)
        alone = prefill(moved, key, value, rows, table, ends, only, implementation="xla")
        np.testing.assert_array_equal(alone[: own.stop - own.start], batch[own])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_padding_is_zeros_and_only_visible_rows_are_read(implementation):
    problem = latent_problem(kv_lens=(0, 40, 129), unseen=float("nan"))
    out = np.asarray(decode(*problem.decode_arguments(), implementation=implementation))
    np.testing.assert_array_equal(out[0], 0.0)
    assert np.isfinite(out).all()
    assert (np.abs(out[1:]).max(axis=(1, 2)) > 0).all()
    chunk = latent_problem(query_lens=(0, 7, 3), kv_lens=(0, 40, 129), num_tokens=16, unseen=float("nan"))
    out = np.asarray(prefill(*chunk.prefill_arguments(), implementation=implementation))
    np.testing.assert_array_equal(out[10:], 0.0)
    assert np.isfinite(out).all()
    assert (np.abs(out[:10]).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_rows_without_keys_are_left_out_of_prefill(implementation):
    problem = latent_problem(query_lens=(1, 6, 1), kv_lens=(50, 30, 20))
    q, key, value, rows, table, starts, lens = problem.prefill_arguments()
    whole = prefill(q, key, value, rows, table, starts, lens, implementation=implementation)
    some = prefill(q, key, value, rows, table, starts, lens.at[jnp.array([0, 2])].set(0), implementation=implementation)
    np.testing.assert_array_equal(some[1:7], whole[1:7])
    np.testing.assert_array_equal(some[jnp.array([0, 7])], 0.0)


def test_a_short_context_in_a_wide_table_visits_few_blocks():
    problem = latent_problem(query_lens=(3, 1), kv_lens=(100, 20), columns=512)
    text = prefill.lower(*problem.prefill_arguments(), implementation="xla").as_text()
    assert "stablehlo.while" in text
    assert f"{512 * 16}x" not in text  # nothing is as long as the table


def test_what_does_not_fit_is_refused_by_name():
    problem = latent_problem()
    q, rows, table, lens = problem.decode_arguments()
    with pytest.raises(ValueError, match=r"q has shape .*expected \[batch, heads, 32\]"):
        decode(q[:, :, :8], rows, table, lens)
    with pytest.raises(ValueError, match="page_table has 2 rows, q has 5"):
        decode(q, rows, table[:2], lens)
    with pytest.raises(ValueError, match="kv_lens must be 5 integers"):
        decode(q, rows, table, lens[:2])
    with pytest.raises(ValueError, match="hold no latents of 24 channels"):
        decode(q, PageView.from_array(jnp.zeros((3, 16, 2, 32))), table, lens)
    with pytest.raises(ValueError, match="hold no latents of 24 channels"):
        decode(q, PageView.from_array(jnp.zeros((3, 16, 1, 16))), table, lens)
    with pytest.raises(ValueError, match="implementation must be"):
        decode(q, rows, table, lens, implementation="cuda")
    q, key, value, rows, table, starts, lens = problem.prefill_arguments()
    with pytest.raises(ValueError, match=r"expected \[tokens, 3, 20\]"):
        prefill(q[..., :8], key, value, rows, table, starts, lens)
    with pytest.raises(ValueError, match="do not fit together"):
        prefill(q, key, value[:2], rows, table, starts, lens)
    with pytest.raises(ValueError, match="query_starts must be 6 integers"):
        prefill(q, key, value, rows, table, starts[:-1], lens)
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a"):
        prefill(q, key, value, rows, table, starts, lens, implementation="mosaic")
