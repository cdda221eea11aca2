"""The Mosaic kernels on a Hopper GPU against their references, at the shapes that models have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels import decode_attention as decode_op
from tokenspeed_jax.pallas_kernels import prefill_attention as prefill_op
from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.decode_attention.mosaic import decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.decode_attention.pieces import DecodeTiling
from tokenspeed_jax.pallas_kernels.prefill_attention import prefill_attention
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

DECODE_LENS = (0, 1, 63, 64, 65, 1000, 2500, 4096)
PREFILL_ROWS = ((1, 700), (0, 0), (130, 130), (64, 650), (150, 600), (128, 128), (7, 64))

RULES = {
    "plain": {},
    "window": {"sliding_window": 130},
    "soft_cap": {"soft_cap": 20.0},
    "window_and_soft_cap": {"sliding_window": 400, "soft_cap": 50.0},
    "sinks": {"with_sinks": True},
    "window_and_sinks": {"sliding_window": 128, "with_sinks": True},
}
# Heads, KV heads, head dim: SmolLM2, Gemma 3, Qwen3-8B, gpt-oss, multi-query, groups that fill the matrix rows.
GEOMETRIES = [(9, 3, 64), (4, 1, 256), (32, 8, 128), (64, 8, 64), (12, 1, 128), (64, 1, 64), (63, 1, 64), (16, 8, 256)]


@pytest.fixture(autouse=True)
def _hopper():
    refusal = decode_op.hopper_refusal()
    if refusal:
        pytest.skip(refusal)


def assert_close(actual, expected):
    """Relative error in the norm, as bf16 outputs of a float32 computation allow; no NaN passes."""
    actual, expected = (np.asarray(x, np.float32) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= 6e-3 * np.linalg.norm(expected)


def problem_for(geometry, rows, rule, seed=0, **options):
    heads, kv_heads, dim = geometry
    return PagedProblem.random(
        np.random.default_rng(seed),
        query_lens=[row[0] for row in rows],
        kv_lens=[row[1] for row in rows],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        sliding_window=rule.get("sliding_window"),
        **{"dtype": jnp.bfloat16, **options},
    )


def options_of(problem, rule):
    """Keywords of the kernels for a rule of the table."""
    sinks = head_sinks(problem.q.shape[1]) if rule.get("with_sinks") else None
    return {name: value for name, value in rule.items() if name != "with_sinks"} | {"sinks": sinks}


def head_sinks(heads):
    """From none at all to a sink that outweighs most rows."""
    return jnp.linspace(-4.0, 6.0, heads, dtype=jnp.bfloat16).at[0].set(-jnp.inf)


def decode(problem, implementation, rule):
    function = functools.partial(decode_attention, scale=0.1, implementation=implementation)
    return jax.jit(functools.partial(function, **options_of(problem, rule)))(*problem.decode_arguments())


def prefill(problem, implementation, rule):
    function = functools.partial(prefill_attention, scale=0.1, implementation=implementation)
    return jax.jit(functools.partial(function, **options_of(problem, rule)))(*problem.prefill_arguments())


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_decode_equals_the_reference(geometry, rule):
    problem = problem_for(geometry, [(1, length) for length in DECODE_LENS], rule, columns=70)
    out = decode(problem, "mosaic", rule)
    assert_close(out, decode(problem, "reference", rule))
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 0.0)


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 7, 70])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_decode_is_right_for_any_number_of_pieces(pieces, pairs, dtype):
    problem = problem_for((32, 8, 128), [(1, length) for length in DECODE_LENS], {}, columns=70, dtype=dtype)
    for rule in ({}, {"with_sinks": True}):
        sinks = options_of(problem, rule)["sinks"]
        out = decode_attention_mosaic(
            *problem.decode_arguments(), ScoreRule(0.1), sinks, tiling=DecodeTiling(pieces, 1, 5, 2, pairs)
        )
        assert_close(out, decode(problem, "reference", rule))


@pytest.mark.parametrize(
    ("lens", "geometry", "rule"),
    [
        ([700] * 40 + [32768, 0] + [900] * 22, (32, 8, 128), {"with_sinks": True}),
        ([700] * 40 + [32768, 0] + [900] * 22, (9, 3, 64), {}),
        ([32768], (32, 8, 128), {}),
        ([32768], (4, 1, 256), {"with_sinks": True}),
        ([1024] * 15 + [3000], (32, 8, 128), {}),
        ([1024] * 16, (32, 8, 128), {}),
        ([1000], (32, 8, 128), {"with_sinks": True}),
    ],
    ids=["mixed", "mixed_narrow", "one_long", "one_long_wide", "ragged", "whole", "one_short"],
)
def test_decode_is_right_for_the_tiling_that_a_batch_gets(lens, geometry, rule):
    problem = problem_for(geometry, [(1, length) for length in lens], rule)
    out = decode(problem, "mosaic", rule)
    few = np.unique([0, int(np.argmax(lens)), len(lens) - 1])
    q, k, v, table, kv_lens = problem.decode_arguments()
    reference = functools.partial(decode_attention, scale=0.1, implementation="reference", **options_of(problem, rule))
    assert_close(out[few], reference(q[few], k, v, table[few], kv_lens[few]))
    np.testing.assert_array_equal(np.asarray(out[np.asarray(lens) == 0], np.float32), 0.0)
    np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (out, decode(problem, "mosaic", rule))))


@pytest.mark.parametrize("group", [1, 2, 5, 6, 7, 58, 59, 60])
def test_decode_is_right_for_any_group_of_heads(group):
    """Groups begin anywhere among the tiles of eight rows that are copied; `GEOMETRIES` has other groups."""
    problem = problem_for((3 * group, 3, 64), [(1, length) for length in (200, 64, 3000)], {})
    assert_close(decode(problem, "mosaic", {}), decode(problem, "reference", {}))


def test_decode_reads_no_page_that_its_row_does_not_see():
    """Tables point beyond a row's pages, and below its window, at a page of NaN."""
    for rule in ({}, {"sliding_window": 640}):
        problem = problem_for((32, 8, 128), [(1, length) for length in (1, 700, 5000)], rule)
        q, k, v, table, lens = problem.decode_arguments()
        null = [dataclasses.replace(view, plane=view.plane.at[view.first_row].set(0xFF)) for view in (k, v)]
        column = np.arange(table.shape[1])
        unseen = column >= -(-np.asarray(lens)[:, None] // 64)
        if rule:
            unseen |= column < np.maximum(np.asarray(lens)[:, None] - 640, 0) // 64
        table = jnp.pad(jnp.where(unseen, 0, table), ((0, 0), (0, 100)))
        run = functools.partial(decode_attention, scale=0.1, **rule)
        out = run(q, *null, table, lens, implementation="mosaic")
        assert_close(out, run(q, k, v, table, lens, implementation="reference"))


def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_takes_all():
    problem = problem_for((64, 8, 64), [(1, length) for length in DECODE_LENS], {}, columns=70)
    chunks = problem_for((64, 8, 64), PREFILL_ROWS, {}, columns=11, num_tokens=520)
    for op, arguments in (
        (decode_attention, problem.decode_arguments()),
        (prefill_attention, chunks.prefill_arguments()),
    ):
        run = jax.jit(functools.partial(op, *arguments, scale=0.1, implementation="mosaic"))
        assert_close(run(sinks=jnp.full(64, -jnp.inf)), run())
        for huge in (1e4, 1e30):
            np.testing.assert_array_equal(np.asarray(run(sinks=jnp.full(64, huge)), np.float32), 0.0)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_prefill_equals_the_reference(geometry, rule):
    problem = problem_for(geometry, PREFILL_ROWS, rule, columns=11, num_tokens=520)
    out = prefill(problem, "mosaic", rule)
    assert_close(out, prefill(problem, "reference", rule))
    np.testing.assert_array_equal(np.asarray(out[480:], np.float32), 0.0)


def test_a_prefill_mostly_of_padding_equals_the_reference():
    problem = problem_for((32, 8, 128), [(3, 70), (0, 0), (1, 900)], {}, num_tokens=2048)
    assert_close(prefill(problem, "mosaic", {}), prefill(problem, "reference", {}))


@pytest.mark.parametrize("num_tokens", [1, 63, 65])
def test_prefill_of_few_tokens_equals_the_reference(num_tokens):
    problem = problem_for((32, 8, 128), [(num_tokens, 500)], {}, dtype=jnp.float16)
    assert_close(prefill(problem, "mosaic", {}), prefill(problem, "reference", {}))


def test_the_kernels_repeat_bit_for_bit():
    """A race would move the bits."""
    decoded = problem_for((32, 8, 128), [(1, 4000)] * 40, {})
    chunk = problem_for((32, 8, 128), [(700, 2000), (900, 900)], {})
    first = decode(decoded, "mosaic", {}), prefill(chunk, "mosaic", {})
    for _ in range(5):
        np.testing.assert_array_equal(decode(decoded, "mosaic", {}), first[0])
        np.testing.assert_array_equal(prefill(chunk, "mosaic", {}), first[1])


def test_mosaic_serves_bf16_by_default_and_xla_serves_float32():
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 64}
    for op in (decode_op, prefill_op):
        assert op.mosaic_refusal(**shape, dtype="bfloat16", kv_dtype="bfloat16") is None
        assert "float32" in op.mosaic_refusal(**shape, dtype="float32", kv_dtype="float32")
    problem = problem_for((32, 8, 128), [(1, 300), (1, 64)], {}, dtype=jnp.float32)
    for run in (decode, prefill):
        np.testing.assert_allclose(run(problem, None, {}), run(problem, "reference", {}), atol=2e-6)


def test_the_pages_are_read_in_place():
    """No copy of a plane: the compiled step's temporaries stay far below one."""
    problem = problem_for((32, 8, 128), [(1, 4096)] * 8, {})
    plane_bytes = problem.k.plane.nbytes
    for function, arguments in (
        (decode_attention, problem.decode_arguments()),
        (prefill_attention, problem.prefill_arguments()),
    ):
        compiled = jax.jit(functools.partial(function, scale=0.1, implementation="mosaic")).lower(*arguments).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < plane_bytes // 8
