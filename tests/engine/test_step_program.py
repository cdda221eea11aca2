"""Compiled steps update the arena in place: full aliasing, and no plane-sized copy."""

import re

import pytest

from .conftest import EngineFactory


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_alias_the_arena_and_copy_no_plane(tiny_engine: EngineFactory, family: str) -> None:
    engine = tiny_engine(family)
    programs = engine._assembly.programs
    arena = programs.model.arena
    largest = max(plane.nbytes for plane in arena.planes.values())
    assert len(programs._steps) > 4
    for bucket, compiled in programs._steps.items():
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= arena.plan.arena_bytes, bucket
        text = compiled.as_text()
        elements = {plane.size for plane in arena.planes.values()}
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text):
            size = 1
            for extent in shape.split(","):
                size *= int(extent)
            assert size not in elements, (bucket, shape)
        # Activations scale with tokens; a copied plane would dwarf them.
        if bucket.tokens <= 16:
            assert memory.temp_size_in_bytes < largest, bucket


def test_temporaries_do_not_grow_with_the_arena(tiny_engine: EngineFactory) -> None:
    small, large = (
        tiny_engine("llama", kv_cache_memory_bytes=size, max_num_batched_tokens=64)._assembly.programs
        for size in (4 << 20, 32 << 20)
    )
    for bucket, compiled in small._steps.items():
        assert (
            compiled.memory_analysis().temp_size_in_bytes == large._steps[bucket].memory_analysis().temp_size_in_bytes
        )
