"""From a model's layers to a plan: the ordinary recipe, its capacity, and the refusals a user sees."""

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.recipes.base import CacheRecipe, SchedulerLimits
from tokenspeed_jax.recipes.plan import CacheLayout, pack
from tokenspeed_jax.recipes.setup import cache_setup
from tokenspeed_jax.recipes.spec import CacheFieldSpec, CacheGroupSpec, Group

LIMITS = SchedulerLimits("Fused", max_live_requests=4, max_scheduled_tokens=64, max_context_len=128)


def layers(*windows: int | None, kv_heads: int = 2, head_dim: int = 8) -> tuple[AttentionSpec, ...]:
    return tuple(AttentionSpec(i, 4, kv_heads, head_dim, 1.0, window) for i, window in enumerate(windows))


def setup(model: tuple[AttentionSpec, ...], budget_bytes: int, **options: object):
    arguments: dict = {"limits": LIMITS, "prefix_granularity": 16, "kv_dtype": "bfloat16"} | options
    return cache_setup(model, budget_bytes=budget_bytes, **arguments)


def test_full_layers_make_one_group_with_a_plane_per_layer_and_side() -> None:
    result = setup(layers(None, None), 21 * 2048)
    plan = result.plan
    assert (plan.lcm_block_bytes, plan.num_lcm_blocks, result.token_capacity) == (2048, 20, 20 * 16)
    assert [plane.plane_id for plane in plan.planes] == ["unit.0.k", "unit.0.v", "unit.1.k", "unit.1.v"]
    assert {field.field_id: field.shape for field in plan.fields}["layer.1.v"] == (16, 2, 8)
    (spec,) = result.specs
    assert (spec.group_id, spec.retention, spec.block_granularity) == ("full_attention", "full_history", 16)
    assert (result.num_target_layers, result.num_draft_layers, result.cache_budget_bytes) == (2, 0, 21 * 2048)
    assert result.spec.layer_kv_head_counts == (2, 2)


def test_hybrid_layers_share_planes_and_each_window_has_a_group() -> None:
    result = setup(layers(32, 32, None, 32, 64), 100 * 6 * 512)
    assert [(s.group_id, s.sliding_window_tokens) for s in result.specs] == [
        ("sliding_attention_32", 32), ("full_attention", None), ("sliding_attention_64", 64),
    ]  # fmt: skip
    assert len(result.plan.planes) == 6
    assert {g.cache_blocks_per_lcm_block for g in result.plan.groups} == {1}
    assert result.plan.field("layer.2.k").plane_id == result.plan.field("layer.4.k").plane_id == "unit.0.k"


def test_layers_of_different_geometry_share_a_plane_by_exact_ratio() -> None:
    sliding = AttentionSpec(0, 4, 4, 8, 1.0, 32)
    full = AttentionSpec(1, 4, 1, 16, 1.0)
    result = setup((sliding, full), 1 << 20)
    packing = {g.group_id: g.cache_blocks_per_lcm_block for g in result.plan.groups}
    assert packing == {"sliding_attention": 1, "full_attention": 2}
    assert result.token_capacity == result.plan.num_lcm_blocks * 2 * 16


