"""Compiled steps update the arena in place: full aliasing, and no plane-sized copy."""

import re

import pytest

from .conftest import EngineFactory


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_steps_alias_the_arena_and_copy_no_plane(tiny_engine: EngineFactory, family: str) -> None:
    engine = tiny_engine(family, max_num_batched_tokens=64)
    programs, builder = engine._assembly.programs, engine._loop._builder
    for bucket in builder._buckets.all():
        programs.compiled(builder.layout(bucket))
    arena = programs.model.arena
    largest = max(plane.nbytes for plane in arena.planes.values())
    assert len(programs._steps) == 6
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
    sizes = []
    for arena_bytes in (4 << 20, 32 << 20):
        engine = tiny_engine("llama", kv_cache_memory_bytes=arena_bytes)
        builder = engine._loop._builder
        bucket = builder._buckets.extend(64, "greedy")
        compiled = engine._assembly.programs.compiled(builder.layout(bucket))
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
    assert sizes[0] == sizes[1]
