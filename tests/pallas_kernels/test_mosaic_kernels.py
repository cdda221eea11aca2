"""The Mosaic kernels in the CPU interpreter, which models barriers and the copy engine and reports races."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tokenspeed_jax.pallas_kernels import decode_attention as decode_op
from tokenspeed_jax.pallas_kernels import prefill_attention as prefill_op
from tokenspeed_jax.pallas_kernels.decode_attention.mosaic import decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.decode_attention.pieces import DecodeTiling, RowCut, piece_order
from tokenspeed_jax.pallas_kernels.decode_attention.reference import decode_attention_reference
from tokenspeed_jax.pallas_kernels.prefill_attention.mosaic import PrefillTiling, prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.prefill_attention.reference import prefill_attention_reference
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

from .one_program import one_program

SHAPE = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tokens_per_page": 64}
SHAPE |= {"dtype": "bfloat16", "kv_dtype": "bfloat16"}
SINKS = jnp.asarray([-jnp.inf, 5.0, 7.0], jnp.bfloat16)  # of the heads of a problem
HUGE_SINKS = jnp.asarray([1e30, -jnp.inf, 1e4], jnp.float32)


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
    ("tiling", "kv_heads", "kv_lens", "rule", "sinks"),
    [
        (DecodeTiling(1, 1, 32, 2, 1), 1, (0, 65, 200), ScoreRule(0.2), None),
        (DecodeTiling(1, 1, 32, 2, 2), 1, (0, 65), ScoreRule(0.2), SINKS),
        (DecodeTiling(2, 2, 32, 2, 2), 2, (0, 65), ScoreRule(0.2), None),
        (DecodeTiling(3, 1, 1, 2, 2), 1, (1, 190), ScoreRule(0.2, soft_cap=3.0), None),
        (DecodeTiling(2, 1, 2, 2, 1), 1, (0, 200, 100), ScoreRule(0.2, sliding_window=130), SINKS),
        (DecodeTiling(3, 3, 32, 2, 2), 1, (190,), ScoreRule(0.2), SINKS),
        # A sink that takes all may not upset the merge of a row's pieces.
        (DecodeTiling(5, 1, 1, 3, 1), 1, (0, 300, 70), ScoreRule(0.2), HUGE_SINKS),
        (DecodeTiling(3, 2, 1, 1, 2, whole_pages=2), 1, (130, 128), ScoreRule(0.2), None),
    ],
    ids=["whole", "whole_sinks", "heads", "cap", "window_sinks", "one_row", "huge_sinks", "one_stage"],
)
def test_decode_kernel_equals_the_reference_without_races(interpret, tiling, kv_heads, kv_lens, rule, sinks):
    tiling = dataclasses.replace(tiling, blocks=2)  # so that one block takes several pieces
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=[1] * len(kv_lens), kv_lens=kv_lens, num_heads=3 * kv_heads,
        num_kv_heads=kv_heads, head_dim=64, columns=5, sliding_window=rule.sliding_window, dtype=jnp.bfloat16,
    )  # fmt: skip
    problem = dataclasses.replace(problem, k=behind_other_pages(problem.k, 1), v=behind_other_pages(problem.v, 2))
    arguments = problem.decode_arguments()
    decode = one_program(decode_attention_mosaic, rule=rule, tiling=tiling, interpret=interpret)
    out = decode(*arguments, sinks=sinks)
    assert_close(out, decode_attention_reference(*arguments, rule, sinks))


def test_a_decoded_row_does_not_depend_on_its_batch_nor_on_the_width_of_its_table(interpret):
    tiling = DecodeTiling(3, 1, 1, 2, 1)
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=[1, 1], kv_lens=(150, 70), num_heads=2, num_kv_heads=1, head_dim=64,
        columns=3, dtype=jnp.bfloat16,
    )  # fmt: skip
    q, k, v, table, lens = problem.decode_arguments()

    decode = one_program(decode_attention_mosaic, rule=ScoreRule(0.2), tiling=tiling, interpret=interpret)
    both = decode(q, k, v, table, lens)
    wider = decode(q[::-1], k, v, jnp.pad(table[::-1], ((0, 0), (0, 4))), lens[::-1].at[1].set(64))
    np.testing.assert_array_equal(np.asarray(both[1], np.float32), np.asarray(wider[0], np.float32))
    alone = decode(q[1:], k, v, table[1:], lens[1:])
    np.testing.assert_array_equal(np.asarray(both[1], np.float32), np.asarray(alone[0], np.float32))


@pytest.mark.parametrize(
    ("tiling", "query_lens", "kv_lens", "num_tokens", "heads", "rule", "sinks"),
    [
        (PrefillTiling(1, 2, blocks=1), (5, 0, 66), (200, 0, 66), 75, (1, 1), ScoreRule(0.2), None),
        (PrefillTiling(2, 2), (70,), (190,), 70, (1, 1), ScoreRule(0.2, sliding_window=40, soft_cap=3.0), None),
        (PrefillTiling(1, 2, blocks=None, turns=False), (9,), (9,), 12, (1, 1), ScoreRule(0.2), None),
        # More padding than a block has keys: it stands far before position 0.
        (PrefillTiling(1, 2, blocks=2), (3,), (3,), 180, (1, 1), ScoreRule(0.2), None),
        (PrefillTiling(1, 3), (70,), (190,), 75, (1, 1), ScoreRule(0.2, sliding_window=40), SINKS[2:]),
        # Blocks across the window's lower end, within it and on the diagonal.
        (PrefillTiling(1, 2), (9,), (320,), 9, (1, 1), ScoreRule(0.2, sliding_window=200), None),
        # Several heads of a KV head: each for itself for rows of tokens, together for rows of one token.
        (PrefillTiling(1, 2, blocks=2), (3, 1, 0, 1), (3, 70, 0, 130), 7, (3, 1), ScoreRule(0.2), SINKS),
        (PrefillTiling(1, 2), (1, 9), (130, 66), 12, (4, 2), ScoreRule(0.2, sliding_window=70, soft_cap=3.0), None),
        # Warpgroups that see fewer keys than their tile, in blocks with several tiles.
        (PrefillTiling(1, 3, 3, blocks=1), (140, 9), (200, 9), 149, (1, 1), ScoreRule(0.2), SINKS[1:2]),
        (PrefillTiling(1, 2, 3, blocks=2, turns=False), (66, 1), (140, 65), 75, (2, 1), ScoreRule(0.2), None),
    ],
)  # fmt: skip
def test_prefill_kernel_equals_the_reference_without_races(
    interpret, tiling, query_lens, kv_lens, num_tokens, heads, rule, sinks
):
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=query_lens, kv_lens=kv_lens, num_tokens=num_tokens, num_heads=heads[0],
        num_kv_heads=heads[1], head_dim=64, columns=5, sliding_window=rule.sliding_window, dtype=jnp.bfloat16,
    )  # fmt: skip
    problem = dataclasses.replace(problem, k=behind_other_pages(problem.k, 2), v=behind_other_pages(problem.v, 1))
    arguments = problem.prefill_arguments()
    prefill = one_program(prefill_attention_mosaic, rule=rule, tiling=tiling, interpret=interpret)
    out = prefill(*arguments, sinks=sinks)
    assert_close(out, prefill_attention_reference(*arguments, rule, sinks))


def test_a_prefilled_row_does_not_depend_on_its_batch(interpret):
    problem = PagedProblem.random(
        np.random.default_rng(0), query_lens=(3, 1), kv_lens=(70, 100), num_tokens=8, num_heads=2, num_kv_heads=1,
        head_dim=64, columns=2, dtype=jnp.bfloat16,
    )  # fmt: skip
    q, k, v, table, starts, lens = problem.prefill_arguments()

    def prefill(q, table, starts, lens):
        out = prefill_attention_mosaic(
            q, k, v, table, starts, lens, ScoreRule(0.2), tiling=PrefillTiling(1, 2), interpret=interpret
        )
        return np.asarray(out, np.float32)

    both = prefill(q, table, starts, lens)
    # The row of one token at another place.
    alone = prefill(q[3:], jnp.pad(table[1:], ((0, 0), (0, 4))), jnp.array([0, 1]), lens[1:])
    np.testing.assert_array_equal(both[3], alone[0])
    np.testing.assert_array_equal(both[:3], prefill(q[:3], table[:1], jnp.array([0, 3]), lens[:1]))


def chosen(rows, columns, kv_heads=8, head_dim=128, sliding_window=None):
    return DecodeTiling.choose(
        rows=rows, kv_heads=kv_heads, columns=columns, head_dim=head_dim, sliding_window=sliding_window
    )


def test_pieces_fill_the_gpu_and_keep_long_rows_short():
    assert chosen(64, 16).most_pieces == 1
    assert chosen(64, 512, sliding_window=1024).most_pieces == 1
    assert chosen(64, 128).most_pieces == 4
    assert chosen(1, 128).least_pieces >= 16
    assert chosen(1, 1).most_pieces == 1
    assert chosen(16, 16).most_pieces == 1
    assert chosen(16, 64).least_pieces == 2
    assert chosen(8, 16).least_pieces == 4
    # The partial outputs of a wide table stay bounded.
    assert 256 * chosen(256, 8192).most_pieces <= 2048


@pytest.mark.parametrize("rule", [ScoreRule(1.0), ScoreRule(1.0, sliding_window=700)], ids=["all", "window"])
def test_the_pieces_of_a_row_cover_its_visible_pages_once_and_all_are_in_the_order(rule):
    lengths = np.asarray([0, 1, 64, 65, 700, 2048, 2049, 9999, 32768])
    for tiling in (
        chosen(len(lengths), 512),
        chosen(16, 512),
        chosen(64, 512),
        DecodeTiling(1, 1, 32, 2, 2),
        DecodeTiling(7, 2, 3, 2, 2),
    ):
        cut = RowCut.of(jnp.asarray(lengths, jnp.int32), rule, tiling)
        first = np.maximum(lengths - (rule.sliding_window or 10**6), 0) // 64
        np.testing.assert_array_equal(cut.first_page, first)
        np.testing.assert_array_equal(cut.pages, -(-lengths // 64) - first)
        assert (cut.pieces >= 1).all()
        assert (cut.pieces <= tiling.most_pieces).all()
        assert (cut.share * cut.pieces >= cut.pages).all()
        assert (np.asarray(cut.share * (cut.pieces - 1)) < np.maximum(cut.pages, 1)).all()
        order = np.asarray(piece_order(jnp.asarray(lengths), rule, tiling))
        listed = [row * tiling.most_pieces + i + 1 for row in range(len(lengths)) for i in range(cut.pieces[row])]
        count = len(listed)
        assert sorted(order[:count]) == listed
        assert (order[count:] == 0).all()
        assert len(order) > count
        pages = np.asarray(cut.pages)[(order[:count] - 1) // tiling.most_pieces]
        assert (np.diff(pages) <= 0).all()


@pytest.mark.parametrize("rows", [1, 9, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_pieces_of_a_row_do_not_depend_on_the_width_of_the_table(rows, head_dim):
    for pages in (1, 15, 16, 17, 33, 64, 128):
        length = jnp.int32(pages * 64)
        cuts = [
            RowCut.of(length, ScoreRule(1.0), chosen(rows, columns, head_dim=head_dim))
            for columns in (pages, pages + 1, 200, 512)
        ]
        assert len({(int(cut.pieces), int(cut.share)) for cut in cuts}) == 1


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
