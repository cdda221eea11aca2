"""Latent attention on a Hopper GPU against its reference, at the shapes that models have."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.attention.latent import attend_latent_pages
from tokenspeed_jax.models.attention import LatentAttentionSpec, LatentExpansion
from tokenspeed_jax.pallas_kernels import latent_attention as op
from tokenspeed_jax.pallas_kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from tokenspeed_jax.pallas_kernels.latent_attention.decode_mosaic import latent_decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.pieces import ExpansionTiling
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_mosaic import latent_prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.problems import LatentProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

DECODE_LENS = (0, 1, 63, 64, 65, 1000, 2500, 4096)
PREFILL_ROWS = ((1, 700), (0, 0), (130, 130), (64, 650), (300, 600), (1, 1))
SCALE = 0.1
DIMS = {"latent_dim": 512, "rope_dim": 64, "nope_dim": 128, "value_dim": 128}


@pytest.fixture(autouse=True)
def _hopper():
    refusal = op.hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def assert_close(actual, expected, tolerance=6e-3):
    """Relative error in the norm, as bf16 outputs of a float32 computation allow; no NaN passes."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def problem_for(heads, rows, dtype=jnp.bfloat16, **options):
    return LatentProblem.random(
        np.random.default_rng(0), query_lens=[row[0] for row in rows], kv_lens=[row[1] for row in rows],
        num_heads=heads, dtype=dtype, **{**DIMS, **options},
    )  # fmt: skip


def decode(problem, implementation):
    latent_dim = problem.key.shape[2]
    function = functools.partial(
        latent_decode_attention, latent_dim=latent_dim, scale=SCALE, implementation=implementation
    )
    return jax.jit(function)(*problem.decode_arguments())


def prefill(problem, implementation):
    function = functools.partial(latent_prefill_attention, scale=SCALE, implementation=implementation)
    return jax.jit(function)(*problem.prefill_arguments())


@pytest.mark.parametrize("heads", [1, 16, 24, 32, 40, 64, 128])
def test_decode_equals_the_reference(heads):
    problem = problem_for(heads, [(1, length) for length in DECODE_LENS], columns=70)
    out = decode(problem, "mosaic")
    assert_close(out, decode(problem, "reference"))
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 0.0)


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("dims", [(256, 64), (384, 128), (128, 64)], ids=str)
def test_decode_of_other_rows_equals_the_reference(dims, heads):
    latent_dim, rope_dim = dims
    problem = problem_for(heads, [(1, 300), (1, 65)], latent_dim=latent_dim, rope_dim=rope_dim)
    assert_close(decode(problem, "mosaic"), decode(problem, "reference"))


@pytest.mark.parametrize("splits", [1, 2, 7, 70])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_decode_is_right_for_any_number_of_splits(splits, heads, dtype):
    problem = problem_for(heads, [(1, length) for length in DECODE_LENS], columns=70, dtype=dtype)
    out = latent_decode_attention_mosaic(*problem.decode_arguments(), 512, ScoreRule(SCALE), splits=splits)
    assert_close(out, decode(problem, "reference"))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("heads", [6, 128])
def test_the_prefill_kernel_equals_xla_and_hides_what_no_row_may_see(heads, dtype):
    """Ragged rows with prefixes, rows to leave out, padding tokens; what nobody wrote holds NaN."""
    rows = (*PREFILL_ROWS, (1, 0), (257, 2100))
    problem = problem_for(heads, rows, columns=34, num_tokens=780, dtype=dtype, unseen=float("nan"))
    out = prefill(problem, "mosaic")
    assert_close(out, prefill(problem, "xla"))
    np.testing.assert_array_equal(np.asarray(out, np.float32)[[496, *range(754, 780)]], 0.0)


