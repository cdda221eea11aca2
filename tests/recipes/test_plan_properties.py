"""Packing and addressing over random declarations: what holds for every layout."""

import itertools
import math

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenspeed_jax.recipes.plan import CacheLayout, CacheMemoryPlan, pack
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group

from .declarations import exact, flexible, history, paddings


@st.composite
def declarations(draw: st.DrawFn) -> list[Group]:
    """Up to four groups over three planes, of mixed element sizes, some fields exact."""
    groups = []
    numbers = itertools.count()
    for index in range(draw(st.integers(1, 4))):
        fields = []
        for _ in range(draw(st.integers(1, 3))):
            is_exact = draw(st.integers(0, 5)) == 0
            fields.append(
                CacheFieldSpec(
                    f"layer.{next(numbers)}.x",
                    f"p{draw(st.integers(0, 2))}",
                    (draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4]))),
                    draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
                    is_exact,
                    1 if is_exact else draw(st.sampled_from([1, 1, 4])),
                )
            )
        groups.append(history(f"g{index}", draw(st.sampled_from([1, 2, 4])), *fields))
    return groups


def pack_or_reject(groups: list[Group], alignment: int, limit: float = math.inf) -> CacheLayout:
    """Rejects the example when its exact fields have no solution."""
    try:
        return pack(groups, 4, None, alignment, limit)
    except ValueError as error:
        assume("bytes apart" not in str(error) and "waste" not in str(error))
        raise


@settings(max_examples=150, deadline=None)
@given(declarations(), st.sampled_from([1, 8, 256]), st.sampled_from([0.5, 2.0, math.inf]))
def test_every_layout_tiles_its_planes(groups: list[Group], alignment: int, limit: float) -> None:
    layout = pack_or_reject(groups, alignment, limit)
    planes = dict(layout.plane_bytes)
    declared = {field.field_id: field for _, fields in groups for field in fields}
    assert layout.lcm_block_bytes >= sum(planes.values())
    assert all(padding <= limit for padding in paddings(layout).values())
    for group_id, packing in layout.group_packing:
        assert layout.lcm_block_bytes % packing == 0
        raw = sum(f.payload_bytes for spec, fields in groups if spec.group_id == group_id for f in fields)
        assert layout.block_bytes(group_id) == raw
    for plane in planes.values():
        assert plane % alignment == 0
    for field in layout.fields:
        spec = declared[field.field_id]
        element = spec.payload_bytes // math.prod(spec.shape)
        assert field.page_stride_bytes * layout.packing[field.group_id] == planes[field.plane_id]
        assert field.field_offset_bytes % element == 0
        assert field.page_stride_bytes % element == 0
        assert field.page_stride_bytes % spec.page_stride_alignment_bytes == 0
        if spec.exact_page_stride:
            assert (field.page_stride_bytes, field.field_offset_bytes) == (field.payload_bytes, 0)


@settings(max_examples=100, deadline=None)
@given(declarations(), st.sampled_from([1, 8]), st.integers(1, 3))
def test_live_pages_never_share_a_byte_outside_a_common_parent(
    groups: list[Group], alignment: int, parents: int
) -> None:
    plan = pack_or_reject(groups, alignment).bind(parents)
    parent_of: dict[int, int] = {}
    for group in plan.groups:
        packing = group.cache_blocks_per_lcm_block
        assert group.page_count == 1 + parents * packing
        seen: set[int] = set()
        for page in range(group.page_count):
            segments = plan.block_byte_segments(group.group_id, page)
            assert sum(size for _, size in segments) == plan.block_bytes(group.group_id)
            touched = {byte for start, size in segments for byte in range(start, start + size)}
            assert len(touched) == plan.block_bytes(group.group_id)
            assert not touched & seen
            seen |= touched
            parent = 0 if page == 0 else 1 + (page - 1) // packing
            assert all(parent_of.setdefault(byte, parent) == parent for byte in touched)
    assert max(parent_of) < plan.plane_buffer_bytes <= plan.arena_bytes


@settings(max_examples=100, deadline=None)
@given(declarations(), st.integers(1, 5))
def test_row_form_addresses_the_same_bytes(groups: list[Group], parents: int) -> None:
    plan = pack_or_reject(groups, 8).bind(parents)
    for field in plan.fields:
        packing = plan.group(field.group_id).cache_blocks_per_lcm_block
        start = plan.plane(field.plane_id).arena_offset_bytes
        for page in range(plan.group(field.group_id).page_count):
            row = page + packing - 1
            assert plan.offset(field.field_id, page) == start + row * field.page_stride_bytes + field.field_offset_bytes


@settings(max_examples=100, deadline=None)
@given(declarations(), st.randoms(use_true_random=False), st.sampled_from([1, 256]))
def test_declaration_order_does_not_matter(groups: list[Group], random: object, alignment: int) -> None:
    layout = pack_or_reject(groups, alignment)
    shuffled = [(spec, tuple(random.sample(fields, len(fields)))) for spec, fields in groups]  # pyright: ignore
    random.shuffle(shuffled)  # pyright: ignore
    assert pack(shuffled, 4, None, alignment, math.inf) == layout


@settings(max_examples=100, deadline=None)
@given(declarations(), st.sampled_from([1, 256]))
def test_pinning_the_derived_packing_reproduces_the_layout(groups: list[Group], alignment: int) -> None:
    layout = pack_or_reject(groups, alignment)
    assert pack(groups, 4, layout.packing, alignment, math.inf) == layout


@settings(max_examples=60, deadline=None)
@given(declarations(), st.integers(1, 9))
def test_json_round_trip_and_capacity_independence(groups: list[Group], parents: int) -> None:
    layout = pack_or_reject(groups, 1)
    plan = layout.bind(parents)
    assert CacheLayout.from_json(layout.to_json()) == layout
    assert CacheMemoryPlan.from_json(plan.to_json()) == plan
    assert hash(plan) == hash(layout.bind(parents))
    other = layout.bind(parents + 1)
    assert (other.fields, other.lcm_block_bytes) == (plan.fields, plan.lcm_block_bytes)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 600),
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from(["uint8", "bfloat16", "float32"])), min_size=1, max_size=3),
    st.sampled_from([1, 4, 16]),
)
def test_flexible_group_takes_the_largest_count_that_divides_its_planes(
    fixed: int, fields: list[tuple[int, str]], alignment: int
) -> None:
    tenant = [exact("layer.0.k", "p", (fixed * alignment,))]
    guest = [flexible(f"layer.{i + 1}.x", "p", (size,), dtype) for i, (size, dtype) in enumerate(fields)]
    span, elements = 0, 1
    for field in guest:
        element = field.payload_bytes // field.shape[0]
        span = -(-span // element) * element + field.payload_bytes
        elements = math.lcm(elements, element)
    plane = fixed * alignment
    counts = [c for c in range(1, plane // span + 1) if plane % (c * elements) == 0]
    assume(counts)
    # A second plane makes the exact group the largest, so that its own packing stays 1.
    groups = [history("big", 1, *tenant, exact("layer.9.k", "q", (plane,))), history("guest", 1, *guest)]
    layout = pack(groups, 1, None, alignment, math.inf)
    assert layout.packing == {"big": 1, "guest": max(counts)}
