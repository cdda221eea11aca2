"""`PageView` reads and writes exactly the bytes of the pages it names, on both of its paths."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels import pages
from tokenspeed_jax.pallas_kernels.pages import PageView

DTYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float16": np.float16,
    "uint8": np.uint8,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}


@pytest.fixture(params=["bytes", "typed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The byte path, or the typed view that a GPU takes (a copy here, with the same result)."""
    monkeypatch.setattr(pages, "bitcast_is_free", lambda: request.param == "typed")
    return request.param


def make_view(dtype: str, first_row: int = 2) -> tuple[PageView, np.ndarray]:
    """A plane of 5 parents of 3 pages of (4, 2, 8), null parent zero, and its contents by page row."""
    rng = np.random.default_rng(7)
    content = rng.integers(1, 9, (15, 4, 2, 8)).astype(DTYPES[dtype])
    content[:3] = 0
    plane = jnp.asarray(content.view(np.uint8).reshape(5, -1))
    return PageView(plane, (4, 2, 8), dtype, first_row), content


def contents(view: PageView) -> np.ndarray:
    return np.array(view.plane).reshape(-1).view(DTYPES[view.dtype]).reshape(-1, *view.page_shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_reads_the_named_pages(path: str, dtype: str) -> None:
    view, content = make_view(dtype)
    ids = jnp.array([[1, 12, 0], [7, 7, 3]])
    np.testing.assert_array_equal(view.take(ids), content[np.asarray(ids) + 2])
    np.testing.assert_array_equal(jax.jit(lambda v, i: v.take(i))(view, ids), content[np.asarray(ids) + 2])
    np.testing.assert_array_equal(np.asarray(view.typed()), content)
    assert not np.asarray(view.take(jnp.array([0]))).astype(np.float32).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_changes_the_named_rows_and_no_other_byte(path: str, dtype: str) -> None:
    view, content = make_view(dtype)
    slots = np.array([4, 51, 22, 9])
    values = np.random.default_rng(1).integers(10, 15, (4, 2, 8)).astype(DTYPES[dtype])
    written = jax.jit(lambda v, s, x: v.write(s, x))(view, jnp.asarray(slots), jnp.asarray(values))
    expected = content.copy()
    for slot, value in zip(slots, values, strict=True):
        expected[slot // 4 + 2, slot % 4] = value
    np.testing.assert_array_equal(contents(written), expected)
    assert (written.page_shape, written.dtype, written.first_row) == (view.page_shape, view.dtype, view.first_row)


@pytest.mark.parametrize("slots", [[0, 3, -1, -4, -5, -60], [-(2**31), 2**31 - 1 - 8, 52, 60, 1, 2]])
def test_null_page_negative_and_outside_slots_write_nothing(path: str, slots: list[int]) -> None:
    view, content = make_view("float32")
    values = jnp.full((6, 2, 8), 99.0)
    np.testing.assert_array_equal(contents(view.write(jnp.array(slots, jnp.int32), values)), content)


@pytest.mark.parametrize("slot", [0, 4, 51])
def test_a_single_row_is_written_or_dropped_like_any_other(path: str, slot: int) -> None:
    view, content = make_view("bfloat16")
    written = view.write(jnp.array([slot]), jnp.full((1, 2, 8), 42.0, jnp.bfloat16))
    if slot:
        content[slot // 4 + 2, slot % 4] = 42
    np.testing.assert_array_equal(contents(written), content)


def test_values_are_cast_to_the_rows_dtype(path: str) -> None:
    view, _ = make_view("bfloat16")
    values = np.full((1, 2, 8), 1.00390625, np.float32)
    written = view.write(jnp.array([4]), jnp.asarray(values))
    np.testing.assert_array_equal(contents(written)[3, 0], values[0].astype(ml_dtypes.bfloat16))


def test_both_paths_agree_on_random_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    view, _ = make_view("bfloat16")
    results = []
    slots = rng.permutation(np.arange(-10, 60))[:32]
    values = jnp.asarray(rng.standard_normal((32, 2, 8)), jnp.bfloat16)
    for free in (False, True):
        monkeypatch.setattr(pages, "bitcast_is_free", lambda free=free: free)
        results.append(np.asarray(view.write(jnp.asarray(slots), values).plane))
    np.testing.assert_array_equal(results[0], results[1])


def test_an_array_wraps_with_its_index_as_page_id(path: str) -> None:
    array = jnp.arange(3 * 4 * 2 * 8, dtype=jnp.float32).reshape(3, 4, 2, 8)
    view = PageView.from_array(array)
    assert (view.num_rows, view.tokens_per_page, view.first_row) == (3, 4, 0)
    np.testing.assert_array_equal(view.take(jnp.array([2, 0])), array[jnp.array([2, 0])])


def test_kernel_pages_subdivide_a_block() -> None:
    view, content = make_view("float32")
    halves = PageView(view.plane, (2, 2, 8), "float32", first_row=4)
    # Block 3 is kernel pages 6 and 7 when a block has two of them.
    np.testing.assert_array_equal(halves.take(jnp.array([6, 7])), content[5].reshape(2, 2, 2, 8))
