"""Tables to pages and positions to slots, against the worked examples and a token-by-token reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.write_locations import decode_window, extend_span, token_row_slots
from tokenspeed_jax.pallas_kernels.table_expansion import expand_block_table, position_slots
from tokenspeed_jax.recipes.spec import CacheGroupSpec

T4_TABLE = jnp.array([[5, 0, 7], [9, -1, -1], [3, 3, 3]], jnp.int32)
T4_PAGES = [[10, 11, 0, 0, 14, 15, 0], [18, 19, 0, 0, 0, 0, 0], [0] * 7]


def test_t4_expansion() -> None:
    np.testing.assert_array_equal(expand_block_table(T4_TABLE, 2, 7, actual_rows=2), T4_PAGES)
    np.testing.assert_array_equal(expand_block_table(T4_TABLE, 2, 7, actual_rows=0), np.zeros((3, 7)))


def test_t5_decode_window() -> None:
    rows, positions = decode_window(jnp.array([300, 130, 1]), 2)
    np.testing.assert_array_equal(positions, [298, 299, 128, 129, 0, 0])
    np.testing.assert_array_equal(position_slots(jnp.array(T4_PAGES), rows, positions, 64), [938, 939, 0, 0, 0, 0])


def test_t5_extend_span_and_positions_beyond_the_table() -> None:
    pages = jnp.array(T4_PAGES)
    rows, positions = extend_span(jnp.array([0, 4, 4, 4]), jnp.array([130, 0, 0]), 6)
    np.testing.assert_array_equal(rows, [0, 0, 0, 0, -1, -1])
    np.testing.assert_array_equal(position_slots(pages, rows, positions, 64), [766, 767, 0, 0, 0, 0])
    np.testing.assert_array_equal(position_slots(pages, jnp.array([0]), jnp.array([448]), 64), [0])


def test_t6_token_shaped_rows() -> None:
    table = jnp.array([[3, 8]])

    def slots(positions: list[int], stride: int, base: int) -> np.ndarray:
        rows = jnp.zeros(len(positions), jnp.int32)
        return np.asarray(
            token_row_slots(
                table, rows, jnp.array(positions), rows_per_page=64, entry_stride_tokens=stride, base_block=base
            )
        )

    np.testing.assert_array_equal(slots([0, 3, 4, 255, 256, 511, 512], 4, 0), [192, 192, 193, 255, 512, 575, -1])
    np.testing.assert_array_equal(slots([127, 128, 191, 192, 255, 256], 1, 2), [-1, 192, 255, 512, 575, -1])
    outside = token_row_slots(table, jnp.array([-1, 1]), jnp.array([0, 0]), rows_per_page=64, entry_stride_tokens=1)
    np.testing.assert_array_equal(outside, [-1, -1])


# Shapes are the same in every example, so that the operations compile once.
ROWS, BLOCKS, MAX_RATIO = 3, 5, 4


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """A random table with holes and ragged padding, a block granularity, and a divisor of it as kernel page."""
    page_size, ratio = draw(st.sampled_from([1, 2, 8])), draw(st.integers(1, MAX_RATIO))
    cells = st.lists(st.integers(-1, 50), min_size=ROWS * BLOCKS, max_size=ROWS * BLOCKS)
    return np.array(draw(cells), np.int32).reshape(ROWS, BLOCKS), page_size * ratio, page_size


@settings(max_examples=60, deadline=None)
@given(tables(), st.integers(0, ROWS))
def test_expanded_pages_hold_the_tokens_of_their_block(case: tuple[np.ndarray, int, int], live: int) -> None:
    raw, granularity, page_size = case
    ratio = granularity // page_size
    pages = np.asarray(expand_block_table(jnp.asarray(raw), ratio, BLOCKS * MAX_RATIO, live))
    assert not pages[:, BLOCKS * ratio :].any()
    for row in range(ROWS):
        for token in range(BLOCKS * granularity):
            block, page = raw[row, token // granularity], pages[row, token // page_size]
            if block > 0 and row < live:
                assert page * page_size + token % page_size == block * granularity + token % granularity
            else:
                assert page == 0


@settings(max_examples=60, deadline=None)
@given(tables(), st.lists(st.tuples(st.integers(-2, 5), st.integers(-3, 200)), min_size=16, max_size=16))
def test_slots_follow_the_one_invariant(case: tuple[np.ndarray, int, int], tokens: list[tuple[int, int]]) -> None:
    raw, granularity, page_size = case
    rows, positions = (np.array(values, np.int32) for values in zip(*tokens, strict=True))
    pages = expand_block_table(jnp.asarray(raw), granularity // page_size, BLOCKS * MAX_RATIO)
    slots = np.asarray(position_slots(pages, jnp.asarray(rows), jnp.asarray(positions), page_size))
    for row, position, slot in zip(rows, positions, slots, strict=True):
        inside = 0 <= row < ROWS and 0 <= position < BLOCKS * granularity
        block = raw[row, position // granularity] if inside else 0
        assert slot == (block * granularity + position % granularity if block > 0 else 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=4, max_size=4), st.integers(1, 3))
def test_a_window_is_consecutive_single_decodes_and_an_extend(kv_lens: list[int], n: int) -> None:
    lens = jnp.array([length + n - 1 for length in kv_lens])
    rows, positions = decode_window(lens, n)
    for j in range(n):
        _, single = decode_window(lens - n + 1 + j)
        np.testing.assert_array_equal(np.asarray(positions).reshape(-1, n)[:, j], single)
    span_rows, span_positions = extend_span(jnp.arange(5) * n, lens, 4 * n)
    np.testing.assert_array_equal(rows, span_rows)
    np.testing.assert_array_equal(positions, span_positions)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=5, max_size=5))
def test_a_span_names_every_new_token_once(spans: list[tuple[int, int]]) -> None:
    starts = np.cumsum([0] + [new for _, new in spans], dtype=np.int32)
    kv_lens = np.array([prefix + new for prefix, new in spans], np.int32)
    rows, positions = extend_span(jnp.asarray(starts), jnp.asarray(kv_lens), 48)
    expected = [(row, prefix + i) for row, (prefix, new) in enumerate(spans) for i in range(new)]
    expected += [(-1, 0)] * (48 - len(expected))
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == expected


FULL = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=128, entry_stride_tokens=1)
SLIDING = CacheGroupSpec(
    "sliding", "history", "sliding_window", False, rows_per_page=64, entry_stride_tokens=1, sliding_window_tokens=96
)
STATE = CacheGroupSpec("state", "state", "full_history", False, checkpoint_granularity=128)
CONTRACT = CacheRuntimeContract(
    128, 20, 128, (FULL, STATE, SLIDING),
    {"full": 21, "sliding": 41, "state": 21}, {"full": 1, "sliding": 2, "state": 1},
)  # fmt: skip


def router() -> CacheGroupRouter:
    return CacheGroupRouter(CONTRACT, {"full": 64, "sliding": 32}, max_context_len=500, overlap_tokens=2)


def test_history_groups_are_routed_with_absolute_tables() -> None:
    it = router()
    assert it.group_ids == ("full", "sliding")
    # 502 tokens: the sliding group's table is as long as any other, its columns are absolute.
    assert (it.table_columns("full"), it.table_columns("sliding")) == (4, 8)
    assert (it.kernel_page_size("full"), it.kernel_page_size("sliding")) == (64, 32)


def test_tables_expand_to_pages_and_slots_inside_a_compiled_step() -> None:
    it = router()
    tables = {
        "full": np.array([[5, 0, 7, 0], [9, -1, -1, -1], [0] * 4], np.int32),
        "sliding": np.array([[0, 0, 0, 0, 40, 0, 0, 0], [2, *[-1] * 7], [0] * 8], np.int32),
    }
    full = LayerBinding(0, "full", (("k", "layer.0.k"), ("v", "layer.0.v")), -1)
    sliding = LayerBinding(1, "sliding", (("k", "layer.1.k"), ("v", "layer.1.v")), 95)

    @jax.jit
    def step(tables: dict, kv_lens: jax.Array) -> tuple:
        routed = it.route(tables, *decode_window(kv_lens))
        return routed.page_tables, [routed.write_locations(layer) for layer in (full, sliding)]

    pages, slots = step(tables, jnp.array([300, 10, 0]))
    np.testing.assert_array_equal(pages["full"], [[*row, 0] for row in T4_PAGES])
    assert pages["sliding"].shape == (3, 16)
    np.testing.assert_array_equal(slots[0], [7 * 128 + 43, 9 * 128 + 9, 0])
    np.testing.assert_array_equal(slots[1], [40 * 64 + 43, 2 * 64 + 9, 0])


def spans(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32).reshape(-1, 3)


def test_spans_become_entries_in_their_order() -> None:
    entries = router().changed_entries("full", spans([2, 1, 2], [1, 0, 1], [2, 1, 1]), np.array([7, 8, 9, 3], np.int32))
    assert entries.dtype == np.int32
    assert entries.T.tolist() == [[2, 1, 7], [2, 2, 8], [1, 0, 9], [2, 1, 3]]
    assert router().changed_entries("full", spans(), np.zeros(0, np.int32)).shape == (3, 0)


@pytest.mark.parametrize(
    ("span", "ids", "message"),
    [
        ([1, 0, 1], np.array([21], np.int32), r"'full' hold ids in \[21, 21\], allowed are -1 to 20"),
        ([1, 0, 1], np.array([-2], np.int32), "allowed are -1"),
        ([1, 3, 2], np.array([1, 1], np.int32), "'full' reach column 4, the step takes 4 columns"),
        ([1, 0, 1], np.array([1], np.int64), "must be int32"),
    ],
)
def test_changes_the_device_could_not_refuse_are_refused_on_the_host(
    span: list[int], ids: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        router().changed_entries("full", spans(span), ids)


def test_a_missing_group_is_refused_while_tracing() -> None:
    with pytest.raises(ValueError, match="sliding"):
        router().route({"full": jnp.zeros((1, 4), jnp.int32)}, jnp.zeros(1, int), jnp.zeros(1, int))


@pytest.mark.parametrize(
    ("page_sizes", "message"),
    [
        ({"full": 64}, "are given for"),
        ({"full": 64, "sliding": 32, "state": 128}, "are given for"),
        ({"full": 48, "sliding": 32}, "does not divide block_granularity 128"),
        ({"full": 0, "sliding": 32}, "kernel page size of 'full'"),
    ],
)
def test_page_sizes_must_fit_the_groups(page_sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheGroupRouter(CONTRACT, page_sizes, 500, 2)