def test_geometry_without_a_common_ratio_is_a_config_error() -> None:
    model = (
        AttentionSpec(0, 4, 4, 8, 1.0, 32), AttentionSpec(1, 4, 4, 8, 1.0, 32),
        AttentionSpec(2, 4, 1, 16, 1.0), AttentionSpec(3, 4, 1, 8, 1.0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"cannot be laid out.*bytes apart"):
        setup(model, 1 << 20)


@pytest.mark.parametrize("parents", [1, 2, 3])
def test_a_budget_needs_the_null_parent_and_one_more(parents: int) -> None:
    limits = dataclasses.replace(LIMITS, max_context_len=8)
    if parents == 1:
        with pytest.raises(ConfigError, match=r"at least 2 parents of 1024 bytes.*budget is 1024.*at least 2048") as e:
            setup(layers(None), parents * 1024, limits=limits)
        assert e.value.field == "kv_cache_memory_bytes"
    else:
        assert setup(layers(None), parents * 1024, limits=limits).plan.num_lcm_blocks == parents - 1


def test_one_request_of_the_longest_context_must_fit_alone() -> None:
    with pytest.raises(ConfigError) as refusal:
        setup(layers(None), 8 * 1024)
    message = str(refusal.value)
    assert "max_model_len 128 tokens needs 8 parents of 1024 bytes" in message
    assert "budget of 8192 bytes holds 7" in message
    assert "at least 9216" in message
    assert "at most 112" in message
    assert refusal.value.field == "max_model_len"
    assert setup(layers(None), 9 * 1024).plan.num_lcm_blocks == 8
    shorter = dataclasses.replace(LIMITS, max_context_len=112)
    assert setup(layers(None), 8 * 1024, limits=shorter).plan.num_lcm_blocks == 7


def test_overlapped_steps_count_in_what_one_request_needs() -> None:
    overlapped = dataclasses.replace(LIMITS, overlap_schedule_depth=1)
    with pytest.raises(ConfigError, match="needs 9 parents"):
        setup(layers(None), 9 * 1024, limits=overlapped)


def test_a_token_limit_caps_parents_and_the_reported_capacity() -> None:
    limits = dataclasses.replace(LIMITS, max_context_len=64)
    result = setup(layers(None), 1 << 20, limits=limits, token_limit=100)
    assert (result.plan.num_lcm_blocks, result.token_capacity) == (6, 96)
    with pytest.raises(ConfigError, match="token limit of 15 tokens is below one parent of 16"):
        setup(layers(None), 1 << 20, limits=limits, token_limit=15)


def test_unsupported_dtype_and_malformed_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="float8_e4m3fn") as refusal:
        setup(layers(None), 1 << 20, kv_dtype="float8_e4m3fn")
    assert refusal.value.field == "dtype"
    with pytest.raises(ValueError, match="no attention layer"):
        setup((), 1 << 20)
    with pytest.raises(ValueError, match="declares layer_id 0"):
        setup(layers(None) * 2, 1 << 20)


@pytest.mark.parametrize(
    "changes", [{"role": "X"}, {"max_live_requests": 0}, {"overlap_schedule_depth": 2}, {"decode_input_tokens": True}]
)
def test_malformed_limits_are_refused(changes: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(LIMITS, **changes)


def test_layer_view_narrows_the_layers_only() -> None:
    spec = setup(layers(None, 32, None), 1 << 20).spec
    view = spec.layer_view(1, 2, "draft")
    assert (view.layer_types, view.family) == (("sliding_attention", "full_attention"), "draft")
    assert view.memory_plan is spec.memory_plan
    with pytest.raises(ValueError, match="outside"):
        spec.layer_view(2, 2, "draft")


class DemandShaped(CacheRecipe):
    """A family whose groups, packing and P are given; sizes its capacity by the scheduler's demand model."""

    family = "demand"
    prefix_granularity = 64  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    layer_types = ()  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    layer_kv_head_counts = ()  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, declared: Sequence[tuple[CacheGroupSpec, int]], limits: SchedulerLimits) -> None:
        super().__init__(budget_bytes=1 << 40, token_limit=None, limits=limits)
        self.declared = declared
        self.prefix_granularity = declared[0][0].block_granularity

    def groups(self) -> tuple[Group, ...]:
        return tuple(
            (spec, (CacheFieldSpec(f"layer.{i}.x", f"p{i}", (1,), "uint8", False),))
            for i, (spec, _) in enumerate(self.declared)
        )

    def packing(self, groups: Sequence[Group]) -> Mapping[str, int]:
        return {spec.group_id: packing for spec, packing in self.declared}

    @property
    def layout(self) -> CacheLayout:
        groups = self.groups()
        return pack(groups, self.prefix_granularity, self.packing(groups), 1, float("inf"))

    @property
    def specs(self) -> tuple[CacheGroupSpec, ...]:
        return tuple(spec for spec, _ in self.declared)


