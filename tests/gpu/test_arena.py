"""The arena on a GPU: planes beyond 2 and 4 GiB are written, read, copied and zeroed to their last page, in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.cache.arena import CacheArena
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.ordinary import OrdinaryRecipe
from tokenspeed_jax.recipes.plan import pack

PAGE_TOKENS, HEADS, DIM = 64, 8, 128
PAGE_BYTES = PAGE_TOKENS * HEADS * DIM * 2


def arena_with_planes_of(gib: float) -> CacheArena:
    """Two planes, keys and values of one layer, of `gib` GiB each."""
    recipe = OrdinaryRecipe(
        (AttentionSpec(0, 8, HEADS, DIM, 1.0),),
        kv_dtype="bfloat16",
        prefix_granularity=PAGE_TOKENS,
        budget_bytes=1 << 40,
        limits=SchedulerLimits("Fused", 1, 64, 64),
    )
    groups = recipe.groups()
    layout = pack(groups, PAGE_TOKENS, recipe.packing(groups), 1, recipe.max_padding_fraction)
    return CacheArena(layout.bind(int(gib * 2**30) // PAGE_BYTES), [spec for spec, _ in groups], PAGE_TOKENS)


@pytest.mark.parametrize("gib", [2.5, 5])
def test_the_last_page_of_a_large_plane_is_written_read_copied_and_zeroed_in_place(gib: float) -> None:
    arena = arena_with_planes_of(gib)
    last = arena.plan.num_lcm_blocks
    slots = jnp.array([0, last * PAGE_TOKENS, (last + 1) * PAGE_TOKENS - 1, -1])
    rows = jnp.arange(1, 5, dtype=jnp.bfloat16)[:, None, None] * jnp.ones((4, HEADS, DIM), jnp.bfloat16)

    def step(planes: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
        planes = dict(planes)
        view = arena.page_view(planes, "layer.0.k", PAGE_TOKENS).write(slots, rows)
        planes[arena.plane_of("layer.0.k")] = view.plane
        return planes, view.take(jnp.array([0, last]))

    compiled = jax.jit(step, donate_argnums=0).lower(arena.planes).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes
    assert memory.temp_size_in_bytes < 2**20

    arena.planes, taken = compiled(arena.planes)
    expected = np.zeros((2, PAGE_TOKENS, HEADS, DIM), np.float32)
    expected[1, 0], expected[1, -1] = 2, 3
    np.testing.assert_array_equal(np.asarray(taken, np.float32), expected)
    tail = np.asarray(arena.planes[arena.plane_of("layer.0.k")][-1]).view(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(tail.reshape(PAGE_TOKENS, HEADS, DIM), expected[1])
    assert arena.null_parent_is_zero()

    programs = arena.compile_copies()
    memory = programs.write.memory_analysis()
    assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes
    assert memory.temp_size_in_bytes + programs.read.memory_analysis().temp_size_in_bytes < 64 * 2**20
    arena.copy_blocks({"full_attention": [(last, last - 1)]})
    for plane in arena.planes.values():
        assert bool(jnp.array_equal(plane[-2], plane[-1]))
    assert bool(jnp.any(arena.planes[arena.plane_of("layer.0.k")][-2]))

    memory = arena.compile_zeroing().memory_analysis()
    assert memory.alias_size_in_bytes == arena.plan.plane_buffer_bytes
    assert memory.temp_size_in_bytes < 64 * 2**20
    arena.zero_blocks({"full_attention": [last]})
    assert not bool(jnp.any(arena.planes[arena.plane_of("layer.0.k")][-1]))
    arena.clear()
