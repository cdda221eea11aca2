"""`CacheArena`: the cache's device memory, one donated `uint8` buffer per plane of the plan.

Bytes live here and nowhere else. A compiled step takes `arena.planes`, donates them, and its result replaces them:
the arena is the only owner, so no old buffer survives a step. Parent 0 of every plane is the null parent and reads
as zeros for the engine's life, because no writer ever stores there.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.pallas_kernels.blocks import BlockView, load_columns, store_columns
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.recipes.layout import INT32_MAX, CacheFieldLayout, CacheMemoryPlan
from tokenspeed_jax.recipes.spec import CacheGroupSpec

Planes = dict[str, UInt8[Array, "parents bytes"]]
Payloads = dict[str, UInt8[Array, "ids bytes"]]

ZERO_WIDTH = 128
"""Block ids of one group that one call of the zeroing program takes; more ids take more calls."""

COPY_WIDTH = 8
"""Copies of one group that one call of the copying program takes; few, since each passes through a buffer."""


class CacheArena:
    """Allocates the planes of a plan, zeroed, directly on the device.

    Args:
        specs: the groups, in dense-index order.
        token_capacity: tokens the pool reports; published in the contract.
        sharding: where the planes live; None for the default device.

    Attributes:
        planes: plane id -> `uint8[num_lcm_blocks + 1, bytes_per_lcm_block]`; the engine puts each step's result here.
        late_compile_seconds: time that programs took that were only compiled when they were needed.
    """

    def __init__(
        self,
        plan: CacheMemoryPlan,
        specs: Sequence[CacheGroupSpec],
        token_capacity: int,
        *,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        self.plan = plan
        self.contract = CacheRuntimeContract(
            prefix_granularity=plan.prefix_granularity,
            num_lcm_blocks=plan.num_lcm_blocks,
            token_capacity=token_capacity,
            group_specs=tuple(specs),
            group_page_counts={group.group_id: group.page_count for group in plan.groups},
            group_packing={group.group_id: group.cache_blocks_per_lcm_block for group in plan.groups},
        )
        self._sharding = sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        self._group_ids = tuple(spec.group_id for spec in specs)
        self._zero: Any = None
        self._copy: CopyPrograms | None = None
        self.late_compile_seconds = 0.0
        self._zeros: Any = None
        self.planes: Planes = self._zeroed()

    @property
    def size(self) -> int:
        """Tokens that the group with the most blocks could address."""
        return self.plan.num_lcm_blocks * max(self.contract.virtual_packing.values()) * self.plan.prefix_granularity

    @property
    def requires_block_zeroing(self) -> bool:
        """Whether fresh blocks must be zeroed before use: a state is read whole, and bytes left by a tenant of
        another dtype may decode to anything."""
        dtypes: dict[str, set[str]] = {}
        for field in self.plan.fields:
            dtypes.setdefault(field.plane_id, set()).add(field.dtype)
        return any(spec.family == "state" for spec in self.contract.group_specs) or any(
            len(names) > 1 for names in dtypes.values()
        )

    def plane_of(self, field_id: str) -> str:
        """Id of the plane that holds a field; `KeyError` for an unknown field."""
        return self.plan.field(field_id).plane_id

    def page_view(self, planes: Planes, field_id: str, kernel_page_size: int) -> PageView:
        """One field as pages of `kernel_page_size` token rows; usable inside the step.

        Kernel page `block id * r + i` is the i-th of the r pages of a block, so ids are those of the router.

        Raises:
            KeyError: unknown field.
            ValueError: the field is no token-row field with an exact stride, or the page size does not divide it.
        """
        field = self.plan.field(field_id)
        if len(field.shape) != 3 or field.payload_bytes != field.page_stride_bytes:
            raise ValueError(
                f"cache field {field_id!r} of shape {field.shape} in pages {field.page_stride_bytes} bytes apart is "
                "not viewable as pages: it must be (tokens, heads, dim) with nothing between pages"
            )
        rows = field.shape[0]
        if kernel_page_size <= 0 or rows % kernel_page_size:
            raise ValueError(f"kernel page size {kernel_page_size} does not divide the {rows} rows of {field_id!r}")
        packing = self.plan.group(field.group_id).cache_blocks_per_lcm_block
        if (self.plan.num_lcm_blocks + 1) * packing * rows > INT32_MAX:
            raise ValueError(f"cache field {field_id!r} has more token rows than int32 slots can address")
        return PageView(
            planes[field.plane_id],
            (kernel_page_size, *field.shape[1:]),
            field.dtype,
            first_row=(packing - 1) * (rows // kernel_page_size),
        )

    def block_view(self, planes: Planes, field_id: str) -> BlockView:
        """One field of a state group as whole blocks; usable inside the step. `KeyError` for an unknown field."""
        field = self.plan.field(field_id)
        packing = self.plan.group(field.group_id).cache_blocks_per_lcm_block
        return BlockView(
            planes[field.plane_id],
            field.shape,
            field.dtype,
            stride_bytes=field.page_stride_bytes,
            offset_bytes=field.field_offset_bytes,
            first_row=packing - 1,
        )

    def zero_blocks(self, blocks: Mapping[str, Iterable[int]]) -> None:
        """Zeroes the payload of the named blocks (local ids; the null id is allowed and already zero).

        Raises:
            IndexError: an id is outside its group; nothing was cleared.
            KeyError: an unknown group; nothing was cleared.
        """
        checked = {
            group_id: [self.plan.check_page(group_id, _as_int(block)) for block in ids]
            for group_id, ids in blocks.items()
        }
        rounds = max((-(-len(ids) // ZERO_WIDTH) for ids in checked.values()), default=0)
        for start in range(0, rounds * ZERO_WIDTH, ZERO_WIDTH):
            ids = np.full((len(self._group_ids), ZERO_WIDTH), -1, np.int32)
            for row, group_id in enumerate(self._group_ids):
                part = checked.get(group_id, [])[start : start + ZERO_WIDTH]
                ids[row, : len(part)] = part
            zero = self._zero or self._timed(self.compile_zeroing)
            self.planes = zero(self.planes, ids)

    def compile_zeroing(self) -> Any:
        """Compiles what `zero_blocks` runs (`jax.stages.Compiled`), so that its first call need not."""
        ids = jax.ShapeDtypeStruct((len(self._group_ids), ZERO_WIDTH), jnp.int32)
        self._zero = jax.jit(self._zero_program, donate_argnums=0).lower(self._plane_shapes(), ids).compile()
        return self._zero

    def compile_copies(self) -> "CopyPrograms":
        """Compiles what `copy_blocks` runs, so that its first call need not."""
        planes = self._plane_shapes()
        ids = jax.ShapeDtypeStruct((len(self._group_ids), COPY_WIDTH), jnp.int32)
        payloads = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._sharding),
            jax.eval_shape(self._read_program, planes, ids),
        )
        self._copy = CopyPrograms(
            jax.jit(self._read_program, out_shardings=self._sharding).lower(planes, ids).compile(),
            jax.jit(self._write_program, donate_argnums=0).lower(planes, payloads, ids).compile(),
        )
        return self._copy

    @property
    def compilations(self) -> int:
        """Programs compiled so far."""
        return (self._zero is not None) + 2 * (self._copy is not None)

    def _timed[T](self, make: Callable[[], T]) -> T:
        start = time.perf_counter()
        program = make()
        self.late_compile_seconds += time.perf_counter() - start
        return program

    def _plane_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for name, p in self.planes.items()}

    def copy_blocks(self, copies: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        """Writes the payload of blocks to other blocks of their groups (local ids).

        Args:
            copies: group id -> (source, destination). No destination may be a source or occur twice.

        Raises:
            IndexError: an id is outside its group, or the null id; nothing was copied.
            KeyError: an unknown group; nothing was copied.
        """
        checked = {
            group_id: [
                (self._check_copied(group_id, source), self._check_copied(group_id, destination))
                for source, destination in pairs
            ]
            for group_id, pairs in copies.items()
        }
        rounds = max((-(-len(pairs) // COPY_WIDTH) for pairs in checked.values()), default=0)
        for start in range(0, rounds * COPY_WIDTH, COPY_WIDTH):
            ids = np.full((2, len(self._group_ids), COPY_WIDTH), -1, np.int32)
            for row, group_id in enumerate(self._group_ids):
                for column, pair in enumerate(checked.get(group_id, [])[start : start + COPY_WIDTH]):
                    ids[:, row, column] = pair
            sources, destinations = ids
            copy = self._copy or self._timed(self.compile_copies)
            self.planes = copy.write(self.planes, copy.read(self.planes, sources), destinations)

    def _check_copied(self, group_id: str, block: object) -> int:
        checked = self.plan.check_page(group_id, _as_int(block))
        if checked == 0:
            raise IndexError(f"the null block of cache group {group_id!r} can be neither source nor destination")
        return checked

    def release(self) -> None:
        """Frees the device memory. The planes keep their shapes, and are good for nothing else until `restore`."""
        for plane in self.planes.values():
            if not plane.is_deleted():
                plane.delete()

    def restore(self) -> None:
        """Zeroes everything, in fresh buffers; the old ones are freed first."""
        self.release()
        self.planes = self._zeroed()

    def null_parent_is_zero(self) -> bool:
        """Whether every byte of the null parent is zero (synchronises)."""
        return not bool(_any_null_byte(self.planes))

    def _zeroed(self) -> Planes:
        parents = self.plan.num_lcm_blocks + 1
        shapes = {plane.plane_id: (parents, plane.bytes_per_lcm_block) for plane in self.plan.planes}
        if self._zeros is None:
            # Kept: an engine that sleeps and wakes must not compile each time.
            self._zeros = jax.jit(
                lambda: {plane_id: jnp.zeros(shape, jnp.uint8) for plane_id, shape in shapes.items()},
                out_shardings=self._sharding,
            )
        return self._zeros()

    def _zero_program(self, planes: Planes, ids: Int32[Array, "groups ids"]) -> Planes:
        """Ids below 0 name nothing."""
        planes = dict(planes)
        for row, group_id in enumerate(self._group_ids):
            packing = self.plan.group(group_id).cache_blocks_per_lcm_block
            pages = (self.plan.num_lcm_blocks + 1) * packing
            rows = jnp.where(ids[row] < 0, pages, ids[row] + packing - 1)
            for field in self.plan.group_fields(group_id):
                nothing = jnp.zeros((rows.shape[0], field.payload_bytes), jnp.uint8)
                planes[field.plane_id] = _store(planes[field.plane_id], rows, nothing, pages, field)
        return planes

    def _read_program(self, planes: Planes, ids: Int32[Array, "groups ids"]) -> Payloads:
        """Ids below 0 read anything."""
        payloads = {}
        for row, group_id in enumerate(self._group_ids):
            packing = self.plan.group(group_id).cache_blocks_per_lcm_block
            pages = (self.plan.num_lcm_blocks + 1) * packing
            for field in self.plan.group_fields(group_id):
                view = planes[field.plane_id].reshape(pages, field.page_stride_bytes)
                payloads[field.field_id] = load_columns(
                    view, ids[row] + packing - 1, field.field_offset_bytes, field.payload_bytes
                )
        return payloads

    def _write_program(self, planes: Planes, payloads: Payloads, ids: Int32[Array, "groups ids"]) -> Planes:
        """Ids below 0 name nothing."""
        planes = dict(planes)
        for row, group_id in enumerate(self._group_ids):
            packing = self.plan.group(group_id).cache_blocks_per_lcm_block
            pages = (self.plan.num_lcm_blocks + 1) * packing
            rows = jnp.where(ids[row] < 0, pages, ids[row] + packing - 1)
            for field in self.plan.group_fields(group_id):
                planes[field.plane_id] = _store(planes[field.plane_id], rows, payloads[field.field_id], pages, field)
        return planes


@dataclass(frozen=True)
class CopyPrograms:
    """Reading and writing apart (`jax.stages.Compiled`): a compiler that fused them would need a second plane."""

    read: Any
    write: Any


def _store(
    plane: UInt8[Array, "parents bytes"],
    rows: Int32[Array, " ids"],
    payload: UInt8[Array, "ids bytes"],
    pages: int,
    field: CacheFieldLayout,
) -> UInt8[Array, "parents bytes"]:
    """The plane with `payload` in one field of the given page rows; rows >= `pages` are dropped."""
    view = plane.reshape(pages, field.page_stride_bytes)
    return store_columns(view, rows, field.field_offset_bytes, payload).reshape(plane.shape)


@jax.jit
def _any_null_byte(planes: Planes) -> Array:
    return jnp.stack([jnp.any(plane[0] != 0) for plane in planes.values()]).any()


def _as_int(block: object) -> object:
    """NumPy ids of the scheduler's arrays as Python ints; anything else as it is, for the id check to judge."""
    return int(block) if isinstance(block, np.integer) else block
