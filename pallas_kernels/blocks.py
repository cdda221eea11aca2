"""`BlockView`: one field of a state group as kernels see it, whole blocks in a plane of the arena.

The counterpart of `PageView` for state: a block is read and written whole, its pages may be farther apart than their
payload (other fields of the group lie between), and every writer names blocks, not token slots.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt8

from tokenspeed_jax.pallas_kernels.pages import bitcast_is_free


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockView:
    """Blocks of one field inside one plane.

    Block id b occupies bytes `[(b + first_row) * stride_bytes + offset_bytes, ... + payload)` of the plane.

    Attributes:
        plane: the plane's bytes, `uint8[num_parents, bytes_per_parent]`; parent 0 is the null parent.
        shape: payload of one block, in elements of `dtype`.
        stride_bytes: bytes from one block to the next; strides tile the plane exactly.
        offset_bytes: where the payload begins in its stride.
        first_row: index, in units of strides from the start of the plane, of block id 0 (the null block).
    """

    plane: UInt8[Array, "parents bytes"]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    stride_bytes: int = dataclasses.field(metadata={"static": True})
    offset_bytes: int = dataclasses.field(default=0, metadata={"static": True})
    first_row: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def from_array(cls, blocks: Shaped[Array, "blocks ..."]) -> "BlockView":
        """Wraps a typed array, block id = index on its first axis (tests and benchmarks)."""
        raw = lax.bitcast_convert_type(blocks, jnp.uint8).reshape(blocks.shape[0], -1)
        return cls(raw, blocks.shape[1:], blocks.dtype.name, raw.shape[1])

    @property
    def num_rows(self) -> int:
        """Strides that the plane holds, the null parent's included."""
        return self.plane.size // self.stride_bytes

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def _elements(self) -> int:
        return math.prod(self.shape)

    def array(self) -> Shaped[Array, "blocks ..."]:
        """All blocks as a typed array, the inverse of `from_array` (tests)."""
        return self.take(jnp.arange(self.num_rows - self.first_row))

    def take(self, block_ids: Int[Array, " ids"]) -> Shaped[Array, "ids ..."]:
        """Copies of the named blocks; zeros for ids at or below 0, whatever the null block holds."""
        rows = jnp.clip(block_ids, 0, None) + self.first_row
        if bitcast_is_free():
            payload = load_columns(self._typed(), rows, self.offset_bytes // self.itemsize, self._elements)
        else:
            raw = load_columns(
                self.plane.reshape(self.num_rows, -1), rows, self.offset_bytes, self._elements * self.itemsize
            )
            payload = _typed_rows(raw, self.dtype)
        payload = payload.reshape(-1, *self.shape)
        live = (block_ids > 0).reshape(-1, *[1] * len(self.shape))
        return jnp.where(live, payload, jnp.zeros((), payload.dtype))

    def write(self, block_ids: Int[Array, " ids"], values: Shaped[Array, "ids ..."]) -> "BlockView":
        """The view after storing whole blocks; ids at or below 0 are dropped, live ids must be distinct."""
        rows = jnp.where(block_ids > 0, block_ids + self.first_row, self.num_rows)
        flat = values.astype(self.dtype).reshape(values.shape[0], -1)
        if values.shape[0] == 1:
            # XLA turns a scatter of one row into a select and an update-slice, and then copies the plane for it.
            rows = jnp.pad(rows, (0, 1), constant_values=self.num_rows)
            flat = jnp.pad(flat, ((0, 1), (0, 0)))
        if bitcast_is_free():
            stored = store_columns(self._typed(), rows, self.offset_bytes // self.itemsize, flat)
            raw = lax.bitcast_convert_type(stored, jnp.uint8)
        else:
            update = lax.bitcast_convert_type(flat, jnp.uint8).reshape(flat.shape[0], -1)
            raw = store_columns(self.plane.reshape(self.num_rows, -1), rows, self.offset_bytes, update)
        return dataclasses.replace(self, plane=raw.reshape(self.plane.shape))

    def _typed(self) -> Shaped[Array, "rows elements"]:
        return _typed_rows(self.plane.reshape(self.num_rows, -1), self.dtype)


def _typed_rows(raw: UInt8[Array, "rows bytes"], dtype: str) -> Shaped[Array, "rows elements"]:
    itemsize = jnp.dtype(dtype).itemsize
    split = raw if itemsize == 1 else raw.reshape(raw.shape[0], -1, itemsize)
    return lax.bitcast_convert_type(split, jnp.dtype(dtype))


def load_columns(rows_of: Array, rows: Int[Array, " ids"], first: int, count: int) -> Array:
    """`count` columns from `first` of the named rows of a matrix, rows clipped to those that exist."""
    return lax.gather(
        rows_of,
        jnp.stack([rows, jnp.full_like(rows, first)], axis=-1),
        lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)),
        slice_sizes=(1, count),
        mode=lax.GatherScatterMode.CLIP,
    )


def store_columns(rows_of: Array, rows: Int[Array, " ids"], first: int, values: Array) -> Array:
    """The matrix with `values` in the columns from `first` of the named rows; rows out of range are dropped."""
    return lax.scatter(
        rows_of,
        jnp.stack([rows, jnp.full_like(rows, first)], axis=-1),
        values,
        lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
        ),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )
