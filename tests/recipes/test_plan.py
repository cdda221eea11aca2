"""Packing and addressing: the worked examples of the specification, and what is refused."""

import math

import pytest

from tokenspeed_jax.recipes.plan import CacheLayout, CacheMemoryPlan, pack
from tokenspeed_jax.recipes.report import capacity_report
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group, split_recurrent_state_groups

from .declarations import exact, flexible, history, paddings, state


def kv_layers(layer_ids: list[int], shape: tuple[int, int, int], dtype: str = "bfloat16") -> list[CacheFieldSpec]:
    return [
        exact(f"layer.{layer}.{name}", f"unit.{i}.{name}", shape, dtype)
        for i, layer in enumerate(layer_ids)
        for name in ("k", "v")
    ]


E1 = pack([history("full", 16, *kv_layers([0, 1], (16, 2, 8)))], 16, {"full": 1}, 1, math.inf)


def test_e1_t1_ordinary_layers_one_block_per_parent() -> None:
    assert (E1.lcm_block_bytes, E1.packing, [size for _, size in E1.plane_bytes]) == (2048, {"full": 1}, [512] * 4)
    plan = E1.bind(3)
    assert [plane.arena_offset_bytes for plane in plan.planes] == [0, 2048, 4096, 6144]
    assert (plan.arena_bytes, plan.group("full").page_count) == (8192, 4)
    assert [plan.offset("layer.0.k", page) for page in range(4)] == [0, 512, 1024, 1536]
    assert [plan.offset("layer.1.v", page) for page in range(4)] == [6144, 6656, 7168, 7680]


def test_e2_hybrid_layers_share_the_slabs_of_the_deeper_group() -> None:
    shape = (64, 2, 64)
    groups = [
        history("full", 64, *kv_layers([0], shape)),
        history("sliding", 64, *kv_layers([1, 2], shape), window=128),
    ]
    layout = pack(groups, 64, {"full": 1, "sliding": 1}, 1, math.inf)
    assert (len(layout.plane_bytes), layout.lcm_block_bytes) == (4, 65_536)
    assert paddings(layout) == {"full": 1.0, "sliding": 0.0}


E3 = pack([history("a", 1, exact("fa", "p0", (6,))), history("b", 1, exact("fb", "p0", (4,)))], 1)


def test_e3_t2_exact_fields_fix_the_ratio() -> None:
    assert (E3.packing, dict(E3.plane_bytes)) == ({"a": 2, "b": 3}, {"p0": 12})
    assert [field.page_stride_bytes for field in E3.fields] == [6, 4]
    plan = E3.bind(2)
    assert plan.arena_bytes == 36
    assert [plan.offset("fa", page) for page in range(5)] == [6, 12, 18, 24, 30]
    assert [plan.offset("fb", page) for page in range(7)] == [8, 12, 16, 20, 24, 28, 32]


def test_e3_a_flexible_field_takes_what_the_exact_one_leaves() -> None:
    groups = [history("a", 1, exact("fa", "p0", (6,))), history("b", 1, flexible("fb", "p0", (4,)))]
    layout = pack(groups, 1, max_padding_fraction=0.5)
    assert (layout.packing, dict(layout.plane_bytes)) == ({"a": 1, "b": 1}, {"p0": 6})
    assert paddings(layout) == {"a": 0.0, "b": 0.5}
    with pytest.raises(ValueError, match="would waste 2 bytes"):
        pack(groups, 1, max_padding_fraction=0.49)


