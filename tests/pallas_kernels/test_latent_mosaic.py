"""The Mosaic kernels of latent attention in the CPU interpreter, which reports races; see test_mosaic_kernels.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import latent_attention as op
from tokenspeed_jax.pallas_kernels.latent_attention.decode_mosaic import latent_decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.pieces import ExpansionTiling
from tokenspeed_jax.pallas_kernels.latent_attention.prefill_mosaic import latent_prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.latent_attention.reference import (
    latent_decode_attention_reference,
    latent_prefill_attention_reference,
)
from tokenspeed_jax.pallas_kernels.latent_attention.splits import choose_splits
from tokenspeed_jax.pallas_kernels.problems import LatentProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

from .one_program import one_program

SHAPE = {"num_heads": 128, "latent_dim": 512, "rope_dim": 64, "tokens_per_page": 64}
SHAPE |= {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
PREFILL = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "tokens_per_page": 64}
PREFILL |= {"dtype": "bfloat16", "cache_dtype": "bfloat16"}
# New and all tokens of each row: a window that starts within a granule, one of two tiles, rows to leave out.
PREFILL_ROWS = ((3, 3), (131, 300), (0, 0), (1, 0), (5, 140))


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def behind_other_pages(view, pages):
    """The same view in a plane whose page 0 stands behind `pages` others, which hold NaN."""
    other = jnp.full((pages, view.plane.shape[1]), 0xFF, jnp.uint8)
    return dataclasses.replace(view, plane=jnp.concatenate([other, view.plane]), first_row=pages)


@pytest.mark.parametrize(
    ("heads", "splits", "kv_lens", "rope_dim"),
    [
        (3, 1, (0, 65, 330), 64),
        (16, 2, (1, 190), 64),
        (32, 1, (130,), 128),
        (34, 1, (0, 65, 330), 64),
        (128, 1, (70,), 64),
        (64, 3, (0, 200), 128),
    ],
)
def test_decode_kernels_equal_the_reference_without_races(interpret, heads, splits, kv_lens, rope_dim):
    problem = LatentProblem.random(
        np.random.default_rng(0), query_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_heads=heads, latent_dim=128,
        rope_dim=rope_dim, nope_dim=16, value_dim=16, columns=6, dtype=jnp.bfloat16,
    )  # fmt: skip
    problem = dataclasses.replace(problem, rows=behind_other_pages(problem.rows, 1))
    arguments, how = problem.decode_arguments(), {"latent_dim": 128, "rule": ScoreRule(0.3)}
    out = one_program(latent_decode_attention_mosaic, **how, splits=splits, interpret=interpret)(*arguments)
    expected = latent_decode_attention_reference(*arguments, **how)
    out, expected = np.asarray(out, np.float32), np.asarray(expected, np.float32)
    np.testing.assert_allclose(out, expected, atol=2e-2)
    np.testing.assert_array_equal(out[np.asarray(kv_lens) == 0], 0.0)
    assert np.linalg.norm(out - expected) < 8e-3 * np.linalg.norm(expected)


def prefill_problem(rows=PREFILL_ROWS, num_heads=2, **options):
    """Expansions to 64 channels; what no row may see holds NaN."""
    options = {"num_tokens": 150, "dtype": jnp.bfloat16, "unseen": float("nan"), **options}
    problem = LatentProblem.random(
        np.random.default_rng(0), query_lens=[row[0] for row in rows], kv_lens=[row[1] for row in rows],
        num_heads=num_heads, latent_dim=64, rope_dim=64, nope_dim=64, value_dim=64, **options,
    )  # fmt: skip
    return dataclasses.replace(problem, rows=behind_other_pages(problem.rows, 1))


def interpreted_prefill(problem, tiling, interpret):
    prefill = one_program(latent_prefill_attention_mosaic, rule=ScoreRule(0.1), tiling=tiling, interpret=interpret)
    return np.asarray(prefill(*problem.prefill_arguments()), np.float32)


def test_prefill_kernel_equals_the_reference_without_races(interpret):
    """Rows in one piece, and in pieces of two blocks that rows straddle: the same bits."""
    problem = prefill_problem()
    out = interpreted_prefill(problem, None, interpret)
    expected = np.asarray(latent_prefill_attention_reference(*problem.prefill_arguments(), ScoreRule(0.1)), np.float32)
    np.testing.assert_allclose(out, expected, atol=2e-2)
    assert np.linalg.norm(out - expected) < 8e-3 * np.linalg.norm(expected)
    np.testing.assert_array_equal(out[[134, *range(140, 150)]], 0.0)
    np.testing.assert_array_equal(interpreted_prefill(problem, ExpansionTiling(1, 2), interpret), out)


def test_prefill_kernel_takes_fewer_tokens_than_it_loads(interpret):
    problem = prefill_problem([(70, 70)], 1, num_tokens=70)
    expected = latent_prefill_attention_reference(*problem.prefill_arguments(), ScoreRule(0.1))
    out = interpreted_prefill(problem, None, interpret)
    np.testing.assert_allclose(out, np.asarray(expected, np.float32), atol=2e-2)


def test_the_expansion_is_cut_to_what_the_workspace_holds():
    short = ExpansionTiling.choose(heads=128, rows=1, columns=128, page=64, bytes_per_key=512)
    assert short == ExpansionTiling(group_heads=16, piece_blocks=64)
    wide = ExpansionTiling.choose(heads=128, rows=256, columns=2048, page=64, bytes_per_key=512)
    assert wide.piece_blocks * 128 * 16 * 512 <= 128 * 2**20
    assert ExpansionTiling.choose(heads=6, rows=1, columns=1, page=64, bytes_per_key=512) == ExpansionTiling(2, 1)


def test_the_reason_for_refusing_to_prefill_a_geometry_names_it(monkeypatch):
    assert "not a Hopper GPU" in op.prefill_mosaic_refusal(**PREFILL)
    monkeypatch.setattr(op, "hopper_refusal", lambda: None)
    for tokens_per_page in (16, 32, 64):
        assert op.prefill_mosaic_refusal(**{**PREFILL, "tokens_per_page": tokens_per_page}) is None
    for change, word in (
        ({"dtype": "float32", "cache_dtype": "float32"}, "float32"),
        ({"cache_dtype": "float16"}, "float16"),
        ({"nope_dim": 96}, "96 + 64"),
        ({"rope_dim": 0}, "128 + 0"),
        ({"nope_dim": 192}, "192 + 64"),
        ({"value_dim": 192}, "192 of values"),
        ({"tokens_per_page": 48}, "48 tokens"),
    ):
        assert word in op.prefill_mosaic_refusal(**{**PREFILL, **change})


def test_splits_are_chosen_to_fill_the_gpu():
    assert choose_splits(rows=64, head_tiles=2, columns=128) == 1
    assert choose_splits(rows=64, head_tiles=1, columns=128) == 2
    assert choose_splits(rows=1, head_tiles=1, columns=128) >= 16
    assert choose_splits(rows=1, head_tiles=1, columns=1) == 1


def test_the_reason_for_refusing_a_geometry_names_it(monkeypatch):
    assert "not a Hopper GPU" in op.decode_mosaic_refusal(**SHAPE)
    monkeypatch.setattr(op, "hopper_refusal", lambda: None)
    for heads in (1, 16, 32, 33, 64, 128):
        assert op.decode_mosaic_refusal(**{**SHAPE, "num_heads": heads}) is None
    for change, word in (
        ({"dtype": "float32", "cache_dtype": "float32"}, "float32"),
        ({"cache_dtype": "float16"}, "float16"),
        ({"latent_dim": 192}, "192 + 64"),
        ({"rope_dim": 128}, "512 + 128"),
        ({"rope_dim": 0}, "512 + 0"),
        ({"tokens_per_page": 32}, "32 tokens"),
        ({"num_heads": 96}, "96 heads"),
    ):
        assert word in op.decode_mosaic_refusal(**{**SHAPE, **change})
