import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.problems import PagedProblem


def decode_problem(seed=0, kv_lens=(130, 1, 0, 64, 65), **options):
    settings = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "tokens_per_page": 16, **options}
    return PagedProblem.random(np.random.default_rng(seed), query_lens=[1] * len(kv_lens), kv_lens=kv_lens, **settings)


@functools.partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "implementation"))
def decode(*arguments, **options):
    return decode_attention(*arguments, **options)


def dense_decode(problem, row, scale, sliding_window, soft_cap, sinks):
    """One row by hand in float64, from the pages one token at a time."""
    length = int(problem.kv_lens[row])
    tokens = problem.k.tokens_per_page
    pages = {name: np.asarray(view.typed(), np.float64) for name, view in (("k", problem.k), ("v", problem.v))}
    first = 0 if sliding_window is None else max(0, length - sliding_window)
    places = [(int(problem.page_table[row, t // tokens]), t % tokens) for t in range(first, length)]
    q = np.asarray(problem.q[row], np.float64)
    group = q.shape[0] // pages["k"].shape[2]
    out = np.zeros_like(q)
    for head in range(q.shape[0]):
        scores = np.array([q[head] @ pages["k"][page, at, head // group] for page, at in places]) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        sink = -np.inf if sinks is None else float(sinks[head])
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        out[head] = sum(w * pages["v"][p, at, head // group] for w, (p, at) in zip(weights, places, strict=True))
        out[head] /= weights.sum() + np.exp(sink - top)
    return out


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("sliding_window", "soft_cap", "sinks"),
    [
        (None, None, None),
        (20, None, None),
        (None, 5.0, None),
        (1, 2.0, None),
        (None, None, jnp.linspace(-2.0, 3.0, 6)),
        (20, 5.0, jnp.linspace(4.0, -4.0, 6, dtype=jnp.bfloat16)),
    ],
)
def test_each_row_attends_as_written_out_by_hand(implementation, sliding_window, soft_cap, sinks):
    problem = decode_problem(kv_lens=(37, 1, 16), sliding_window=sliding_window)
    options = {"scale": 0.3, "sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks}
    out = decode(*problem.decode_arguments(), implementation=implementation, **options)
    for row in range(3):
        np.testing.assert_allclose(out[row], dense_decode(problem, row, **options), atol=2e-6)


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
@given(seed=st.integers(0, 2**31), kv_lens=st.lists(st.integers(0, 400), min_size=4, max_size=4))
def test_xla_equals_the_reference_on_any_lengths(groups, sliding_window, soft_cap, with_sinks, dtype, seed, kv_lens):
    problem = decode_problem(
        seed,
        tuple(kv_lens),
        num_heads=2 * groups,
        columns=26,
        num_pages=106,
        sliding_window=sliding_window,
        dtype=dtype,
    )
    sinks = jnp.linspace(-2.0, 3.0, 2 * groups) if with_sinks else None
    options = {"scale": 0.25, "sliding_window": sliding_window, "soft_cap": soft_cap, "sinks": sinks}
    expected = decode(*problem.decode_arguments(), implementation="reference", **options)
    actual = decode(*problem.decode_arguments(), implementation="xla", **options)
    assert actual.dtype == expected.dtype == dtype
    tolerance = 3e-6 if dtype == jnp.float32 else 1e-2
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance)


def test_a_row_is_bit_identical_alone_in_a_batch_and_in_a_wider_table():
    problem = decode_problem(kv_lens=(130, 70, 0, 300, 5, 33))
    batch = decode(*problem.decode_arguments(), scale=0.2, implementation="xla")
    wide = jnp.pad(problem.page_table, ((0, 0), (0, 40)))
    widened = decode(problem.q, problem.k, problem.v, wide, problem.kv_lens, scale=0.2, implementation="xla")
    np.testing.assert_array_equal(widened, batch)
    for row in (0, 1, 4):
        one = slice(row, row + 1)
        alone = decode(
            problem.q[one], problem.k, problem.v, problem.page_table[one], problem.kv_lens[one], scale=0.2,
            implementation="xla",
        )  # fmt: skip
        np.testing.assert_array_equal(alone[0], batch[row])


def test_padding_rows_are_zeros_and_only_visible_rows_of_pages_are_read():
    problem = decode_problem(kv_lens=(0, 40, 129), sliding_window=30, unseen=float("nan"))
    for implementation, sinks in itertools.product(("reference", "xla"), (None, jnp.linspace(-2.0, 3.0, 6))):
        options = {"scale": 1.0, "sliding_window": 30, "sinks": sinks, "implementation": implementation}
        out = decode(*problem.decode_arguments(), **options)
        assert np.isfinite(np.asarray(out)).all()
        np.testing.assert_array_equal(out[0], 0.0)
        assert (np.abs(np.asarray(out[1:])).max(axis=(1, 2)) > 0).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all(implementation):
    problem = decode_problem(kv_lens=(130, 1, 0, 64, 65), sliding_window=70)
    run = functools.partial(
        decode, *problem.decode_arguments(), scale=0.3, sliding_window=70, implementation=implementation
    )
    np.testing.assert_allclose(run(sinks=jnp.full(6, -jnp.inf)), run(), atol=2e-6)
    for huge in (200.0, 1e30):
        np.testing.assert_allclose(run(sinks=jnp.full(6, huge)), 0.0, atol=1e-30)
    one = np.asarray(run(sinks=jnp.full(6, -jnp.inf).at[4].set(1e30)))
    np.testing.assert_array_equal(one[:, 4], 0.0)
    np.testing.assert_allclose(np.delete(one, 4, axis=1), np.delete(np.asarray(run()), 4, axis=1), atol=2e-6)


def test_a_batch_of_padding_rows_alone_is_zeros():
    problem = decode_problem(kv_lens=(0, 0), columns=4)
    for options in ({}, {"sliding_window": 8}, {"sinks": jnp.ones(6)}):
        np.testing.assert_array_equal(
            decode(*problem.decode_arguments(), scale=1.0, implementation="xla", **options), 0.0
        )


def test_a_short_context_in_a_wide_table_visits_few_blocks():
    """The loop's length is data, not shape: a poisoned far column would show if it were visited."""
    problem = decode_problem(kv_lens=(100, 20), columns=512)
    text = decode.lower(*problem.decode_arguments(), scale=1.0, implementation="xla").as_text()
    assert "stablehlo.while" in text
    assert f"{512 * 16}x" not in text  # nothing is as long as the table


def test_what_does_not_fit_is_refused_by_name():
    problem = decode_problem()
    q, k, v, table, lens = problem.decode_arguments()
    with pytest.raises(ValueError, match=r"head dim 8.*16"):
        decode_attention(q[:, :, :8], k, v, table, lens, scale=1.0)
    with pytest.raises(ValueError, match=r"5 query heads.*2 KV heads"):
        decode_attention(q[:, :5], k, v, table, lens, scale=1.0)
    with pytest.raises(ValueError, match="kv_lens must be 5 integers"):
        decode_attention(q, k, v, table, lens[:2], scale=1.0)
    with pytest.raises(ValueError, match="page_table has 2 rows, q has 5"):
        decode_attention(q, k, v, table[:2], lens, scale=1.0)
    with pytest.raises(ValueError, match="matrix of integers"):
        decode_attention(q, k, v, table.astype(jnp.float32), lens, scale=1.0)
    with pytest.raises(ValueError, match=r"pages of k .* and of v"):
        decode_attention(q, k, PageView.from_array(jnp.zeros((3, 8, 2, 16))), table, lens, scale=1.0)
    with pytest.raises(ValueError, match="sliding_window must be positive"):
        decode_attention(q, k, v, table, lens, scale=1.0, sliding_window=0)
    with pytest.raises(ValueError, match="soft_cap must be positive"):
        decode_attention(q, k, v, table, lens, scale=1.0, soft_cap=-1.0)
    with pytest.raises(ValueError, match=r"sinks must be 6 floats.*\[5\]"):
        decode_attention(q, k, v, table, lens, scale=1.0, sinks=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"sinks must be 6 floats.*int32"):
        decode_attention(q, k, v, table, lens, scale=1.0, sinks=jnp.zeros(6, jnp.int32))
    with pytest.raises(ValueError, match="implementation must be"):
        decode_attention(q, k, v, table, lens, scale=1.0, implementation="cuda")
