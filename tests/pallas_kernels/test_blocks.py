"""`BlockView` reads and writes exactly the bytes of the blocks it names, on both of its paths."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels import blocks
from tokenspeed_jax.pallas_kernels.blocks import BlockView

SHAPE = (3, 4)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16, "uint8": np.uint8}
PARENTS, PACKING, LEAD = 5, 3, 8
FIRST_ROW = PACKING - 1
"""The null block is the last one of the null parent, so that block 1 begins parent 1."""


@pytest.fixture(params=["bytes", "typed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The byte path, or the typed view that a GPU takes (a copy here, with the same result)."""
    monkeypatch.setattr(blocks, "bitcast_is_free", lambda: request.param == "typed")
    return request.param


def make_view(dtype: str, offset_bytes: int = LEAD, trail: int = 16) -> tuple[BlockView, np.ndarray]:
    """A plane of 5 parents of 3 blocks, its bytes by stride; other fields lie before and behind the payload.

    Even the null block holds bytes that are not zero: what a padding row reads must not depend on them.
    """
    stride = offset_bytes + np.dtype(DTYPES[dtype]).itemsize * 12 + trail
    raw = np.random.default_rng(7).integers(1, 60, (PARENTS * PACKING, stride)).astype(np.uint8)
    plane = jnp.asarray(raw.reshape(PARENTS, -1))
    return BlockView(plane, SHAPE, dtype, stride, offset_bytes, FIRST_ROW), raw


def payload(raw: np.ndarray, view: BlockView, block: int) -> np.ndarray:
    size = 12 * np.dtype(DTYPES[view.dtype]).itemsize
    row = raw[block + FIRST_ROW, view.offset_bytes : view.offset_bytes + size]
    return np.ascontiguousarray(row).view(DTYPES[view.dtype]).reshape(SHAPE)


def strides(view: BlockView) -> np.ndarray:
    return np.array(view.plane).reshape(-1, view.stride_bytes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_take_reads_the_named_blocks(path: str, dtype: str) -> None:
    view, raw = make_view(dtype)
    ids = [1, 12, 7, 7, 3]
    expected = np.stack([payload(raw, view, block) for block in ids])
    np.testing.assert_array_equal(view.take(jnp.array(ids)), expected)
    np.testing.assert_array_equal(jax.jit(lambda v, i: v.take(i))(view, jnp.array(ids)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_at_or_below_zero_read_zeros_whatever_the_null_block_holds(path: str, dtype: str) -> None:
    view, raw = make_view(dtype)
    taken = np.asarray(view.take(jnp.array([0, 2, -1, -(2**31)])))
    assert not taken[[0, 2, 3]].astype(np.float32).any()
    np.testing.assert_array_equal(taken[1], payload(raw, view, 2))


@pytest.mark.parametrize(("offset_bytes", "trail"), [(0, 0), (0, 16), (8, 0), (32, 48)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_changes_the_named_payloads_and_no_other_byte(
    path: str, dtype: str, offset_bytes: int, trail: int
) -> None:
    view, raw = make_view(dtype, offset_bytes, trail)
    ids = [4, 12, 1]
    values = np.random.default_rng(1).integers(60, 90, (3, *SHAPE)).astype(DTYPES[dtype])
    written = jax.jit(lambda v, i, x: v.write(i, x))(view, jnp.array(ids), jnp.asarray(values))
    expected = raw.copy()
    for block, value in zip(ids, values, strict=True):
        flat = value.reshape(-1).view(np.uint8)
        expected[block + FIRST_ROW, offset_bytes : offset_bytes + flat.size] = flat
    np.testing.assert_array_equal(strides(written), expected)
    np.testing.assert_array_equal(written.take(jnp.array(ids)), values)
    assert (written.shape, written.dtype, written.stride_bytes) == (view.shape, view.dtype, view.stride_bytes)
    assert (written.offset_bytes, written.first_row) == (view.offset_bytes, view.first_row)


@pytest.mark.parametrize("ids", [[0, -1, -2, -3], [-(2**31), 13, 1000, 0]])
def test_the_null_block_and_ids_that_do_not_exist_are_never_written(path: str, ids: list[int]) -> None:
    view, raw = make_view("float32")
    written = view.write(jnp.array(ids, jnp.int32), jnp.full((4, *SHAPE), 99.0))
    np.testing.assert_array_equal(strides(written), raw)


@pytest.mark.parametrize("block", [-1, 0, 1, 12])
def test_a_single_block_is_written_or_dropped_like_any_other(path: str, block: int) -> None:
    view, raw = make_view("float32")
    value = np.full((1, *SHAPE), 42.0, np.float32)
    written = view.write(jnp.array([block]), jnp.asarray(value))
    if block > 0:
        raw[block + FIRST_ROW, LEAD : LEAD + 48] = value.reshape(-1).view(np.uint8)
    np.testing.assert_array_equal(strides(written), raw)


def test_values_are_cast_to_the_blocks_dtype(path: str) -> None:
    view, _ = make_view("bfloat16")
    values = np.full((1, *SHAPE), 1.00390625, np.float32)
    taken = view.write(jnp.array([4]), jnp.asarray(values)).take(jnp.array([4]))
    np.testing.assert_array_equal(taken, values.astype(ml_dtypes.bfloat16))


def test_two_fields_of_one_stride_do_not_touch_each_other(path: str) -> None:
    plane = jnp.zeros((4, 2 * 128), jnp.uint8)
    window = BlockView(plane, (4, 3), "bfloat16", 128, 0, 1)
    window = window.write(jnp.array([1, 5]), jnp.full((2, 4, 3), 3.0))
    state = BlockView(window.plane, (2, 8), "float32", 128, 64, 1)
    state = state.write(jnp.array([1, 2]), jnp.full((2, 2, 8), 5.0))
    window = BlockView(state.plane, (4, 3), "bfloat16", 128, 0, 1)
    np.testing.assert_array_equal(np.asarray(window.take(jnp.array([1, 2, 5])))[:, 0, 0], [3, 0, 3])
    np.testing.assert_array_equal(np.asarray(state.take(jnp.array([1, 2, 5])))[:, 0, 0], [5, 5, 0])


def test_both_paths_agree_on_random_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    view, _ = make_view("bfloat16")
    ids = jnp.asarray(rng.permutation(np.arange(-6, 20))[:16])
    values = jnp.asarray(rng.standard_normal((16, *SHAPE)), jnp.bfloat16)
    results = []
    for free in (False, True):
        monkeypatch.setattr(blocks, "bitcast_is_free", lambda free=free: free)
        results.append(np.asarray(view.write(ids, values).plane))
    np.testing.assert_array_equal(results[0], results[1])


def test_an_array_wraps_with_its_index_as_block_id(path: str) -> None:
    array = jnp.arange(1, 1 + 4 * 6, dtype=jnp.float32).reshape(4, 2, 3)
    view = BlockView.from_array(array)
    assert (view.num_rows, view.itemsize, view.first_row, view.stride_bytes) == (4, 4, 0, 24)
    np.testing.assert_array_equal(view.take(jnp.array([2, 1])), array[jnp.array([2, 1])])
    # Block 0 is the null block here too.
    np.testing.assert_array_equal(view.array(), array.at[0].set(0.0))
