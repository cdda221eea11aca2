"""Copies between blocks: the bytes of the plan, all or nothing, in place, and compiled once."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.cache.arena import COPY_WIDTH, CacheArena

from .test_arena import HYBRID, MIXED_GEOMETRY, fill, flat, ordinary, plane_sized_copies, tiny_states


@pytest.mark.parametrize("make", [lambda: tiny_states(9), lambda: ordinary(MIXED_GEOMETRY, 40)])
def test_copy_blocks_matches_the_byte_segments_on_random_ids(make: Callable[[], CacheArena]) -> None:
    arena = make()

    @settings(max_examples=25, deadline=None)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        expected = fill(arena, 9)
        before = expected.copy()
        copies = {}
        for index, group in enumerate(arena.plan.groups):
            # A parent is one group's at a time.
            parents = range(index, arena.plan.num_lcm_blocks, len(arena.plan.groups))
            packing = group.cache_blocks_per_lcm_block
            own = [1 + parent * packing + slot for parent in parents for slot in range(packing)]
            ids = data.draw(st.lists(st.sampled_from(own), unique=True, max_size=2 * COPY_WIDTH + 4))
            half = len(ids) // 2
            copies[group.group_id] = [(data.draw(st.sampled_from(ids[half:])), target) for target in ids[:half]]
        arena.copy_blocks(copies)
        for group_id, pairs in copies.items():
            for source, target in pairs:
                segments = [arena.plan.block_byte_segments(group_id, block) for block in (source, target)]
                for (start, size), (to, _) in zip(*segments, strict=True):
                    expected[to : to + size] = before[start : start + size]
        np.testing.assert_array_equal(flat(arena.plan, arena.planes), expected)

    check()
    assert arena.null_parent_is_zero()


@pytest.mark.parametrize(
    ("copies", "error"),
    [
        ({"full": [(1, 2)], "linear_0": [(2, 13)]}, IndexError),
        ({"full": [(1, 2)], "linear_0": [(-1, 2)]}, IndexError),
        ({"full": [(1, 2), (3, 0)]}, IndexError),
        ({"full": [(1, 2), (0, 3)]}, IndexError),
        ({"full": [(1, 2)], "other": [(1, 2)]}, KeyError),
    ],
)
def test_copy_blocks_with_one_bad_id_copies_nothing(copies: dict, error: type[Exception]) -> None:
    arena = tiny_states(6)
    before = fill(arena, 5)
    with pytest.raises(error):
        arena.copy_blocks(copies)
    np.testing.assert_array_equal(flat(arena.plan, arena.planes), before)


def test_copying_compiles_once_aliases_every_plane_and_its_temp_does_not_grow() -> None:
    temps = []
    for parents in (2000, 8000):
        arena = ordinary(HYBRID, parents)
        assert arena.compilations == 0
        arena.copy_blocks({"full_attention": []})
        assert arena.compilations == 0
        programs = arena.compile_copies()
        reading, writing = (program.memory_analysis() for program in (programs.read, programs.write))
        assert writing.alias_size_in_bytes == arena.plan.plane_buffer_bytes
        assert plane_sized_copies(programs.write.as_text(), arena.planes["unit.0.k"].nbytes) == []
        temps.append(reading.temp_size_in_bytes + reading.output_size_in_bytes + writing.temp_size_in_bytes)
        old = dict(arena.planes)
        arena.copy_blocks({"full_attention": [(1, 2)], "sliding_attention": [(3, n) for n in range(4, 40)]})
        assert all(plane.is_deleted() for plane in old.values())
        assert arena._copy is programs  # pyright: ignore[reportPrivateUsage]
    assert temps[1] <= temps[0] + 1024
    assert temps[1] < arena.planes["unit.0.k"].nbytes