@pytest.mark.parametrize("piece_blocks", [1, 3, 16])
def test_prefill_in_pieces_is_the_same_attention(piece_blocks):
    """Rows stop at the end of a piece and go on in the next."""
    problem = problem_for(16, ((1000, 2500), (130, 130), (5, 900)), columns=40)
    expected = prefill(problem, "mosaic")
    out = latent_prefill_attention_mosaic(
        *problem.prefill_arguments(), ScoreRule(SCALE), tiling=ExpansionTiling(16, piece_blocks)
    )
    assert_close(out, expected, 1e-3)
    again = latent_prefill_attention_mosaic(
        *problem.prefill_arguments(), ScoreRule(SCALE), tiling=ExpansionTiling(16, piece_blocks)
    )
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("dims", [(64, 64, 64), (64, 128, 128), (128, 64, 64)], ids=str)
def test_prefill_of_other_heads_equals_xla(dims):
    nope_dim, rope_dim, value_dim = dims
    problem = problem_for(
        4, PREFILL_ROWS, columns=11, latent_dim=128, rope_dim=rope_dim, nope_dim=nope_dim, value_dim=value_dim
    )
    assert_close(prefill(problem, "mosaic"), prefill(problem, "xla"))


@pytest.mark.parametrize("heads", [16, 64])
def test_prefill_equals_the_reference(heads):
    """Keys and values are rounded when they are expanded, which the reference does not do."""
    small = {"latent_dim": 128, "nope_dim": 64, "value_dim": 64}
    problem = problem_for(heads, PREFILL_ROWS, columns=11, num_tokens=520, **small)
    out = prefill(problem, "mosaic")
    for token in range(0, 496, 31):  # the reference expands every cached row for every token
        one = problem_for_token(problem, token)
        assert_close(out[token], prefill(one, "reference")[0], 2e-2)
    np.testing.assert_array_equal(np.asarray(out[496:], np.float32), 0.0)


def problem_for_token(problem, token):
    """The problem of one token alone."""
    row = int(np.searchsorted(np.asarray(problem.query_starts[1:]), token, side="right"))
    position = int(problem.kv_lens[row]) - int(problem.query_starts[row + 1]) + token
    one = slice(row, row + 1)
    return LatentProblem(
        problem.q[token : token + 1], problem.key, problem.value, problem.rows, problem.page_table[one],
        jnp.array([0, 1], jnp.int32), jnp.array([position + 1], jnp.int32),
    )  # fmt: skip


@pytest.mark.parametrize("heads", [16, 128])
def test_a_mixed_step_is_the_same_attention_in_every_implementation(heads):
    problem = problem_for(heads, PREFILL_ROWS, columns=11, num_tokens=520)
    layer = LatentAttentionSpec(0, num_heads=heads, scale=SCALE, **DIMS)
    starts, expansion = problem.query_starts, LatentExpansion(problem.key, problem.value)

    def attend(implementation):
        function = functools.partial(attend_latent_pages, layer=layer, implementation=implementation)
        return jax.jit(lambda q: function(q, problem.rows, expansion, page_table=problem.page_table,
                                          query_starts=starts, kv_lens=problem.kv_lens))(problem.q)  # fmt: skip

    assert_close(attend(None), attend("xla"), 1e-2)


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_decode_repeats_bit_for_bit(heads):
    """A race would move the bits."""
    problem = problem_for(heads, [(1, 4000)] * 40)
    first = decode(problem, "mosaic")
    for _ in range(5):
        np.testing.assert_array_equal(decode(problem, "mosaic"), first)


def test_prefill_repeats_bit_for_bit():
    problem = problem_for(128, [(700, 2000), (300, 300), (900, 900)])
    first = prefill(problem, "mosaic")
    for _ in range(5):
        np.testing.assert_array_equal(prefill(problem, "mosaic"), first)


def test_mosaic_serves_bf16_by_default_and_xla_float32():
    shape = {"num_heads": 128, "latent_dim": 512, "rope_dim": 64, "tokens_per_page": 64}
    types = {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
    assert op.decode_mosaic_refusal(**shape, **types) is None
    heads = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    assert op.prefill_mosaic_refusal(**heads, tokens_per_page=64, **types) is None
    problem = problem_for(16, [(1, 300), (1, 64)], jnp.float32)
    np.testing.assert_allclose(decode(problem, None), decode(problem, "reference"), atol=2e-6)


def test_the_pages_are_read_in_place():
    """No copy of a plane: the compiled step's temporaries stay far below one."""
    problem = problem_for(16, [(1, 8192)] * 8)
    function = functools.partial(latent_decode_attention, latent_dim=512, scale=SCALE, implementation="mosaic")
    compiled = jax.jit(function).lower(*problem.decode_arguments()).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < problem.rows.plane.nbytes // 8
