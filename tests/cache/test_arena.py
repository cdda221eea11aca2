"""The arena: bytes land where the plan says, donated planes alias, and the null parent stays zero."""

import dataclasses
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.cache.arena import ZERO_WIDTH, CacheArena
from tokenspeed_jax.cache.binding import bind_cache_groups
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.write_locations import extend_span
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.ordinary import OrdinaryRecipe
from tokenspeed_jax.recipes.plan import CacheMemoryPlan, pack
from tokenspeed_jax.recipes.spec import CacheFieldSpec, CacheGroupSpec, Group

LIMITS = SchedulerLimits("Fused", 4, 32, 64)
HYBRID = (AttentionSpec(0, 4, 2, 8, 1.0, 12), AttentionSpec(1, 4, 2, 8, 1.0), AttentionSpec(2, 4, 2, 8, 1.0, 12))
MIXED_GEOMETRY = (AttentionSpec(0, 4, 4, 8, 1.0, 12), AttentionSpec(1, 4, 1, 16, 1.0))


def ordinary(
    layers: tuple[AttentionSpec, ...], parents: int, dtype: str = "bfloat16", granularity: int = 8
) -> CacheArena:
    recipe = OrdinaryRecipe(layers, kv_dtype=dtype, prefix_granularity=granularity, budget_bytes=1 << 30, limits=LIMITS)
    return build(recipe.groups(), recipe.packing(recipe.groups()), parents, granularity)


def build(groups: tuple[Group, ...], packing: object, parents: int, granularity: int, alignment: int = 1) -> CacheArena:
    layout = pack(groups, granularity, packing, alignment, math.inf)  # pyright: ignore[reportArgumentType]
    return CacheArena(layout.bind(parents), [spec for spec, _ in groups], granularity)


def tiny_states(parents: int) -> CacheArena:
    """E6: one full layer of 16 KiB pages and three state layers, two states to a parent, with stride padding."""
    spec = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=128, entry_stride_tokens=1)
    groups: list[Group] = [
        (
            spec,
            tuple(
                CacheFieldSpec(f"layer.3.{n}", f"unit.0.{p}", (128, 1, 64), "bfloat16")
                for n, p in (("k", "a"), ("v", "b"))
            ),
        )
    ]
    for i in range(3):
        snapshot = CacheGroupSpec(f"linear_{i}", "state", "full_history", False, checkpoint_granularity=128)
        ssm = CacheFieldSpec(f"layer.{i}.ssm", "unit.0.a", (2, 32, 32), "float32")
        conv = CacheFieldSpec(f"layer.{i}.conv", "unit.0.b", (128, 3), "bfloat16", False)
        groups.append((snapshot, (ssm, conv)))
    return build(tuple(groups), None, parents, 128, 256)


def flat(plan: CacheMemoryPlan, planes: dict[str, jax.Array]) -> np.ndarray:
    """The arena as the plan addresses it: all planes one after another."""
    return np.concatenate([np.asarray(planes[plane.plane_id]).reshape(-1) for plane in plan.planes])


def fill(arena: CacheArena, seed: int) -> np.ndarray:
    """Random bytes everywhere but in the null parent; returns them flat."""
    rng = np.random.default_rng(seed)
    planes = {}
    for plane_id, plane in arena.planes.items():
        content = rng.integers(1, 256, plane.shape, dtype=np.uint8)
        content[0] = 0
        planes[plane_id] = jnp.asarray(content)
    arena.planes = planes
    return flat(arena.plan, planes)


def test_planes_are_zero_bytes_on_the_device_and_the_contract_is_published() -> None:
    arena = ordinary(HYBRID, 5)
    assert {plane_id: (p.shape, p.dtype.name) for plane_id, p in arena.planes.items()} == {
        f"unit.{i}.{name}": ((6, 256), "uint8") for i in range(2) for name in "kv"
    }
    assert not flat(arena.plan, arena.planes).any()
    assert flat(arena.plan, arena.planes).size == arena.plan.plane_buffer_bytes
    contract = arena.contract
    assert (contract.num_lcm_blocks, contract.prefix_granularity, contract.token_capacity) == (5, 8, 8)
    assert contract.group_page_counts == {"sliding_attention": 6, "full_attention": 6}
    assert [spec.group_id for spec in contract.group_specs] == ["sliding_attention", "full_attention"]
    assert arena.size == 5 * 8
    assert arena.plane_of("layer.1.v") == "unit.0.v"


