"""The Mosaic kernels in the CPU interpreter, which models barriers and the copy engine and reports races."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import decode_attention as decode_op
from tokenspeed_jax.pallas_kernels import prefill_attention as prefill_op
from tokenspeed_jax.pallas_kernels.decode_attention.mosaic import DecodeTiling, decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.decode_attention.reference import decode_attention_reference
from tokenspeed_jax.pallas_kernels.prefill_attention.mosaic import PrefillTiling, prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.prefill_attention.reference import prefill_attention_reference
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 64}
SHAPE |= {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
SINKS = jnp.asarray([-jnp.inf, 5.0, 7.0], jnp.bfloat16)  # of the heads of a problem


@pytest.fixture
def interpret(capsys):
    """Interpreter parameters; a race that it saw fails the test (jax 0.11 reports it, later versions raise)."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert "RACE DETECTED" not in capsys.readouterr().out


def behind_other_pages(view, pages):
    """The same view in a plane whose page 0 stands behind `pages` others, which hold NaN."""
    other = jnp.full((pages, view.plane.shape[1]), 0xFF, jnp.uint8)
    return dataclasses.replace(view, plane=jnp.concatenate([other, view.plane]), first_row=pages)


def assert_close(actual, expected):
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, atol=2e-2)


@pytest.mark.parametrize(
    ("splits", "kv_lens", "rule", "sinks"),
    [
        (1, (0, 65, 200), ScoreRule(0.2), None),
        (2, (1, 190), ScoreRule(0.2, soft_cap=3.0), None),
        (2, (0, 200), ScoreRule(0.2, sliding_window=70), None),
        (1, (0, 65), ScoreRule(0.2), SINKS),
        (2, (0, 190), ScoreRule(0.2, sliding_window=130), SINKS),
    ],
)
def test_decode_kernel_equals_the_reference_without_races(interpret, splits, kv_lens, rule, sinks):
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_heads=3, num_kv_heads=1,
        head_dim=64, columns=5, sliding_window=rule.sliding_window, dtype=jnp.bfloat16,
    )  # fmt: skip
    problem = dataclasses.replace(problem, k=behind_other_pages(problem.k, 1), v=behind_other_pages(problem.v, 2))
    arguments = problem.decode_arguments()
    out = decode_attention_mosaic(*arguments, rule, sinks, tiling=DecodeTiling(splits, 2), interpret=interpret)
    assert_close(out, decode_attention_reference(*arguments, rule, sinks))


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "num_tokens", "rule", "sinks"),
    [
        ((5, 0, 66), (200, 0, 66), 75, ScoreRule(0.2), None),
        ((70,), (190,), 70, ScoreRule(0.2, sliding_window=40, soft_cap=3.0), None),
        ((9,), (9,), 12, ScoreRule(0.2), None),
        # More padding than a block has keys: it stands far before position 0.
        ((3,), (3,), 180, ScoreRule(0.2), None),
        ((70,), (190,), 75, ScoreRule(0.2, sliding_window=40), SINKS[2:]),
    ],
)
def test_prefill_kernel_equals_the_reference_without_races(interpret, query_lens, kv_lens, num_tokens, rule, sinks):
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=query_lens, kv_lens=kv_lens, num_tokens=num_tokens, num_heads=1,
        num_kv_heads=1, head_dim=64, columns=5, sliding_window=rule.sliding_window, dtype=jnp.bfloat16,
    )  # fmt: skip
    problem = dataclasses.replace(problem, k=behind_other_pages(problem.k, 2), v=behind_other_pages(problem.v, 1))
    arguments = problem.prefill_arguments()
    out = prefill_attention_mosaic(*arguments, rule, sinks, tiling=PrefillTiling(1, 2), interpret=interpret)
    assert_close(out, prefill_attention_reference(*arguments, rule, sinks))


def test_splits_are_chosen_to_fill_the_gpu():
    assert DecodeTiling.choose(rows=64, kv_heads=8, columns=128, head_dim=128).splits <= 2
    assert DecodeTiling.choose(rows=1, kv_heads=8, columns=128, head_dim=128).splits >= 16
    assert DecodeTiling.choose(rows=1, kv_heads=8, columns=1, head_dim=64).splits == 1


@pytest.mark.parametrize("op", [decode_op, prefill_op], ids=["decode", "prefill"])
def test_the_reason_for_refusing_a_geometry_names_it(op, monkeypatch):
    assert "not a Hopper GPU" in op.mosaic_refusal(**SHAPE)
    monkeypatch.setattr(op, "hopper_refusal", lambda: None)
    assert op.mosaic_refusal(**SHAPE) is None
    for change, word in (
        ({"dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "float16"}, "float16"),
        ({"head_dim": 96}, "96"),
        ({"tokens_per_page": 16}, "16 tokens"),
        ({"num_heads": 30}, "30"),
    ):
        assert word in op.mosaic_refusal(**{**SHAPE, **change})


def test_decode_refuses_groups_larger_than_its_rows(monkeypatch):
    monkeypatch.setattr(decode_op, "hopper_refusal", lambda: None)
    assert "65 query heads" in decode_op.mosaic_refusal(**{**SHAPE, "num_heads": 65, "num_kv_heads": 1})


def test_asking_for_mosaic_where_it_cannot_run_says_why():
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=[1], kv_lens=[5], num_heads=1, num_kv_heads=1, head_dim=64,
        dtype=jnp.bfloat16,
    )  # fmt: skip
    with pytest.raises(ValueError, match="'mosaic' cannot serve this call: the default device is a cpu"):
        decode_op.decode_attention(*problem.decode_arguments(), scale=1.0, implementation="mosaic")