def full(granularity: int, packing: int, policy: str | None = None) -> tuple[CacheGroupSpec, int]:
    spec = CacheGroupSpec(
        "full", "history", "full_history", False, rows_per_page=granularity, entry_stride_tokens=1,
        transfer_policy=policy,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return spec, packing


def snapshot(name: str, granularity: int, policy: str | None = None) -> tuple[CacheGroupSpec, int]:
    spec = CacheGroupSpec(
        name, "state", "full_history", False, checkpoint_granularity=granularity,
        transfer_policy=policy,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    return spec, 1


@pytest.mark.parametrize(
    ("role", "concurrent", "parents", "single", "single_parents"),
    [
        ("Fused", [1056, 64, 194], 217, [65, 4, 65], 32),
        ("P", [1040, 48, 194], 200, [64, 3, 64], 31),
        ("D", [1056, 64, 96], 184, [65, 4, 6], 12),
    ],
)
def test_t10_demand_of_every_role(
    role: str, concurrent: list[int], parents: int, single: list[int], single_parents: int
) -> None:
    history_policy, state_policy = (None, None) if role == "Fused" else ("full_suffix", "latest_snapshot")
    sliding = CacheGroupSpec(
        "sliding", "history", "sliding_window", False, rows_per_page=64, entry_stride_tokens=1,
        sliding_window_tokens=128, transfer_policy=history_policy,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    limits = SchedulerLimits(role, 16, 8192, 4096, 4, 1)  # pyright: ignore[reportArgumentType]
    declared = [full(64, 12, history_policy), snapshot("state", 64, state_policy), (sliding, 3)]
    recipe = DemandShaped(declared, limits)
    model = recipe.capacity_model(recipe.layout, recipe.specs)
    assert list(model.concurrent_group_pages(65536, 4096)) == concurrent
    assert recipe.parents_needed(recipe.layout, recipe.specs, 65536) == parents
    assert list(model.single_request_group_pages(4096)) == single
    assert model.lcm_blocks_needed_for(single) == single_parents


def kimi_like() -> DemandShaped:
    declared = [full(128, 12), *(snapshot(f"state{i}", 128) for i in range(3))]
    return DemandShaped(declared, SchedulerLimits("Fused", 64, 8192, 262_144, 5, 1))


@pytest.mark.parametrize(("tokens", "parents"), [(1, 779), (131_072, 864), (1_048_576, 1462)])
def test_t11_parents_needed(tokens: int, parents: int) -> None:
    recipe = kimi_like()
    assert recipe.parents_needed(recipe.layout, recipe.specs, tokens) == parents


def test_t11_capacity_is_the_inverse_of_the_demand() -> None:
    recipe = kimi_like()
    layout, specs = recipe.layout, recipe.specs
    tokens = recipe.capacity_from_parents(layout, specs, 2000, 10**8)
    assert tokens == 1_875_968
    assert recipe.parents_needed(layout, specs, tokens) == 2000
    assert recipe.parents_needed(layout, specs, tokens + 1) == 2001
    with pytest.raises(ConfigError, match="hold no token"):
        recipe.capacity_from_parents(layout, specs, 10, 10**8)


@settings(max_examples=25, deadline=None)
@given(st.integers(780, 4000), st.integers(1, 10**7))
def test_capacity_from_parents_brackets_the_demand(parents: int, upper: int) -> None:
    recipe = kimi_like()
    layout, specs = recipe.layout, recipe.specs
    tokens = recipe.capacity_from_parents(layout, specs, parents, upper)
    assert recipe.parents_needed(layout, specs, tokens) <= parents
    assert tokens == upper or recipe.parents_needed(layout, specs, tokens + 1) > parents
