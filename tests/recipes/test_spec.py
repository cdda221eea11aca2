"""Declarations: what a spec or field may say, and how layers become groups."""

import dataclasses

import pytest

from tokenspeed_jax.recipes.spec import (
    ELEMENT_BYTES,
    CacheFieldSpec,
    CacheGroupSpec,
    group,
    hybrid_slab_group_size,
    layer_group_ids,
    split_recurrent_state_groups,
)

FULL = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=16, entry_stride_tokens=4)
SLIDING = CacheGroupSpec(
    "sliding", "history", "sliding_window", False, rows_per_page=64, entry_stride_tokens=1, sliding_window_tokens=128
)
STATE = CacheGroupSpec("state", "state", "full_history", False, checkpoint_granularity=128)


def test_each_shape_gives_its_block_granularity() -> None:
    assert (FULL.block_granularity, SLIDING.block_granularity, STATE.block_granularity) == (64, 64, 128)
    assert (FULL.page_size, SLIDING.page_size) == (64, 64)


def test_page_size_of_a_state_group_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="state group"):
        _ = STATE.page_size


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (STATE, {"rows_per_page": 4, "entry_stride_tokens": 1}, "checkpoint_granularity, not rows"),
        (FULL, {"checkpoint_granularity": 64}, "not a checkpoint_granularity"),
        (STATE, {"retention": "sliding_window", "sliding_window_tokens": 4}, "retains full history"),
        (STATE, {"checkpoint_granularity": None}, "checkpoint_granularity must be a positive"),
        (FULL, {"replayable": True}, "only a sliding history"),
        (STATE, {"replayable": True}, "only a sliding history"),
        (FULL, {"replayable": None}, "replayable must be"),
        (FULL, {"rows_per_page": None}, "rows_per_page"),
        (FULL, {"entry_stride_tokens": 0}, "entry_stride_tokens"),
        (FULL, {"sliding_window_tokens": 8}, "retains full history"),
        (SLIDING, {"sliding_window_tokens": None}, "sliding_window_tokens"),
        (SLIDING, {"sliding_window_tokens": True}, "sliding_window_tokens"),
        (FULL, {"group_id": ""}, "group_id"),
        (FULL, {"family": "paged"}, "family must be"),
        (FULL, {"retention": "some"}, "retention must be"),
        (FULL, {"shard_count": 0}, "shard_count"),
        (FULL, {"transfer_policy": "latest_snapshot"}, "transfer_policy must be full_suffix"),
        (STATE, {"transfer_policy": "full_suffix"}, "transfer_policy must be latest_snapshot"),
    ],
)
def test_malformed_group_cannot_be_constructed(base: CacheGroupSpec, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(base, **changes)


def test_replayable_sliding_history_is_allowed() -> None:
    assert dataclasses.replace(SLIDING, replayable=True).replayable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": (2, 0)}, "extent"),
        ({"shape": (2, True)}, "extent"),
        ({"shape": ()}, "at least one extent"),
        ({"dtype": "bf16"}, "dtype must be one of"),
        ({"field_id": ""}, "field_id"),
        ({"plane_id": ""}, "plane_id"),
        ({"page_stride_alignment_bytes": 0}, "page_stride_alignment_bytes"),
        ({"page_stride_alignment_bytes": True}, "page_stride_alignment_bytes"),
    ],
)
def test_malformed_field_cannot_be_constructed(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CacheFieldSpec("layer.0.k", "unit.0.k", (2, 3), "uint8"), **changes)


def test_payload_counts_the_bytes_of_every_dtype() -> None:
    assert {name: CacheFieldSpec("f", "p", (3, 5), name).payload_bytes for name in ELEMENT_BYTES} == {
        name: 15 * size for name, size in ELEMENT_BYTES.items()
    }


def test_one_window_keeps_the_label_and_several_are_told_apart() -> None:
    labels = ("full_attention", "sliding_attention", "sliding_attention")
    assert layer_group_ids(labels, 512) == labels
    assert layer_group_ids(labels, (None, 64, 64)) == labels
    assert layer_group_ids(labels, (None, 64, 128)) == (
        "full_attention",
        "sliding_attention_64",
        "sliding_attention_128",
    )


