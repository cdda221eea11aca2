import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.prefill_attention import prefill_attention
from tokenspeed_jax.pallas_kernels.prefill_attention.tiles import QueryTiles, max_tiles
from tokenspeed_jax.pallas_kernels.problems import PagedProblem


def prefill_problem(seed=0, query_lens=(40, 0, 1, 70), kv_lens=(40, 0, 33, 200), **options):
    settings = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "tokens_per_page": 16, **options}
    return PagedProblem.random(np.random.default_rng(seed), query_lens=query_lens, kv_lens=kv_lens, **settings)


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "implementation"))
def prefill(*arguments, **options):
    return prefill_attention(*arguments, **options)


cut = jax.jit(QueryTiles.cut, static_argnames=("num_tokens", "tile", "alignment"))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("sliding_window", "soft_cap", "sinks"),
    [(None, None, None), (20, 4.0, None), (20, None, jnp.linspace(-2.0, 3.0, 6, dtype=jnp.bfloat16))],
)
def test_each_token_of_a_chunk_equals_a_decode_step_at_its_position(implementation, sliding_window, soft_cap, sinks):
    problem = prefill_problem(query_lens=(20, 0, 3), kv_lens=(20, 0, 50), num_tokens=25, sliding_window=sliding_window)
    options = {"scale": 0.3, "sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks}
    out = prefill(*problem.prefill_arguments(), implementation=implementation, **options)
    rows = jnp.array([0] * 20 + [2] * 3)
    lens = jnp.array([*range(1, 21), 48, 49, 50])
    steps = decode_attention(
        problem.q[:23], problem.k, problem.v, problem.page_table[rows], lens, implementation="reference", **options
    )
    np.testing.assert_allclose(out[:23], steps, atol=2e-6)
    np.testing.assert_array_equal(out[23:], 0.0)


@st.composite
def rows_of_chunks(draw):
    kv_lens = draw(st.lists(st.integers(0, 300), min_size=3, max_size=3))
    return tuple(draw(st.integers(0, min(length, 90))) for length in kv_lens), tuple(kv_lens)


@pytest.mark.parametrize(
    ("groups", "sliding_window", "soft_cap", "with_sinks", "dtype"),
    [
        (1, None, None, False, jnp.float32),
        (3, 7, 3.0, False, jnp.float32),
        (3, 150, None, False, jnp.bfloat16),
        (3, 70, None, True, jnp.float32),
    ],
)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), rows=rows_of_chunks())
def test_xla_equals_the_reference_on_any_rows(groups, sliding_window, soft_cap, with_sinks, dtype, seed, rows):
    problem = prefill_problem(
        seed,
        *rows,
        num_heads=2 * groups,
        columns=20,
        num_pages=62,
        num_tokens=272,
        sliding_window=sliding_window,
        dtype=dtype,
    )
    sinks = jnp.linspace(-2.0, 3.0, 2 * groups) if with_sinks else None
    options = {"scale": 0.25, "sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks}
    expected = prefill(*problem.prefill_arguments(), implementation="reference", **options)
    actual = prefill(*problem.prefill_arguments(), implementation="xla", **options)
    assert actual.dtype == expected.dtype == dtype
    tolerance = 3e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance)


def test_a_row_is_bit_identical_alone_in_a_batch_and_in_a_wider_table():
    problem = prefill_problem()
    q, k, v, table, starts, lens = problem.prefill_arguments()
    batch = prefill(q, k, v, table, starts, lens, scale=0.2, implementation="xla")
    widened = prefill(q, k, v, jnp.pad(table, ((0, 0), (0, 40))), starts, lens, scale=0.2, implementation="xla")
    np.testing.assert_array_equal(widened, batch)
    for row in (0, 2, 3):
        begin, end = int(starts[row]), int(starts[row + 1])
        alone = prefill(
            q[begin:end], k, v, table[row : row + 1], jnp.array([0, end - begin]), lens[row : row + 1], scale=0.2,
            implementation="xla",
        )  # fmt: skip
        np.testing.assert_array_equal(alone, batch[begin:end])


