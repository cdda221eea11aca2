"""`pack`: fields to bytes of a parent. Pure integer arithmetic; the one home of that mapping (cache-runtime.md 5)."""

import math
from collections.abc import Mapping, Sequence

from tokenspeed_jax.recipes.exact_ratio import exact_ratio_packing
from tokenspeed_jax.recipes.layout import (
    CacheFieldLayout,
    CacheGroupLayout,
    CacheLayout,
    CacheMemoryPlan,
    CachePlaneLayout,
)
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group, element_bytes, require_positive_int

__all__ = [
    "CacheFieldLayout",
    "CacheGroupLayout",
    "CacheLayout",
    "CacheMemoryPlan",
    "CachePlaneLayout",
    "pack",
]

_MAX_BYTES = 2**63 - 1

# (plane, group) -> the offset of each field in one page, and where the last one ends.
_Spans = dict[tuple[str, str], tuple[dict[str, int], int]]


def pack(
    groups: Sequence[Group],
    prefix_granularity: int,
    cache_blocks_per_lcm_block: Mapping[str, int] | None = None,
    alignment: int = 1,
    max_padding_fraction: float = 0.25,
) -> CacheLayout:
    """The layout of one parent that every group can carve into its own blocks.

    Args:
        groups: declared groups with their fields; their order does not matter.
        prefix_granularity: P, recorded in the layout.
        cache_blocks_per_lcm_block: packings to use as they are; None derives all of them.
        alignment: bytes that every plane and the parent are multiples of.
        max_padding_fraction: bytes a block may waste, as a fraction of its payload; `math.inf` for no limit.

    Raises:
        ValueError: a declaration is malformed, an exact field would be padded, a group would waste too much, or a
            size exceeds 2**63 - 1.
    """
    pinned = dict(cache_blocks_per_lcm_block or {})
    _check_inputs(groups, prefix_granularity, pinned, alignment, max_padding_fraction)
    spans = _place(groups)
    packing = _derive_packing(groups, pinned)
    if not pinned:
        packing = _repack_flexible(groups, packing, spans, alignment)
    planes = {
        plane_id: _plane_bytes(plane_id, groups, packing, spans, alignment)
        for plane_id in sorted({plane_id for plane_id, _ in spans})
    }
    _check_exact(groups, packing, planes, spans)
    parent = _align_up(sum(planes.values()), math.lcm(alignment, *packing.values()))
    _check_padding(groups, packing, parent, max_padding_fraction)
    layouts = [
        CacheFieldLayout(
            spec.group_id,
            field.field_id,
            field.plane_id,
            field.shape,
            field.dtype,
            spans[field.plane_id, spec.group_id][0][field.field_id],
            planes[field.plane_id] // packing[spec.group_id],
        )
        for spec, fields in groups
        for field in fields
    ]
    return CacheLayout(
        prefix_granularity,
        parent,
        tuple(sorted(packing.items())),
        tuple(sorted(planes.items())),
        tuple(sorted(layouts, key=lambda item: (item.plane_id, item.group_id, item.field_id))),
    )


def _check_inputs(
    groups: Sequence[Group],
    prefix_granularity: int,
    pinned: Mapping[str, int],
    alignment: int,
    max_padding_fraction: float,
) -> None:
    require_positive_int("prefix_granularity", prefix_granularity)
    require_positive_int("alignment", alignment)
    if not max_padding_fraction >= 0:
        raise ValueError(f"max_padding_fraction must be at least 0, got {max_padding_fraction}")
    group_ids = [spec.group_id for spec, _ in groups]
    field_ids = [field.field_id for _, fields in groups for field in fields]
    if not group_ids:
        raise ValueError("there is no cache group to pack")
    for name, ids in (("cache group", group_ids), ("cache field", field_ids)):
        twice = sorted({item for item in ids if ids.count(item) > 1}) if len(set(ids)) != len(ids) else []
        if twice:
            raise ValueError(f"{name} ids must be unique, declared twice: {', '.join(twice)}")
    for spec, fields in groups:
        if not fields:
            raise ValueError(f"cache group {spec.group_id!r} has no fields")
        if prefix_granularity % spec.block_granularity:
            raise ValueError(
                f"block_granularity {spec.block_granularity} of cache group {spec.group_id!r} does not divide "
                f"prefix_granularity {prefix_granularity}"
            )
    unknown = sorted(set(pinned) - set(group_ids))
    if unknown:
        raise ValueError(f"packing is pinned for undeclared cache groups: {', '.join(unknown)}")
    for group_id, count in pinned.items():
        require_positive_int(f"packing of cache group {group_id!r}", count)


