"""What truncation leaves of a row: the fast forms leave what the sorting one does, ties and extremes included."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels.sampling import MAX_VOCAB, Truncation, draw, gumbel_noise, truncation_cut
from tokenspeed_jax.pallas_kernels.sampling.draw_mosaic import draw_mosaic
from tokenspeed_jax.pallas_kernels.sampling.mosaic import truncation_cut_mosaic

VOCAB, ROWS = 5 * 128, 4


def random_logits(rng: np.random.Generator, vocab: int) -> np.ndarray:
    """A row of one of the kinds that thresholds are hard in."""
    normal = rng.normal(size=vocab).astype(np.float32)
    kinds = {
        "spread": normal * 4,
        "peaked": normal * 12,
        "close": 1000 + normal * 1e-3,
        "ties": np.round(normal),
        "equal": np.full(vocab, normal[0]),
        "zeros": np.where(normal > 0, 0.0, -0.0),
        "masked": np.where(rng.random(vocab) < 0.9, -np.inf, normal * 3),
        "one": np.where(np.arange(vocab) == rng.integers(vocab), normal, -np.inf),
        "huge": normal * 5e37,
    }
    row = kinds[rng.choice(sorted(kinds))].astype(np.float32)
    if not np.isfinite(row).any():
        row[0] = 0.0
    return row


def random_problem(seed: int, vocab: int, rows: int = ROWS) -> tuple[jax.Array, Truncation]:
    rng = np.random.default_rng(seed)
    logits = np.stack([random_logits(rng, vocab) for _ in range(rows)])

    def limit(*values: float) -> jax.Array:
        return jnp.asarray(rng.choice(values, rows), jnp.float32)

    return jnp.asarray(logits), Truncation(
        temperature=limit(1.0, 0.7, 3.0, 1e-4, 1e-30),
        top_k=limit(0, 0, 1, 3, 50, vocab - 1, vocab, 2 * vocab).astype(jnp.int32),
        top_p=limit(1.0, 1.0, 0.9, 0.5, 1e-6, 1 - 2.0**-24),
        min_p=limit(0.0, 0.0, 0.05, 1.0, 1e-30),
    )


def kept(form: Callable[..., jax.Array], problem: tuple[jax.Array, Truncation]) -> np.ndarray:
    """Which logits stay; those that are -inf are never drawn, and a cut of -inf or of the lowest logit is one."""
    logits = np.asarray(problem[0])
    return (logits >= np.asarray(form(*problem))[:, None]) & np.isfinite(logits)


reference, xla = (jax.jit(functools.partial(truncation_cut, implementation=name)) for name in ("reference", "xla"))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 37, VOCAB, 5000]))
def test_bisection_cuts_where_sorting_does(seed: int, vocab: int) -> None:
    problem = random_problem(seed, vocab)
    np.testing.assert_array_equal(kept(xla, problem), kept(reference, problem))


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def test_kernel_cuts_where_sorting_does(interpret) -> None:
    kernel = jax.jit(functools.partial(truncation_cut_mosaic, interpret=interpret))
    for seed in range(6):
        problem = random_problem(seed, VOCAB)
        np.testing.assert_array_equal(kept(kernel, problem), kept(reference, problem), err_msg=str(seed))


def test_more_logits_than_spans_may_rank(interpret) -> None:
    """With k beyond the number of spans no maximum bounds the k-th largest: the whole row is listed."""
    logits = jnp.arange(3 * 128, dtype=jnp.float32)[None, ::-1]
    limits = Truncation(jnp.ones(1), jnp.asarray([300]), jnp.ones(1), jnp.zeros(1))
    assert float(truncation_cut_mosaic(logits, limits, interpret=interpret)[0]) == 3 * 128 - 300


def test_kernel_draws_what_the_plain_form_does(interpret) -> None:
    kernel = jax.jit(functools.partial(draw_mosaic, interpret=interpret))
    plain = jax.jit(functools.partial(draw, implementation="xla"))
    for seed in range(4):
        logits, limits = random_problem(seed, VOCAB)
        rng = np.random.default_rng(seed)
        words = jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32)
        rows = (jnp.asarray(rng.random(ROWS) < 0.3), words, jnp.arange(ROWS, dtype=jnp.int32))
        logits = logits.at[0].set(-jnp.inf) if seed == 3 else logits
        (tokens, logprobs), (expected, expected_logprobs) = kernel(logits, limits, *rows), plain(logits, limits, *rows)
        np.testing.assert_array_equal(tokens, expected, err_msg=str(seed))
        drawn = ~np.asarray(rows[0])
        np.testing.assert_allclose(logprobs[drawn], expected_logprobs[drawn], rtol=1e-5, atol=1e-5)


def test_noise_is_that_of_jax_random() -> None:
    rng = np.random.default_rng(0)
    seed = jnp.asarray(rng.integers(0, 2**32, (3, 2)), jnp.uint32)
    index = jnp.asarray([0, 7, 2**31 - 1], jnp.int32)

    def uniform(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        drawn = jax.random.bits(key, (1001,), jnp.uint32).astype(jnp.float32)
        return jnp.minimum((drawn + 0.5) * 2.0**-32, 1.0 - 2.0**-24)

    expected = -jnp.log(-jnp.log1p(-jax.vmap(uniform)(seed, index)))
    np.testing.assert_allclose(jax.jit(gumbel_noise, static_argnums=2)(seed, index, 1001), expected, rtol=2e-6)


def test_arguments_that_do_not_fit_are_refused() -> None:
    logits, limits = random_problem(0, VOCAB)
    for wrong, match in ((logits.astype(jnp.bfloat16), "float32"), (logits[:2], "2 rows")):
        with pytest.raises(ValueError, match=match):
            truncation_cut(wrong, limits)
    with pytest.raises(ValueError, match=str(MAX_VOCAB)):
        jax.eval_shape(truncation_cut, jax.ShapeDtypeStruct((ROWS, MAX_VOCAB + 1), jnp.float32), limits)
    with pytest.raises(ValueError, match="cannot serve"):
        truncation_cut(logits[:, :100], limits, implementation="mosaic")