def test_padding_is_zeros_and_only_visible_rows_of_pages_are_read():
    problem = prefill_problem(
        query_lens=(5, 33, 0), kv_lens=(140, 33, 0), num_tokens=60, sliding_window=30, unseen=float("nan")
    )
    for implementation, sinks in itertools.product(("reference", "xla"), (None, jnp.linspace(-2.0, 3.0, 6))):
        options = {"scale": 1.0, "sliding_window": 30, "sinks": sinks, "implementation": implementation}
        out = np.asarray(prefill(*problem.prefill_arguments(), **options))
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out[38:], 0.0)
        assert (np.abs(out[:38]).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(implementation):
    problem = prefill_problem(sliding_window=50)
    run = functools.partial(
        prefill, *problem.prefill_arguments(), scale=0.3, sliding_window=50, implementation=implementation
    )
    np.testing.assert_allclose(run(sinks=jnp.full(6, -jnp.inf)), run(), atol=2e-6)
    for huge in (200.0, 1e30):
        np.testing.assert_allclose(run(sinks=jnp.full(6, huge)), 0.0, atol=1e-30)
    one = np.asarray(run(sinks=jnp.full(6, -jnp.inf).at[1].set(1e30)))
    np.testing.assert_array_equal(one[:, 1], 0.0)
    np.testing.assert_allclose(np.delete(one, 1, axis=1), np.delete(np.asarray(run()), 1, axis=1), atol=2e-6)


def test_a_step_of_padding_alone_is_zeros():
    problem = prefill_problem(query_lens=(0, 0), kv_lens=(0, 0), num_tokens=8, columns=4)
    for options in ({}, {"sliding_window": 8}, {"sinks": jnp.ones(6)}):
        np.testing.assert_array_equal(
            prefill(*problem.prefill_arguments(), scale=1.0, implementation="xla", **options), 0.0
        )


@settings(max_examples=100, deadline=None)
@given(
    query_lens=st.lists(st.integers(0, 70), min_size=5, max_size=5),
    tile=st.sampled_from([8, 64]),
    alignment=st.sampled_from([1, 8]),
)
def test_tiles_cover_every_token_once_and_never_cross_rows(query_lens, tile, alignment):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.asarray(query_lens, np.int32) + 5
    tiles = cut(jnp.asarray(starts), jnp.asarray(lens), num_tokens=350, tile=tile, alignment=alignment)
    assert tiles.row.shape[0] == max_tiles(350, 5, tile, alignment)
    covered = []
    for row, start, length, position in zip(*(np.asarray(column) for column in tiles[:4]), strict=True):
        if length:
            assert starts[row] <= start < start + length <= starts[row + 1]
            assert start % alignment == 0 or start == starts[row]
            assert start % alignment + length <= tile
            assert position == 5 + start - starts[row]
            covered += range(start, start + length)
    assert covered == list(range(starts[-1]))
    leads = starts[:-1] % alignment
    assert int(tiles.count) == sum(-(-(n + lead) // tile) for n, lead in zip(query_lens, leads, strict=True) if n)
    assert (np.asarray(tiles.length)[int(tiles.count) :] == 0).all()


@settings(max_examples=50, deadline=None)
@given(query_lens=st.lists(st.integers(0, 70), min_size=5, max_size=5))
def test_tiles_that_see_most_keys_come_first_and_unused_ones_last(query_lens):
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.asarray(query_lens, np.int32) * np.arange(1, 6, dtype=np.int32)
    tiles = cut(jnp.asarray(starts), jnp.asarray(lens), num_tokens=350, tile=16)
    ordered = tiles.longest_first()
    before, after = (np.stack([np.asarray(column) for column in columns[:4]], axis=1) for columns in (tiles, ordered))
    used = before[before[:, 2] > 0]
    # Equals stay in token order.
    np.testing.assert_array_equal(after[: len(used)], used[np.argsort(-(used[:, 2] + used[:, 3]), kind="stable")])
    assert (after[len(used) :, 2] == 0).all()


def test_what_does_not_fit_is_refused_by_name():
    q, k, v, table, starts, lens = prefill_problem().prefill_arguments()
    with pytest.raises(ValueError, match="query_starts must be 5 integers"):
        prefill_attention(q, k, v, table, starts[:-1], lens, scale=1.0)
    with pytest.raises(ValueError, match="kv_lens must be 4 integers"):
        prefill_attention(q, k, v, table, starts, lens[1:], scale=1.0)
    with pytest.raises(ValueError, match=r"head dim 8.*16"):
        prefill_attention(q[:, :, :8], k, v, table, starts, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"sinks must be 6 floats.*\[1\]"):
        prefill_attention(q, k, v, table, starts, lens, scale=1.0, sinks=jnp.zeros(1))
    with pytest.raises(ValueError, match="implementation must be"):
        prefill_attention(q, k, v, table, starts, lens, scale=1.0, implementation="cudnn")