def _align_up(value: int, alignment: int) -> int:
    aligned = -(-value // alignment) * alignment
    if aligned > _MAX_BYTES:
        raise ValueError(f"a cache size of {aligned} bytes exceeds 2**63 - 1")
    return aligned


def _place(groups: Sequence[Group]) -> _Spans:
    """Offsets within one page. Groups on one plane overlap: each starts at 0."""
    spans: _Spans = {}
    for spec, fields in groups:
        for field in sorted(fields, key=lambda item: (item.plane_id, item.field_id)):
            offsets, end = spans.get((field.plane_id, spec.group_id), ({}, 0))
            offset = _align_up(end, element_bytes(field.dtype))
            offsets[field.field_id] = offset
            spans[field.plane_id, spec.group_id] = (offsets, offset + field.payload_bytes)
    return spans


def _raw_bytes(fields: Sequence[CacheFieldSpec]) -> int:
    return sum(field.payload_bytes for field in fields)


def _derive_packing(groups: Sequence[Group], pinned: Mapping[str, int]) -> dict[str, int]:
    if len(pinned) == len(groups):
        return dict(pinned)
    largest = max(_raw_bytes(fields) for _, fields in groups)
    packing = {spec.group_id: max(1, largest // _raw_bytes(fields)) for spec, fields in groups}
    return packing | exact_ratio_packing(groups) | dict(pinned)


def _is_exact(fields: Sequence[CacheFieldSpec]) -> bool:
    return any(field.exact_page_stride for field in fields)


def _repack_flexible(groups: Sequence[Group], packing: dict[str, int], spans: _Spans, alignment: int) -> dict[str, int]:
    """Gives each group without an exact field as many blocks as the planes of the exact groups hold anyway."""
    needed: dict[str, int] = {}
    units: dict[str, int] = {}
    for spec, fields in groups:
        if not _is_exact(fields):
            continue
        count = packing[spec.group_id]
        for field in fields:
            plane_id = field.plane_id
            needed[plane_id] = max(needed.get(plane_id, 0), count * spans[plane_id, spec.group_id][1])
            units[plane_id] = math.lcm(units.get(plane_id, alignment), count * element_bytes(field.dtype))
    fixed = {plane_id: _align_up(size, units[plane_id]) for plane_id, size in needed.items()}

    repacked = dict(packing)
    for spec, fields in groups:
        planes = {field.plane_id for field in fields}
        if _is_exact(fields) or not planes <= fixed.keys():
            continue
        elements = {
            plane_id: math.lcm(*(element_bytes(f.dtype) for f in fields if f.plane_id == plane_id))
            for plane_id in planes
        }
        if any(fixed[plane_id] % elements[plane_id] for plane_id in planes):
            continue
        most = min(fixed[plane_id] // spans[plane_id, spec.group_id][1] for plane_id in planes)
        # A count fits if it divides every plane measured in elements, that is, the gcd of those numbers.
        common = math.gcd(*(fixed[plane_id] // elements[plane_id] for plane_id in planes))
        repacked[spec.group_id] = _largest_divisor_up_to(common, most) or packing[spec.group_id]
    return repacked


def _largest_divisor_up_to(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; 0 if the limit is below 1."""
    best = 0
    for small in range(1, math.isqrt(number) + 1):
        if number % small == 0:
            best = max([best, *(d for d in (small, number // small) if d <= limit)])
    return best


def _plane_bytes(
    plane_id: str, groups: Sequence[Group], packing: Mapping[str, int], spans: _Spans, alignment: int
) -> int:
    """The widest tenant, aligned so that every tenant's pages tile the plane with aligned elements and strides."""
    unit, widest = alignment, 0
    for spec, fields in groups:
        count = packing[spec.group_id]
        for field in fields:
            if field.plane_id == plane_id:
                unit = math.lcm(unit, count * element_bytes(field.dtype), count * field.page_stride_alignment_bytes)
                widest = max(widest, count * spans[plane_id, spec.group_id][1])
    return _align_up(widest, unit)


def _check_exact(groups: Sequence[Group], packing: Mapping[str, int], planes: Mapping[str, int], spans: _Spans) -> None:
    for spec, fields in groups:
        for field in fields:
            stride = planes[field.plane_id] // packing[spec.group_id]
            if not field.exact_page_stride or stride == field.payload_bytes:
                continue
            tenants = [group_id for plane_id, group_id in spans if plane_id == field.plane_id]
            widest = max(tenants, key=lambda g: (packing[g] * spans[field.plane_id, g][1], g))
            raise ValueError(
                f"field {field.field_id!r} of cache group {spec.group_id!r} needs pages exactly "
                f"{field.payload_bytes} bytes apart, but plane {field.plane_id!r} of {planes[field.plane_id]} bytes "
                f"gives {stride}; its widest tenant is cache group {widest!r} "
                f"({packing[widest]} blocks of {spans[field.plane_id, widest][1]} bytes)"
            )


def _check_padding(groups: Sequence[Group], packing: Mapping[str, int], parent: int, limit: float) -> None:
    for spec, fields in groups:
        raw = _raw_bytes(fields)
        share = parent // packing[spec.group_id]
        if share - raw > limit * raw:
            raise ValueError(
                f"cache group {spec.group_id!r} would waste {share - raw} bytes beside {raw} bytes of payload per "
                f"block ({(share - raw) / raw:.4f} > {limit}); change its packing of "
                f"{packing[spec.group_id]} or the limit"
            )