@pytest.mark.parametrize("layers", [HYBRID, MIXED_GEOMETRY])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel_page_size", [2, 8])
def test_page_views_read_and_write_the_bytes_of_the_plan(
    layers: tuple[AttentionSpec, ...], dtype: str, kernel_page_size: int
) -> None:
    arena = ordinary(layers, 4, dtype)
    expected = fill(arena, 1)
    numpy_dtype = np.dtype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(2)
    for field in arena.plan.fields:
        view = arena.page_view(arena.planes, field.field_id, kernel_page_size)
        count = arena.plan.group(field.group_id).page_count
        row_shape, row_bytes = field.shape[1:], math.prod(field.shape[1:]) * numpy_dtype.itemsize
        block = int(rng.integers(1, count))
        address = arena.plan.offset(field.field_id, block)
        ratio = 8 // kernel_page_size
        taken = np.asarray(view.take(block * ratio + jnp.arange(ratio)))
        np.testing.assert_array_equal(
            np.ascontiguousarray(taken).view(np.uint8).reshape(-1), expected[address : address + field.payload_bytes]
        )
        row = rng.integers(-9, 9, row_shape).astype(numpy_dtype)
        written = view.write(jnp.array([block * 8 + 5]), jnp.asarray(row)[None])
        arena.planes[field.plane_id] = written.plane
        start = address + 5 * row_bytes
        expected[start : start + row_bytes] = row.view(np.uint8).reshape(-1)
        np.testing.assert_array_equal(flat(arena.plan, arena.planes), expected)


def test_t21_a_token_row_behind_two_null_states() -> None:
    arena = tiny_states(4)
    assert {g.group_id: g.cache_blocks_per_lcm_block for g in arena.plan.groups} == {
        "full": 1, "linear_0": 2, "linear_1": 2, "linear_2": 2,
    }  # fmt: skip
    view = arena.page_view(arena.planes, "layer.3.k", 64).write(
        jnp.array([129]), jnp.full((1, 1, 64), 2.0, jnp.bfloat16)
    )
    changed = np.flatnonzero(np.asarray(view.plane).reshape(-1))
    # bfloat16 2.0 (0x4000) has one non-zero byte of two, the second.
    np.testing.assert_array_equal(changed, 16_384 + 128 + np.arange(1, 128, 2))


def test_t21_a_donated_update_of_states_changes_the_live_blocks_alone() -> None:
    arena = tiny_states(512)
    expected = {plane_id: np.asarray(plane).copy() for plane_id, plane in arena.planes.items()}
    word = np.uint8([1, 2, 3, 4])
    for start in (16_384, 40_960):
        expected["unit.0.a"].reshape(-1)[start : start + 8192] = np.tile(word, 2048)

    def update(planes: dict[str, jax.Array], blocks: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
        view = arena.block_view(planes, "layer.0.ssm")
        return planes | {"unit.0.a": view.write(blocks, view.take(blocks) + step).plane}

    # A hole and the null block are neither read nor written.
    arguments = (arena.planes, jnp.array([1, -1, 4, 0]), jnp.asarray(word.view(np.float32)))
    compiled = jax.jit(update, donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes == 2 * 513 * 16_384
    # Some buffers of the four touched blocks, never the plane of 8 MiB.
    assert memory.temp_size_in_bytes <= 8 * 4 * 8192
    planes = compiled(*arguments)
    for plane_id, plane in expected.items():
        np.testing.assert_array_equal(planes[plane_id], plane)


def test_fields_that_are_no_pages_cannot_be_viewed_as_pages() -> None:
    arena = tiny_states(2)
    with pytest.raises(ValueError, match="not viewable as pages"):
        arena.page_view(arena.planes, "layer.0.conv", 64)
    with pytest.raises(ValueError, match="kernel page size 48 does not divide"):
        arena.page_view(arena.planes, "layer.3.k", 48)
    with pytest.raises(KeyError):
        arena.page_view(arena.planes, "layer.9.k", 64)


def test_zero_blocks_clears_the_payload_of_the_named_blocks_only() -> None:
    arena = tiny_states(6)
    expected = fill(arena, 3)
    blocks = {"linear_0": [1, 12, 4], "full": [3], "linear_2": []}
    arena.zero_blocks(blocks)
    for group_id, ids in blocks.items():
        for block in ids:
            for start, size in arena.plan.block_byte_segments(group_id, block):
                expected[start : start + size] = 0
    np.testing.assert_array_equal(flat(arena.plan, arena.planes), expected)


@pytest.mark.parametrize("make", [lambda: tiny_states(3), lambda: ordinary(MIXED_GEOMETRY, 3)])
def test_zero_blocks_matches_the_byte_segments_on_random_ids(make: Callable[[], CacheArena]) -> None:
    arena = make()

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        expected = fill(arena, 4)
        blocks = {
            group.group_id: data.draw(st.lists(st.integers(0, group.page_count - 1), max_size=4))
            for group in arena.plan.groups
        }
        arena.zero_blocks(blocks)
        for group_id, ids in blocks.items():
            for block in ids:
                for start, size in arena.plan.block_byte_segments(group_id, block):
                    expected[start : start + size] = 0
        np.testing.assert_array_equal(flat(arena.plan, arena.planes), expected)

    check()


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ({"full": [1], "linear_0": [2, 13]}, IndexError),
        ({"full": [1], "linear_0": [-1]}, IndexError),
        ({"full": [1, True]}, IndexError),
        ({"full": [1], "linear_0": [1.0]}, IndexError),
        ({"full": [1], "other": [1]}, KeyError),
    ],
)
def test_zero_blocks_with_one_bad_id_clears_nothing(blocks: dict, error: type[Exception]) -> None:
    arena = tiny_states(6)
    before = fill(arena, 5)
    with pytest.raises(error):
        arena.zero_blocks(blocks)
    np.testing.assert_array_equal(flat(arena.plan, arena.planes), before)


