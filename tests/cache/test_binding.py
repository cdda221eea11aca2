"""Binding refuses a layer that could look at tokens its group has dropped."""

import dataclasses

import pytest

from tokenspeed_jax.cache.binding import bind_cache_groups, parse_field_id
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.base import SchedulerLimits
from tokenspeed_jax.recipes.ordinary import OrdinaryRecipe
from tokenspeed_jax.recipes.plan import CacheMemoryPlan, pack
from tokenspeed_jax.recipes.spec import CacheFieldSpec, CacheGroupSpec

LAYERS = (AttentionSpec(0, 4, 2, 8, 1.0, 32), AttentionSpec(1, 4, 2, 8, 1.0), AttentionSpec(2, 4, 2, 8, 1.0, 32))


def planned(layers: tuple[AttentionSpec, ...]) -> tuple[CacheMemoryPlan, tuple[CacheGroupSpec, ...]]:
    limits = SchedulerLimits("Fused", 1, 16, 16)
    recipe = OrdinaryRecipe(layers, kv_dtype="float32", prefix_granularity=16, budget_bytes=1 << 20, limits=limits)
    groups = recipe.groups()
    plan = pack(groups, 16, recipe.packing(groups), 1, recipe.max_padding_fraction).bind(3)
    return plan, tuple(spec for spec, _ in groups)


def test_every_layer_gets_its_group_its_fields_and_its_window() -> None:
    bindings = bind_cache_groups(LAYERS, *planned(LAYERS))
    assert [(b.layer_id, b.group_id, b.field("k"), b.field("v"), b.window_left) for b in bindings] == [
        (0, "sliding_attention", "layer.0.k", "layer.0.v", 31),
        (1, "full_attention", "layer.1.k", "layer.1.v", -1),
        (2, "sliding_attention", "layer.2.k", "layer.2.v", 31),
    ]
    assert len(set(bindings)) == 3


@pytest.mark.parametrize(("window", "allowed"), [(31, True), (1, True), (32, True), (33, False), (None, False)])
def test_visibility_must_lie_within_retention(window: int | None, allowed: bool) -> None:
    seen = (dataclasses.replace(LAYERS[0], sliding_window=window), *LAYERS[1:])
    if allowed:
        assert window is not None
        assert bind_cache_groups(seen, *planned(LAYERS))[0].window_left == window - 1
        return
    with pytest.raises(ValueError, match=r"layer 0 sees .* keeps 32"):
        bind_cache_groups(seen, *planned(LAYERS))


def test_a_windowed_layer_may_live_in_a_full_group() -> None:
    seen = (LAYERS[0], dataclasses.replace(LAYERS[1], sliding_window=1), LAYERS[2])
    assert bind_cache_groups(seen, *planned(LAYERS))[1].window_left == 0


def test_missing_fields_and_other_geometry_are_refused() -> None:
    extra = (*LAYERS, AttentionSpec(3, 4, 2, 8, 1.0))
    with pytest.raises(ValueError, match="layer 3 has no cache field for k and v"):
        bind_cache_groups(extra, *planned(LAYERS))
    wider = (dataclasses.replace(LAYERS[0], head_dim=16), *LAYERS[1:])
    with pytest.raises(ValueError, match=r"'layer\.0\.k' has rows of \(2, 8\), layer 0 writes \(2, 16\)"):
        bind_cache_groups(wider, *planned(LAYERS))


def test_keys_and_values_live_in_one_history_group() -> None:
    def spec(name: str) -> CacheGroupSpec:
        return CacheGroupSpec(name, "history", "full_history", False, rows_per_page=16, entry_stride_tokens=1)

    k, v = (CacheFieldSpec(f"layer.0.{name}", f"unit.{name}", (16, 2, 8), "float32") for name in ("k", "v"))
    split = ((spec("a"), (k,)), (spec("b"), (v,)))
    layer = (AttentionSpec(0, 4, 2, 8, 1.0),)
    with pytest.raises(ValueError, match=r"in several cache groups: {'k': 'a', 'v': 'b'}"):
        bind_cache_groups(layer, pack(split, 16, None, 1, 9.0).bind(1), tuple(s for s, _ in split))
    snapshot = CacheGroupSpec("s", "state", "full_history", False, checkpoint_granularity=16)
    with pytest.raises(ValueError, match="'s' is a state group"):
        bind_cache_groups(layer, pack(((snapshot, (k, v)),), 16).bind(1), (snapshot,))


def test_field_ids_parse_back_to_layers() -> None:
    assert parse_field_id("layer.12.latent_kv") == (12, "latent_kv")
    assert parse_field_id("layer.0.a.b") == (0, "a.b")
    for wrong in ("layer.x.k", "layers.1.k", "layer.1", "layer.1.", "layer.-1.k"):
        with pytest.raises(ValueError, match="not of the form"):
            parse_field_id(wrong)