def kimi_k3(tensor_parallel: int, latent_dtype: str) -> CacheLayout:
    """24 latent layers and 69 state layers in three consecutive thirds, 93 layers in all."""
    full_layers = [*range(3, 93, 4), 92]
    state_layers = [layer for layer in range(93) if layer not in full_layers]
    latent = [exact(f"layer.{n}.latent_kv", f"slot.{i}", (128, 576), latent_dtype) for i, n in enumerate(full_layers)]
    groups = [history("full_attention", 128, *latent)]
    heads = 96 // tensor_parallel
    for third in range(3):
        fields = []
        for i, layer in enumerate(state_layers[third * 23 : third * 23 + 23]):
            fields.append(flexible(f"layer.{layer}.conv_state", f"slot.{i}", (3 * heads * 128, 3), "bfloat16"))
            fields.append(flexible(f"layer.{layer}.recurrent_state", f"slot.{i}", (heads, 128, 128), "float32"))
        groups.append(state(f"linear_attention_{third}", 128, *fields))
    page = latent[0].payload_bytes
    state_bytes = sum(field.payload_bytes for field in groups[1][1][:2])
    full = max(1, -(-state_bytes // page))
    packing = {spec.group_id: max(1, full * page // state_bytes) for spec, _ in groups} | {"full_attention": full}
    return pack(groups, 128, packing, 256)


@pytest.mark.parametrize(
    ("tensor_parallel", "dtype", "packing", "plane", "parent", "padding"),
    [
        (8, "uint8", 12, 884_736, 21_233_664, 0.134044),
        (8, "bfloat16", 6, 884_736, 21_233_664, 0.134044),
        (1, "uint8", 89, 6_561_792, 157_483_008, 0.051354),
        (16, "uint8", 6, 442_368, 10_616_832, 0.134044),
    ],
)
def test_e4_kimi_k3(tensor_parallel: int, dtype: str, packing: int, plane: int, parent: int, padding: float) -> None:
    layout = kimi_k3(tensor_parallel, dtype)
    assert layout.packing == {"full_attention": packing} | {f"linear_attention_{i}": 1 for i in range(3)}
    assert [size for _, size in layout.plane_bytes] == [plane] * 24
    assert layout.lcm_block_bytes == parent
    assert paddings(layout)["linear_attention_0"] == pytest.approx(padding, abs=5e-7)


def test_t3_t7_kimi_k3_addresses_and_plane_order() -> None:
    plan = kimi_k3(8, "uint8").bind(4)
    assert [group.page_count for group in plan.groups] == [49, 5, 5, 5]
    assert plan.arena_bytes == 106_168_320
    latent = {0: 811_008, 1: 884_736, 12: 1_695_744, 13: 1_769_472, 48: 4_349_952}
    assert {page: plan.offset("layer.3.latent_kv", page) for page in latent} == latent
    assert plan.offset("layer.0.conv_state", 0) == 0
    assert plan.offset("layer.0.recurrent_state", 2) == 1_797_120
    assert plan.offset("layer.30.recurrent_state", 4) == 3_566_592
    assert plan.offset("layer.7.latent_kv", 1) == 5_308_416
    order = [plane.plane_id for plane in plan.planes]
    assert order[:3] + order[11:13] == ["slot.0", "slot.1", "slot.10", "slot.19", "slot.2"]
    assert plan.plane("slot.1").arena_offset_bytes == 4_423_680
    assert plan.plane("slot.10").arena_offset_bytes == 8_847_360


def test_t3_kimi_k3_capacity_report() -> None:
    layout = kimi_k3(8, "uint8")
    specs = [history("full_attention", 128)[0], *(state(f"linear_attention_{i}", 128)[0] for i in range(3))]
    per_request = {f"linear_attention_{i}": 4 for i in range(3)}
    full, *states = capacity_report(layout.bind(4), specs, per_request_blocks=per_request)
    assert (full.unit, full.capacity, full.supported_requests, full.dead_bytes) == ("tokens", 6144, None, 0)
    for row in states:
        assert (row.unit, row.capacity, row.supported_requests, row.dead_bytes) == ("requests", 1, 1, None)
        assert row.binding_utilization == pytest.approx(0.8818, abs=5e-5)


def test_t16_kimi_k3_blocks_without_padding() -> None:
    # What one block is in the host tier, which packs payloads back to back.
    layout = kimi_k3(8, "uint8")
    assert layout.block_bytes("full_attention") == 1_769_472
    assert [layout.block_bytes(f"linear_attention_{i}") for i in range(3)] == [18_723_840] * 3


def gated_delta_net(
    layers: int, page: tuple[int, int, int], ssm: tuple[int, int, int], conv: int, *, drafts: int = 0, dtype: str
) -> CacheLayout:
    labels = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
    labels += ["full_attention"] * drafts
    fields: dict[str, list[CacheFieldSpec]] = {}
    depth: dict[str, int] = {}
    for layer, group_id in enumerate(split_recurrent_state_groups(labels)):
        i = depth.setdefault(group_id, 0)
        depth[group_id] += 1
        if group_id == "full_attention":
            pair = [exact(f"layer.{layer}.k", f"unit.{i}.a", page, "bfloat16"),
                    exact(f"layer.{layer}.v", f"unit.{i}.b", page, "bfloat16")]  # fmt: skip
        else:
            pair = [exact(f"layer.{layer}.ssm", f"unit.{i}.a", ssm, dtype),
                    flexible(f"layer.{layer}.conv", f"unit.{i}.b", (conv, 3), "bfloat16")]  # fmt: skip
        fields.setdefault(group_id, []).extend(pair)
    groups = [
        history(group_id, 128, *declared) if group_id == "full_attention" else state(group_id, 128, *declared)
        for group_id, declared in fields.items()
    ]
    return pack(groups, 128, None, 256, 1 + 2 * drafts / labels[:layers].count("full_attention"))


@pytest.mark.parametrize(
    ("drafts", "dtype", "full", "planes", "parent", "padding"),
    [
        (0, "float32", 16, 24, 50_331_648, 0.954198),
        (1, "float32", 16, 26, 54_525_952, 1.117048),
        (0, "bfloat16", 8, 24, 25_165_824, 0.910448),
    ],
)
def test_e5_qwen3_next(drafts: int, dtype: str, full: int, planes: int, parent: int, padding: float) -> None:
    layout = gated_delta_net(48, (128, 2, 256), (32, 128, 128), 2 * 16 * 128 + 32 * 128, drafts=drafts, dtype=dtype)
    assert layout.packing == {"full_attention": full} | {f"linear_attention_{i}": 1 for i in range(3)}
    assert (len(layout.plane_bytes), layout.lcm_block_bytes) == (planes, parent)
    assert paddings(layout)["linear_attention_0"] == pytest.approx(padding, abs=5e-7)


E6 = gated_delta_net(4, (128, 1, 64), (2, 32, 32), 2 * 1 * 32 + 2 * 32, dtype="float32")


def test_e6_t21_tiny_gated_delta_net() -> None:
    assert E6.packing == {"full_attention": 1} | {f"linear_attention_{i}": 2 for i in range(3)}
    assert (dict(E6.plane_bytes), E6.lcm_block_bytes) == ({"unit.0.a": 16_384, "unit.0.b": 16_384}, 32_768)
    strides = {field.field_id: field.page_stride_bytes for field in E6.fields}
    assert (strides["layer.0.ssm"], strides["layer.0.conv"]) == (8192, 8192)
    plan = E6.bind(512)
    assert [plan.offset("layer.0.ssm", page) for page in (0, 1, 2, 4)] == [8192, 16_384, 24_576, 40_960]


def test_e8_t7_deepseek_v41_plane_aligns_to_every_stride() -> None:
    def fields(group_id: str, layers: int, payload: int) -> list[CacheFieldSpec]:
        return [flexible(f"layer.{layer}.{group_id}", "unit", (payload,), align=256) for layer in range(layers)]

    groups = [
        history("swa", 64, *fields("swa", 40, 64 * 528), window=128),
        history("r2", 64, *fields("r2", 3, 64 * (288 + 68))),
        history("r1", 64, *fields("r1", 1, 64 * (288 + 68))),
        history("tail", 2, *fields("tail", 3, 2 * 2 * 512 * 4), window=2),
    ]
    layout = pack(groups, 128, {"swa": 1, "r2": 20, "r1": 60, "tail": 54}, 256, 0.05)
    assert layout.lcm_block_bytes == 1_382_400
    expected = {"swa": 0.0227, "r2": 0.0112, "r1": 0.0112, "tail": 0.0417}
    assert paddings(layout) == pytest.approx(expected, abs=5e-5)
    assert [f.field_id for f in layout.fields if f.group_id == "swa"][:3] == [
        "layer.0.swa", "layer.1.swa", "layer.10.swa",
    ]  # fmt: skip


@pytest.mark.parametrize(("tensor_parallel", "full", "last"), [(8, 9, 543_744), (1, 72, 4_343_040)])
def test_e9_glm_plane_without_an_exact_tenant(tensor_parallel: int, full: int, last: int) -> None:
    heads = 64 // tensor_parallel
    latent = [exact(f"layer.{i}.latent_kv", f"slot.{i}", (64, 1, 512), "bfloat16") for i in range(11)]
    index = [flexible(f"layer.{i}.index_k", "slot.11", (16, 132)) for i in range(11)]
    groups = [history("full_attention", 64, *latent, *index)]
    for third, depth in enumerate((12, 11, 11)):
        fields = []
        for i in range(depth):
            layer = 100 * (third + 1) + i
            fields.append(flexible(f"layer.{layer}.conv", f"slot.{i}", (3 * heads * 128, 3), "bfloat16"))
            fields.append(flexible(f"layer.{layer}.recurrent", f"slot.{i}", (heads, 128, 128), "float32"))
        groups.append(state(f"linear_attention_{third}", 64, *fields))
    pinned = {spec.group_id: full if spec.group_id == "full_attention" else 1 for spec, _ in groups}
    layout = pack(groups, 64, pinned, 256)
    assert dict(layout.plane_bytes) == {f"slot.{i}": full * 65_536 for i in range(11)} | {"slot.11": last}
    assert layout.lcm_block_bytes == 11 * full * 65_536 + last
    if tensor_parallel == 8:
        assert layout.lcm_block_bytes == 7_031_808
        assert list(paddings(layout).values()) == pytest.approx([0.05, 0.0797, 0.1779, 0.1779], abs=5e-5)


def test_contradictory_ratios_fail_the_exact_check_and_name_the_widest_tenant() -> None:
    groups = [
        history("a", 1, exact("fa0", "p0", (6,)), exact("fa1", "p1", (4,))),
        history("b", 1, exact("fb0", "p0", (4,)), exact("fb1", "p1", (4,))),
    ]
    with pytest.raises(ValueError, match=r"'fb0'.*'p0' of 6 bytes gives 6.*widest tenant is cache group 'a'"):
        pack(groups, 1, max_padding_fraction=math.inf)


def test_exact_ratios_are_solved_through_chains_and_reduced() -> None:
    groups = [
        history("a", 1, exact("fa", "p0", (12,))),
        history("b", 1, exact("fb0", "p0", (8,)), exact("fb1", "p1", (10,))),
        history("c", 1, exact("fc", "p1", (15,))),
        history("d", 1, exact("fd", "p2", (5,))),
    ]
    layout = pack(groups, 1, max_padding_fraction=math.inf)
    # 12 a = 8 b and 10 b = 15 c; d shares nothing and keeps its ratio to the widest group (18 // 5).
    assert layout.packing == {"a": 2, "b": 3, "c": 2, "d": 3}


A = history("a", 2, exact("fa", "p", (4,)))


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ([A], {"prefix_granularity": 0}, "prefix_granularity"),
        ([A], {"prefix_granularity": 3}, "does not divide"),
        ([A], {"alignment": 0}, "alignment"),
        ([A], {"max_padding_fraction": -0.1}, "max_padding_fraction"),
        ([A], {"max_padding_fraction": math.nan}, "max_padding_fraction"),
        ([A], {"cache_blocks_per_lcm_block": {"b": 1}}, "undeclared cache groups: b"),
        ([A], {"cache_blocks_per_lcm_block": {"a": True}}, "packing of cache group"),
        ([A], {"cache_blocks_per_lcm_block": {"a": 0}}, "packing of cache group"),
        ([A], {"cache_blocks_per_lcm_block": {"a": 2**62}}, "exceeds 2"),
        ([], {}, "no cache group"),
        ([A, A], {}, "group ids must be unique"),
        ([A, history("b", 2, exact("fa", "p", (4,)))], {}, "field ids must be unique"),
        ([history("a", 2)], {}, "no fields"),
    ],
)
def test_malformed_input_is_refused(groups: list[Group], options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(groups, **({"prefix_granularity": 2} | options))


def test_partly_pinned_packing_keeps_the_rest_derived() -> None:
    groups = [history("a", 1, flexible("fa", "p0", (8,))), history("b", 1, flexible("fb", "p1", (4,)))]
    assert pack(groups, 1, {"a": 3}, 1, math.inf).packing == {"a": 3, "b": 2}


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_bind_refuses_what_is_no_count(count: object) -> None:
    with pytest.raises(ValueError, match="num_lcm_blocks"):
        E1.bind(count)  # pyright: ignore[reportArgumentType]


def test_bind_refuses_ids_beyond_int32() -> None:
    assert E3.bind((2**31 - 1) // 3).group("b").page_count == 2**31 - 1
    with pytest.raises(ValueError, match="int32"):
        E3.bind((2**31 - 1) // 3 + 1)


@pytest.mark.parametrize("page", [-1, 4, True, 1.0])
def test_offset_refuses_what_is_no_page(page: object) -> None:
    with pytest.raises(IndexError, match="outside"):
        E1.bind(3).offset("layer.0.k", page)  # pyright: ignore[reportArgumentType]


def test_json_that_is_no_plan_is_refused() -> None:
    text = E1.bind(3).to_json()
    with pytest.raises(ValueError, match="do not follow"):
        CacheMemoryPlan.from_json(text.replace('"page_count": 4', '"page_count": 5'))
    with pytest.raises(ValueError, match="tile"):
        CacheLayout.from_json(E1.to_json().replace('"page_stride_bytes": 512', '"page_stride_bytes": 256'))