def test_zero_blocks_takes_any_number_of_ids_with_one_program() -> None:
    arena = ordinary(HYBRID[:2], 3 * ZERO_WIDTH)
    fill(arena, 6)
    arena.zero_blocks({"full_attention": [1]})
    arena.zero_blocks({"full_attention": [], "sliding_attention": []})
    arena.zero_blocks({"sliding_attention": np.arange(2, 2 * ZERO_WIDTH + 5, dtype=np.int32)})  # pyright: ignore
    assert arena.compilations == 1
    left = np.asarray(arena.planes["unit.0.k"]).any(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(left), np.arange(2 * ZERO_WIDTH + 5, 3 * ZERO_WIDTH + 1))


def test_only_pools_that_can_show_foreign_bytes_need_zeroing() -> None:
    assert tiny_states(1).requires_block_zeroing
    assert not ordinary(HYBRID, 1).requires_block_zeroing
    spec = CacheGroupSpec("a", "history", "full_history", False, rows_per_page=4, entry_stride_tokens=1)
    other = dataclasses.replace(spec, group_id="b")
    shared = (
        (spec, (CacheFieldSpec("layer.0.k", "p", (4, 2, 2), "bfloat16"),)),
        (other, (CacheFieldSpec("layer.1.k", "p", (4, 1, 2), "float32"),)),
    )
    assert build(shared, None, 1, 4).requires_block_zeroing


def test_clear_zeroes_everything_and_frees_the_old_planes() -> None:
    arena = ordinary(HYBRID, 2)
    fill(arena, 7)
    old = dict(arena.planes)
    arena.restore()
    assert all(plane.is_deleted() for plane in old.values())
    assert not flat(arena.plan, arena.planes).any()


def test_a_written_null_parent_is_noticed() -> None:
    arena = ordinary(HYBRID, 2)
    fill(arena, 8)
    assert arena.null_parent_is_zero()
    arena.planes["unit.1.v"] = arena.planes["unit.1.v"].at[0, -1].set(1)
    assert not arena.null_parent_is_zero()


