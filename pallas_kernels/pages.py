"""`PageView`: one field of the cache arena as attention kernels see it, pages of token rows.

A plane of the arena is a donated `uint8` buffer. On a GPU the width-changing bitcast to the field's dtype is
free and stays in place, so kernels and scatters work on a typed view of the whole plane. On a CPU that bitcast
copies the plane; there rows are gathered as bytes and bitcast afterwards, and written as bytes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped, UInt8


def bitcast_is_free() -> bool:
    """Whether viewing bytes as another dtype costs nothing on the default backend."""
    return jax.default_backend() == "gpu"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageView:
    """Pages of one field inside one plane.

    Attributes:
        plane: the plane's bytes, `uint8[num_parents, bytes_per_parent]`; parent 0 is the null parent.
        page_shape: (tokens, kv heads, head dim) of one kernel page; pages tile the plane exactly.
        dtype: element type of the rows.
        first_row: index, in units of pages from the start of the plane, of page id 0 (the null page).
    """

    plane: UInt8[Array, "parents bytes"]
    page_shape: tuple[int, int, int] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    first_row: int = dataclasses.field(default=0, metadata={"static": True})

    @classmethod
    def from_array(cls, pages: Shaped[Array, "pages tokens heads dim"]) -> "PageView":
        """Wraps a typed array, page id = index on its first axis (tests and benchmarks)."""
        raw = lax.bitcast_convert_type(pages, jnp.uint8)
        num_pages, tokens, heads, dim = pages.shape
        return cls(raw.reshape(num_pages, -1), (tokens, heads, dim), pages.dtype.name)

    @property
    def tokens_per_page(self) -> int:
        return self.page_shape[0]

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.page_shape[1:]) * jnp.dtype(self.dtype).itemsize

    @property
    def num_rows(self) -> int:
        """Pages that the plane holds, the null parent's included."""
        return self.plane.size // (self.tokens_per_page * self._row_bytes)

    def rows(self, page_ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Index of each page on the first axis of `typed()`."""
        return page_ids + self.first_row

    def typed(self) -> Shaped[Array, "rows tokens heads dim"]:
        """The whole plane as pages; free on a GPU, a copy on a CPU."""
        itemsize = jnp.dtype(self.dtype).itemsize
        shape = (self.num_rows, *self.page_shape)
        if itemsize == 1:
            return lax.bitcast_convert_type(self.plane.reshape(shape), jnp.dtype(self.dtype))
        return lax.bitcast_convert_type(self.plane.reshape(*shape, itemsize), jnp.dtype(self.dtype))

    def take(self, page_ids: Int[Array, "..."]) -> Shaped[Array, "... tokens heads dim"]:
        """Copies of the named pages; page id 0 reads zeros as long as nothing writes the null page."""
        if bitcast_is_free():
            return self.typed()[self.rows(page_ids)]
        itemsize = jnp.dtype(self.dtype).itemsize
        raw = self.plane.reshape(self.num_rows, -1)[self.rows(page_ids)]
        shape = (*page_ids.shape, *self.page_shape)
        if itemsize == 1:
            return lax.bitcast_convert_type(raw.reshape(shape), jnp.dtype(self.dtype))
        return lax.bitcast_convert_type(raw.reshape(*shape, itemsize), jnp.dtype(self.dtype))

    def write(self, slots: Int[Array, " tokens"], values: Shaped[Array, "tokens heads dim"]) -> "PageView":
        """The view after storing one row per slot (`slot = page id * tokens_per_page + offset`).

        Slots inside the null page and negative slots are dropped: nothing ever writes page id 0.
        """
        tokens = self.tokens_per_page
        end = self.num_rows * tokens
        index = jnp.where(slots < tokens, end, slots + self.first_row * tokens)
        values = values.astype(self.dtype)
        if values.shape[0] == 1:
            # XLA turns a scatter of one row into a select and an update-slice, and then copies the plane for it.
            index = jnp.pad(index, (0, 1), constant_values=end)
            values = jnp.pad(values, ((0, 1), (0, 0), (0, 0)))
        if bitcast_is_free():
            rows = self.typed().reshape(end, *self.page_shape[1:]).at[index].set(values, mode="drop")
            raw = lax.bitcast_convert_type(rows, jnp.uint8)
        else:
            update = lax.bitcast_convert_type(values, jnp.uint8).reshape(values.shape[0], self._row_bytes)
            raw = self.plane.reshape(end, self._row_bytes).at[index].set(update, mode="drop")
        return dataclasses.replace(self, plane=raw.reshape(self.plane.shape))
