"""Hybrid recipes: the worked examples of the specification from a model's layers, and what a user is told."""

import pytest

from tokenspeed_jax.engine.memory import MemoryReport
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, LayerSpec, RecurrentSpec
from tokenspeed_jax.recipes.base import CacheSetup, SchedulerLimits
from tokenspeed_jax.recipes.report import capacity_report
from tokenspeed_jax.recipes.setup import cache_setup

LIMITS = SchedulerLimits("Fused", max_live_requests=4, max_scheduled_tokens=512, max_context_len=256)


def setup(layers: tuple[LayerSpec, ...], family: str, **options: object) -> CacheSetup:
    arguments: dict = {
        "limits": LIMITS, "prefix_granularity": 128, "kv_dtype": "bfloat16", "budget_bytes": 1 << 34,
    } | options  # fmt: skip
    return cache_setup(layers, family=family, **arguments)


def packing(result: CacheSetup) -> dict[str, int]:
    return {group.group_id: group.cache_blocks_per_lcm_block for group in result.plan.groups}


def padding(result: CacheSetup, group_id: str) -> float:
    used = packing(result)[group_id] * result.plan.block_bytes(group_id)
    return result.plan.lcm_block_bytes / used - 1


def attention(layer: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(layer, 2 * kv_heads, kv_heads, dim, 1.0, window)


def delta_net(periods: int, kv_heads: int, dim: int, channels: int, state: tuple[int, ...]) -> tuple[LayerSpec, ...]:
    """Periods of three recurrent layers before one of full attention."""
    return tuple(
        attention(layer, kv_heads, dim) if layer % 4 == 3 else RecurrentSpec(layer, (channels, 4), state)
        for layer in range(4 * periods)
    )


def test_e5_qwen3_next_packs_sixteen_pages_for_one_state() -> None:
    result = setup(delta_net(12, 2, 256, 2 * 16 * 128 + 32 * 128, (32, 128, 128)), "hybrid")
    states = [f"linear_attention_{i}" for i in range(3)]
    assert packing(result) == {"full_attention": 16} | dict.fromkeys(states, 1)
    assert len(result.plan.planes) == 24
    assert {plane.bytes_per_lcm_block for plane in result.plan.planes} == {2_097_152}
    assert result.plan.lcm_block_bytes == 50_331_648
    assert padding(result, "full_attention") == 0
    assert [padding(result, name) for name in states] == pytest.approx([0.954198] * 3, abs=5e-7)
    # Each state group has every third recurrent layer; the i-th layers of all groups share the planes.
    fields = {field.field_id: field for field in result.plan.fields}
    assert [fields[f"layer.{layer}.state"].group_id for layer in (0, 1, 2, 4, 5, 6)] == states * 2
    assert {fields[name].plane_id for name in ("layer.4.state", "layer.6.state", "layer.7.k")} == {"unit.1.a"}
    assert {fields[name].plane_id for name in ("layer.4.window", "layer.6.window", "layer.7.v")} == {"unit.1.b"}
    assert fields["layer.4.window"].shape == (8192, 3)
    # The densest history: sixteen pages of 128 tokens in every parent.
    assert result.token_capacity == result.plan.num_lcm_blocks * 16 * 128


def test_the_start_up_report_counts_state_groups_in_requests() -> None:
    result = setup(delta_net(12, 2, 256, 2 * 16 * 128 + 32 * 128, (32, 128, 128)), "hybrid", budget_bytes=1 << 33)
    states = [f"linear_attention_{i}" for i in range(3)]
    groups = capacity_report(result.plan, result.specs, per_request_blocks=dict.fromkeys(states, 3))
    parents = result.plan.num_lcm_blocks
    by_id = {row.group_id: row for row in groups}
    # A state block: 12 layers of a 2 MiB state and a window of 8192 x 3 in bfloat16.
    state = by_id["linear_attention_1"]
    assert (state.unit, state.block_bytes, state.capacity) == ("requests", 12 * (2_097_152 + 49_152), parents // 3)
    assert state.padding_bytes_per_lcm_block == 24_576_000
    report = MemoryReport(
        weights=0,
        arena=result.plan.arena_bytes,
        device_state=0,
        workspace=0,
        free=None,
        num_parents=parents,
        parent_bytes=result.plan.lcm_block_bytes,
        prefix_granularity=result.plan.prefix_granularity,
        token_capacity=result.token_capacity,
        groups=groups,
    )
    lines = list(report.lines())
    for name in states:
        assert f"group {name}: packing 1, 24576000 bytes of a parent unused, capacity {parents // 3} requests" in lines
    tokens = parents * 16 * 128
    assert any(line.endswith(f"packing 16, 0 bytes of a parent unused, capacity {tokens} tokens") for line in lines)


def test_e6_tiny_delta_net_packs_two_states_for_one_page() -> None:
    result = setup(delta_net(1, 1, 64, 128, (2, 32, 32)), "hybrid")
    assert packing(result) == {"full_attention": 1} | {f"linear_attention_{i}": 2 for i in range(3)}
    assert {plane.plane_id: plane.bytes_per_lcm_block for plane in result.plan.planes} == {
        "unit.0.a": 16_384, "unit.0.b": 16_384,
    }  # fmt: skip
    assert [field.page_stride_bytes for field in result.plan.fields if field.field_id.startswith("layer.0")] == [
        8192, 8192,
    ]  # fmt: skip
    assert [result.plan.offset("layer.0.state", block) for block in (0, 1, 2, 4)] == [8192, 16_384, 24_576, 40_960]


def kimi_k3(tensor_parallel: int) -> tuple[LayerSpec, ...]:
    """93 layers, 24 of them latent attention, with the heads of one rank."""
    heads = 96 // tensor_parallel
    latent = {*range(3, 93, 4), 92}
    return tuple(
        LatentAttentionSpec(layer, heads, 512, 64, 128, 128, 1.0)
        if layer in latent
        else RecurrentSpec(layer, (3 * heads * 128, 4), (heads, 128, 128))
        for layer in range(93)
    )


@pytest.mark.parametrize(("tensor_parallel", "full", "plane"), [(8, 6, 884_736), (16, 3, 442_368), (1, 45, 6_635_520)])
def test_e4_f14_kimi_k3_packs_latent_pages_for_a_state(tensor_parallel: int, full: int, plane: int) -> None:
    result = setup(kimi_k3(tensor_parallel), "kda_hybrid")
    states = [f"linear_attention_{i}" for i in range(3)]
    assert packing(result) == {"full_attention": full} | dict.fromkeys(states, 1)
    assert [item.bytes_per_lcm_block for item in result.plan.planes] == [plane] * 24
    assert padding(result, "full_attention") == 0
    groups: dict[str, list[int]] = {}
    for field in result.plan.fields:
        if field.field_id.endswith(".state"):
            groups.setdefault(field.group_id, []).append(int(field.field_id.split(".")[1]))
    assert {name: (len(layers), min(layers)) for name, layers in groups.items()} == {
        "linear_attention_0": (23, 0), "linear_attention_1": (23, 30), "linear_attention_2": (23, 61),
    }  # fmt: skip
    assert (max(groups["linear_attention_0"]), max(groups["linear_attention_2"])) == (29, 90)


def test_e4_kimi_k3_addresses_and_padding() -> None:
    result = setup(kimi_k3(8), "kda_hybrid")
    assert result.plan.lcm_block_bytes == 21_233_664
    assert padding(result, "linear_attention_0") == pytest.approx(0.134044, abs=5e-7)
    # T3 with latents of 2 bytes: a page is twice as long, the state block is the same.
    assert [result.plan.offset("layer.3.latent_kv", page) for page in (0, 1, 6, 7)] == [
        737_280, 884_736, 1_622_016, 1_769_472,
    ]  # fmt: skip
    # The state comes first in its block, the window behind its 786,432 bytes.
    assert [result.plan.offset("layer.0.state", block) for block in (0, 2)] == [0, 1_769_472]
    assert [result.plan.offset("layer.0.window", block) for block in (0, 2)] == [786_432, 2_555_904]
    assert {result.plan.field(f"layer.{layer}.state").plane_id for layer in (0, 30, 61)} == {"slot.0"}


def test_thirds_that_do_not_divide_are_longer_first() -> None:
    layers = tuple(RecurrentSpec(i, (12, 4), (2, 32, 32)) for i in range(4))
    result = setup((*layers, LatentAttentionSpec(4, 1, 8, 8, 8, 8, 1.0)), "kda_hybrid")
    groups = {field.field_id: field.group_id for field in result.plan.fields}
    assert [groups[f"layer.{i}.state"][-1] for i in range(4)] == ["0", "0", "1", "2"]


@pytest.mark.parametrize("convolution", [(24, 4), None])
@pytest.mark.parametrize("state", [(4, 8, 8), None])
def test_models_of_recurrent_layers_alone_have_one_group(
    convolution: tuple[int, int] | None, state: tuple[int, ...] | None
) -> None:
    if convolution is None and state is None:
        return
    result = setup(tuple(RecurrentSpec(i, convolution, state) for i in range(5)), "hybrid")
    (spec,) = result.specs
    assert (spec.group_id, spec.family, spec.checkpoint_granularity) == ("linear_attention", "state", 128)
    assert packing(result) == {"linear_attention": 1}
    assert len(result.plan.fields) == 5 * ((convolution is not None) + (state is not None))
    assert result.token_capacity == result.plan.num_lcm_blocks * 128


THREE_KINDS = (
    RecurrentSpec(0, (24, 4), (2, 8, 8)), attention(1, 1, 16, 32),
    RecurrentSpec(2, (24, 4), (2, 8, 8)), attention(3, 1, 16),
)  # fmt: skip


def test_full_sliding_and_state_groups_stand_side_by_side() -> None:
    result = setup(THREE_KINDS, "hybrid", prefix_granularity=16, checkpoint_granularity=8)
    by_id = {spec.group_id: spec for spec in result.specs}
    assert {name: (spec.family, spec.block_granularity) for name, spec in by_id.items()} == {
        "linear_attention_0": ("state", 8), "sliding_attention": ("history", 16), "full_attention": ("history", 16),
    }  # fmt: skip
    assert by_id["sliding_attention"].sliding_window_tokens == 32
    # A page of 16 rows x 16 channels in bfloat16 is as long as a state of 2 x 8 x 8 in float32.
    assert packing(result) == dict.fromkeys(by_id, 1)
    assert {plane.plane_id for plane in result.plan.planes} == {"unit.0.a", "unit.0.b", "unit.1.a", "unit.1.b"}


@pytest.mark.parametrize("granularity", [1, 16, 64, 128])
def test_checkpoint_granularity_is_that_of_every_state_group(granularity: int) -> None:
    result = setup(delta_net(1, 1, 64, 128, (2, 32, 32)), "hybrid", checkpoint_granularity=granularity)
    spans = {spec.group_id: spec.block_granularity for spec in result.specs}
    assert spans == {"full_attention": 128} | {f"linear_attention_{i}": granularity for i in range(3)}


@pytest.mark.parametrize("granularity", [3, 96, 256])
def test_checkpoint_granularity_divides_the_prefix_granularity(granularity: int) -> None:
    with pytest.raises(ConfigError, match=f"checkpoint_granularity {granularity} does not divide.* 128") as error:
        setup(THREE_KINDS, "hybrid", checkpoint_granularity=granularity)
    assert error.value.field == "checkpoint_granularity"


def test_checkpoint_granularity_is_refused_where_nothing_has_a_state() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_granularity 64 has no effect.*no recurrent layer") as error:
        setup((attention(0, 1, 16),), "ordinary", checkpoint_granularity=64)
    assert error.value.field == "checkpoint_granularity"