def test_slots_beyond_int32_are_refused_before_anything_is_traced() -> None:
    arena = ordinary(HYBRID, 2)
    arena.plan = dataclasses.replace(arena.plan, num_lcm_blocks=2**31 // 8)
    with pytest.raises(ValueError, match="int32"):
        arena.page_view(arena.planes, "layer.1.k", 8)


def step_program(arena: CacheArena, *, ordered: bool = True):
    """A step that writes and then reads every layer through the router, as the engine's does.

    `ordered`: as in a model, a layer's rows depend on what the layers before it read.
    """
    bindings = bind_cache_groups(HYBRID, arena.plan, arena.contract.group_specs)
    router = CacheGroupRouter(arena.contract, dict.fromkeys(arena.contract.group_packing, 4), 64, 2)

    def step(planes: dict, tables: dict, starts: jax.Array, kv_lens: jax.Array, values: jax.Array) -> tuple:
        planes = dict(planes)
        routed = router.route(tables, *extend_span(starts, kv_lens, values.shape[0]))
        total = jnp.bfloat16(0)
        for layer in bindings:
            slots = routed.write_locations(layer)
            read = jnp.bfloat16(0)
            for field_id in (layer.field("k"), layer.field("v")):
                stored = values + jnp.minimum(total, 1) if ordered else values
                view = arena.page_view(planes, field_id, 4).write(slots, stored)
                planes[arena.plane_of(field_id)] = view.plane
                read += view.take(routed.page_tables[layer.group_id][:, 0]).max()
            total += read
        return planes, total

    return jax.jit(step, donate_argnums=0), router


def step_inputs(router: CacheGroupRouter, rows: int) -> tuple:
    tables = {g: jnp.ones((rows, router.table_columns(g)), jnp.int32) for g in router.group_ids}
    return tables, jnp.arange(rows + 1), jnp.ones(rows, jnp.int32), jnp.ones((rows, 2, 8), jnp.bfloat16)


def plane_sized_copies(hlo: str, plane_bytes: int) -> list[str]:
    """Copy instructions of optimised HLO whose result has as many bytes as a plane."""
    widths = {"pred": 1, "u8": 1, "s8": 1, "bf16": 2, "f16": 2, "f32": 4, "u32": 4, "s32": 4}
    found = []
    for dtype, dims in re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* (?:copy|copy-start)\(", hlo):
        size = math.prod(int(d) for d in dims.split(",") if d) * widths.get(dtype, 8)
        if size >= plane_bytes:
            found.append(f"{dtype}[{dims}]")
    return found


@pytest.mark.parametrize("rows", [1, 4])
def test_a_step_aliases_every_plane_and_copies_none(rows: int) -> None:
    temps = []
    for parents in (500, 4000):
        arena = ordinary(HYBRID, parents)
        step, router = step_program(arena)
        compiled = step.lower(arena.planes, *step_inputs(router, rows)).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes
        assert plane_sized_copies(compiled.as_text(), arena.planes["unit.0.k"].nbytes) == []
        temps.append(memory.temp_size_in_bytes)
        assert temps[-1] < arena.planes["unit.0.k"].nbytes
        old = dict(arena.planes)
        arena.planes, _ = step(arena.planes, *step_inputs(router, rows))
        assert all(plane.is_deleted() for plane in old.values())
    # Only the alignment of small buffers may differ.
    assert temps[1] <= temps[0] + 1024


def test_a_read_that_nothing_orders_before_the_next_write_costs_a_copy() -> None:
    """Keeps the check above honest, and says why each layer's rows must depend on the layers before it."""
    arena = ordinary(HYBRID, 500)
    step, router = step_program(arena, ordered=False)
    compiled = step.lower(arena.planes, *step_inputs(router, 4)).compile()
    assert plane_sized_copies(compiled.as_text(), arena.planes["unit.0.k"].nbytes)


def test_zeroing_aliases_every_plane_and_its_temp_does_not_grow() -> None:
    temps = []
    for parents in (2000, 8000):
        arena = ordinary(HYBRID, parents)
        memory = arena.compile_zeroing().memory_analysis()
        assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes
        temps.append(memory.temp_size_in_bytes)
        old = dict(arena.planes)
        arena.zero_blocks({"full_attention": [1]})
        assert all(plane.is_deleted() for plane in old.values())
    assert temps[1] <= temps[0] + 1024
    assert temps[1] < arena.planes["unit.0.k"].nbytes


def test_null_parent_stays_zero_over_random_steps_with_padding_holes_and_idle_rows() -> None:
    arena = ordinary(HYBRID, 30)
    step, router = step_program(arena)
    rng = np.random.default_rng(11)
    for _ in range(1000):
        tables = {}
        for group_id in router.group_ids:
            table = rng.integers(-1, 31, (4, router.table_columns(group_id))).astype(np.int32)
            table[rng.random(table.shape) < 0.3] = 0
            tables[group_id] = table
        new = rng.integers(0, 5, 4)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        kv_lens = (new + rng.integers(0, 70, 4)).astype(np.int32)
        values = rng.integers(1, 100, (16, 2, 8)).astype(ml_dtypes.bfloat16)
        arena.planes, _ = step(arena.planes, tables, starts, kv_lens, values)
        if rng.random() < 0.05:
            arena.zero_blocks({group_id: rng.integers(0, 31, 3).tolist() for group_id in router.group_ids})
    assert arena.null_parent_is_zero()
    assert flat(arena.plan, arena.planes).any()