def test_a_window_on_a_full_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="retains everything"):
        layer_group_ids(("full_attention", "sliding_attention"), (8, 8))
    with pytest.raises(ValueError, match="window of sliding layer 0"):
        layer_group_ids(("sliding_attention",), None)
    with pytest.raises(ValueError, match="unknown storage label"):
        layer_group_ids(("chunked_attention",), None)


def test_recurrent_layers_are_dealt_by_position_in_their_run() -> None:
    labels = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 2 + ["full_attention"]
    assert split_recurrent_state_groups(labels) == (
        "linear_attention_0", "linear_attention_1", "linear_attention_2", "full_attention",
        "linear_attention_0", "linear_attention_1", "full_attention",
    )  # fmt: skip


def test_slab_size_needs_two_labels_one_window_and_no_state() -> None:
    hybrid = ["sliding_attention"] * 5 + ["full_attention"]
    assert hybrid_slab_group_size(hybrid, 512) == 5
    assert hybrid_slab_group_size(["full_attention"] * 4, None) is None
    assert hybrid_slab_group_size(["sliding_attention", "sliding_attention", "full_attention"], (4, 8, None)) is None
    assert hybrid_slab_group_size(["linear_attention", "full_attention"], None) is None


def _key_field(layer_id: int, group_id: str, occurrence: int) -> tuple[CacheFieldSpec, ...]:
    del group_id
    return (CacheFieldSpec(f"layer.{layer_id}.k", f"unit.{occurrence}.k", (4, 2), "uint8"),)


def test_group_numbers_planes_by_occurrence_within_the_group() -> None:
    labels = ("full_attention", "sliding_attention", "full_attention", "sliding_attention")
    groups = group(labels, layer_group_ids(labels, 8), 8, 4, _key_field)
    assert [(spec.group_id, [(f.field_id, f.plane_id) for f in fields]) for spec, fields in groups] == [
        ("full_attention", [("layer.0.k", "unit.0.k"), ("layer.2.k", "unit.1.k")]),
        ("sliding_attention", [("layer.1.k", "unit.0.k"), ("layer.3.k", "unit.1.k")]),
    ]
    full, sliding = (spec for spec, _ in groups)
    assert (full.rows_per_page, full.entry_stride_tokens, full.sliding_window_tokens) == (4, 1, None)
    assert sliding.sliding_window_tokens == 8


def test_layers_without_fields_do_not_count_as_occurrences() -> None:
    def fields(layer_id: int, group_id: str, occurrence: int) -> tuple[CacheFieldSpec, ...]:
        return () if layer_id == 0 else _key_field(layer_id, group_id, occurrence)

    ((_, declared),) = group(["full_attention"] * 2, ["full_attention"] * 2, None, 4, fields)
    assert [(f.field_id, f.plane_id) for f in declared] == [("layer.1.k", "unit.0.k")]


def test_state_groups_span_the_prefix_granularity_and_carry_their_transfer_policy() -> None:
    labels = ("linear_attention", "full_attention")
    (state, _), (full, _) = group(labels, labels, None, 32, _key_field, with_transfer_policy=True)
    assert (state.checkpoint_granularity, state.transfer_policy) == (32, "latest_snapshot")
    assert full.transfer_policy == "full_suffix"


def test_layers_of_one_group_must_agree() -> None:
    with pytest.raises(ValueError, match="layer 1 puts"):
        group(("full_attention", "sliding_attention"), ("g", "g"), 8, 4, _key_field)
    with pytest.raises(ValueError, match="layer 1 puts"):
        group(("sliding_attention",) * 2, ("g", "g"), (4, 8), 4, _key_field)


def test_a_group_without_fields_is_an_error() -> None:
    with pytest.raises(ValueError, match="declares a field"):
        group(("full_attention",), ("g",), None, 4, lambda layer_id, group_id, occurrence: ())
