"""Where every field lies: `CacheLayout` inside one parent, `CacheMemoryPlan` inside the whole arena.

A layout knows no capacity. Binding it to a number of parents gives the plan, in which every page of every field has
a byte address. Planes follow one another in the arena and each holds all parents, parent 0 being the null parent.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from tokenspeed_jax.recipes.spec import element_bytes, require_positive_int

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class CacheFieldLayout:
    """One field inside its plane: page c of a parent starts at `c * page_stride_bytes + field_offset_bytes`."""

    group_id: str
    field_id: str
    plane_id: str
    shape: tuple[int, ...]
    dtype: str
    field_offset_bytes: int
    page_stride_bytes: int

    @property
    def payload_bytes(self) -> int:
        return math.prod(self.shape) * element_bytes(self.dtype)


@dataclass(frozen=True)
class CacheLayout:
    """One parent, independent of capacity. Pairs are sorted by id and fields by (plane, group, field), as strings."""

    prefix_granularity: int
    lcm_block_bytes: int
    group_packing: tuple[tuple[str, int], ...]
    plane_bytes: tuple[tuple[str, int], ...]
    fields: tuple[CacheFieldLayout, ...]

    def __post_init__(self) -> None:
        require_positive_int("prefix_granularity", self.prefix_granularity)
        require_positive_int("lcm_block_bytes", self.lcm_block_bytes)
        packing, planes = dict(self.group_packing), dict(self.plane_bytes)
        for name, pairs in (("group_packing", self.group_packing), ("plane_bytes", self.plane_bytes)):
            ids = [identifier for identifier, _ in pairs]
            if not ids or ids != sorted(set(ids)):
                raise ValueError(f"{name} must hold unique ids in ascending order, got {ids}")
            for identifier, value in pairs:
                require_positive_int(f"{name} of {identifier!r}", value)
        order = [(field.plane_id, field.group_id, field.field_id) for field in self.fields]
        if not order or order != sorted(set(order)):
            raise ValueError("fields must be unique and sorted by (plane, group, field)")
        if sum(planes.values()) > self.lcm_block_bytes or any(self.lcm_block_bytes % k for k in packing.values()):
            raise ValueError(
                f"parent of {self.lcm_block_bytes} bytes does not hold its planes or divide by its packing"
            )
        for field in self.fields:
            if field.group_id not in packing or field.plane_id not in planes:
                raise ValueError(f"field {field.field_id!r} names an undeclared group or plane")
            if field.page_stride_bytes * packing[field.group_id] != planes[field.plane_id]:
                raise ValueError(f"pages of field {field.field_id!r} do not tile plane {field.plane_id!r}")
            end = field.field_offset_bytes + field.payload_bytes
            if field.field_offset_bytes < 0 or end > field.page_stride_bytes:
                raise ValueError(f"field {field.field_id!r} lies outside its page stride")

    @cached_property
    def packing(self) -> dict[str, int]:
        """Group id -> `cache_blocks_per_lcm_block`."""
        return dict(self.group_packing)

    def block_bytes(self, group_id: str) -> int:
        """Payload bytes of one block of a group, padding excluded."""
        return _block_bytes(self.fields, group_id)

    def bind(self, num_lcm_blocks: int) -> "CacheMemoryPlan":
        """The plan for `num_lcm_blocks` usable parents; `ValueError` if an id would not fit an int32."""
        require_positive_int("num_lcm_blocks", num_lcm_blocks)
        for group_id, packing in self.group_packing:
            if num_lcm_blocks * packing > INT32_MAX:
                raise ValueError(
                    f"{num_lcm_blocks} parents of {packing} blocks exceed int32 block ids in cache group {group_id!r}"
                )
        planes = []
        offset = 0
        for plane_id, size in self.plane_bytes:
            planes.append(CachePlaneLayout(plane_id, size, offset))
            offset += (num_lcm_blocks + 1) * size
        return CacheMemoryPlan(
            prefix_granularity=self.prefix_granularity,
            lcm_block_bytes=self.lcm_block_bytes,
            num_lcm_blocks=num_lcm_blocks,
            groups=tuple(CacheGroupLayout(g, k, 1 + num_lcm_blocks * k) for g, k in self.group_packing),
            planes=tuple(planes),
            fields=self.fields,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CacheLayout":
        """The inverse of `to_json`; `ValueError` if the text describes no valid layout."""
        data = json.loads(text)
        return cls(
            data["prefix_granularity"],
            data["lcm_block_bytes"],
            tuple((g, k) for g, k in data["group_packing"]),
            tuple((p, b) for p, b in data["plane_bytes"]),
            _fields_from_json(data["fields"]),
        )


@dataclass(frozen=True)
class CacheGroupLayout:
    """Capacity of one group: `page_count` ids, the null id included."""

    group_id: str
    cache_blocks_per_lcm_block: int
    page_count: int


@dataclass(frozen=True)
class CachePlaneLayout:
    """One plane: `(num_lcm_blocks + 1) * bytes_per_lcm_block` bytes, starting at `arena_offset_bytes`."""

    plane_id: str
    bytes_per_lcm_block: int
    arena_offset_bytes: int


@dataclass(frozen=True)
class CacheMemoryPlan:
    """A layout bound to `num_lcm_blocks` usable parents. Built by `CacheLayout.bind` only."""

    prefix_granularity: int
    lcm_block_bytes: int
    num_lcm_blocks: int
    groups: tuple[CacheGroupLayout, ...]
    planes: tuple[CachePlaneLayout, ...]
    fields: tuple[CacheFieldLayout, ...]

    @property
    def arena_bytes(self) -> int:
        """Bytes that the parents account for, the null parent included (alignment of the parent counted in)."""
        return (self.num_lcm_blocks + 1) * self.lcm_block_bytes

    @property
    def plane_buffer_bytes(self) -> int:
        """Bytes of the device buffers: the planes alone."""
        return (self.num_lcm_blocks + 1) * sum(plane.bytes_per_lcm_block for plane in self.planes)

    @cached_property
    def _groups_by_id(self) -> dict[str, CacheGroupLayout]:
        return {item.group_id: item for item in self.groups}

    @cached_property
    def _planes_by_id(self) -> dict[str, CachePlaneLayout]:
        return {item.plane_id: item for item in self.planes}

    @cached_property
    def _fields_by_id(self) -> dict[str, CacheFieldLayout]:
        return {item.field_id: item for item in self.fields}

    def group(self, group_id: str) -> CacheGroupLayout:
        """`KeyError` for an unknown id, as for `plane` and `field`."""
        return self._groups_by_id[group_id]

    def plane(self, plane_id: str) -> CachePlaneLayout:
        return self._planes_by_id[plane_id]

    def field(self, field_id: str) -> CacheFieldLayout:
        return self._fields_by_id[field_id]

    def group_fields(self, group_id: str) -> tuple[CacheFieldLayout, ...]:
        """Fields of one group, in plan order."""
        return tuple(field for field in self.fields if field.group_id == group_id)

    def block_bytes(self, group_id: str) -> int:
        """Payload bytes of one block of a group, padding excluded."""
        return _block_bytes(self.fields, group_id)

    def check_page(self, group_id: str, page: object) -> int:
        """`page` if it is an id of the group, the null id included; `IndexError` otherwise."""
        count = self.group(group_id).page_count
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < count:
            raise IndexError(f"block id {page!r} of cache group {group_id!r} is outside [0, {count})")
        return page

    def offset(self, field_id: str, page: int) -> int:
        """Byte address of a page's payload in the arena (cache-runtime.md 6.2); `IndexError` for a bad id."""
        field = self.field(field_id)
        plane = self.plane(field.plane_id)
        page = self.check_page(field.group_id, page)
        null_page = plane.arena_offset_bytes + plane.bytes_per_lcm_block - field.page_stride_bytes
        return null_page + page * field.page_stride_bytes + field.field_offset_bytes

    def block_byte_segments(self, group_id: str, page: int) -> tuple[tuple[int, int], ...]:
        """(address, bytes) of each field's payload in one block; padding belongs to no segment."""
        return tuple((self.offset(f.field_id, page), f.payload_bytes) for f in self.group_fields(group_id))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CacheMemoryPlan":
        """The inverse of `to_json`; `ValueError` if the text is not the binding of some layout."""
        data = json.loads(text)
        layout = CacheLayout(
            data["prefix_granularity"],
            data["lcm_block_bytes"],
            tuple((g["group_id"], g["cache_blocks_per_lcm_block"]) for g in data["groups"]),
            tuple((p["plane_id"], p["bytes_per_lcm_block"]) for p in data["planes"]),
            _fields_from_json(data["fields"]),
        )
        plan = layout.bind(data["num_lcm_blocks"])
        if json.loads(plan.to_json()) != data:
            raise ValueError("the text is not a cache memory plan: page counts or plane offsets do not follow from it")
        return plan


def _block_bytes(fields: Iterable[CacheFieldLayout], group_id: str) -> int:
    total = sum(field.payload_bytes for field in fields if field.group_id == group_id)
    if total == 0:
        raise KeyError(group_id)
    return total


def _fields_from_json(items: Iterable[dict[str, Any]]) -> tuple[CacheFieldLayout, ...]:
    return tuple(CacheFieldLayout(**{**item, "shape": tuple(item["shape"])}) for item in items)
