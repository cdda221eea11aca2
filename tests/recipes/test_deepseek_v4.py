"""T9: the seven groups of DeepSeek V4, which has no recipe: declared by hand and packed by the real `pack`."""

from collections.abc import Sequence

import pytest

from tokenspeed_jax.recipes.plan import CacheLayout, pack
from tokenspeed_jax.recipes.spec import CacheFieldSpec, Group

from .declarations import flexible, history, paddings

GROUPS = (
    "c128a.compressed_kv", "c128a.compressor_state", "c4a.compressed_kv", "c4a.compressor_state",
    "c4a.indexer_compressor_state", "c4a.indexer_kv", "swa_kv",
)  # fmt: skip
ROW_BYTES = 584
ROW_UNIT = 576


def row_block(field_id: str, plane: str, rows: int) -> CacheFieldSpec:
    """A block of attention rows. Their scales stand behind all values, and pages begin on multiples of 576 bytes."""
    return flexible(field_id, plane, (-(-rows * ROW_BYTES // ROW_UNIT) * ROW_UNIT,), align=ROW_UNIT)


def deepseek_v4(ratios: Sequence[int]) -> list[Group]:
    """One layer for each compression ratio, 1 for none. The i-th layers of all groups share `unit.<i>`."""
    fields: dict[str, list[CacheFieldSpec]] = {group_id: [] for group_id in GROUPS}

    def unit(group_id: str) -> str:
        return f"unit.{len(fields[group_id])}"

    for layer, ratio in enumerate(ratios):
        fields["swa_kv"].append(row_block(f"layer.{layer}.swa", unit("swa_kv"), 64))
        if ratio == 1:
            continue
        chain = f"c{ratio}a"
        rows, state = (64, (4, 2048)) if ratio == 4 else (2, (8, 1024))
        kept = {"compressed_kv": row_block(f"layer.{layer}.compressed", unit(f"{chain}.compressed_kv"), rows)}
        kept["compressor_state"] = flexible(f"layer.{layer}.state", unit(f"{chain}.compressor_state"), state, "float32")
        if ratio == 4:
            kept["indexer_kv"] = flexible(f"layer.{layer}.index", unit("c4a.indexer_kv"), (64, 132))
            kept["indexer_compressor_state"] = flexible(
                f"layer.{layer}.index_state", unit("c4a.indexer_compressor_state"), (4, 512), "float32"
            )
        for name, field in kept.items():
            fields[f"{chain}.{name}"].append(field)
    return [
        history("c128a.compressed_kv", 2, *fields["c128a.compressed_kv"], stride=128),
        history("c128a.compressor_state", 8, *fields["c128a.compressor_state"], window=128),
        history("c4a.compressed_kv", 64, *fields["c4a.compressed_kv"], stride=4),
        history("c4a.compressor_state", 4, *fields["c4a.compressor_state"], window=8),
        history("c4a.indexer_compressor_state", 4, *fields["c4a.indexer_compressor_state"], window=8),
        history("c4a.indexer_kv", 64, *fields["c4a.indexer_kv"], stride=4),
        history("swa_kv", 64, *fields["swa_kv"], window=128),
    ]


def packed(ratios: Sequence[int], packing: Sequence[int], max_padding_fraction: float = 2.0) -> CacheLayout:
    """With the family's packing, which is pinned: powers of two, a policy of its recipe and not of `pack`."""
    return pack(deepseek_v4(ratios), 256, dict(zip(GROUPS, packing, strict=True)), 256, max_padding_fraction)


TOY = packed([1, 4, 128], [64, 2, 2, 2, 8, 8, 1])


def test_t9_toy_planes_and_parent() -> None:
    assert dict(TOY.plane_bytes) == {"unit.0": 110_592, "unit.1": 39_168, "unit.2": 39_168}
    assert TOY.lcm_block_bytes == 188_928


@pytest.mark.parametrize(
    ("group_id", "raw", "share", "padding"),
    [
        ("c128a.compressed_kv", 1728, 2952, 0.7083),
        ("c128a.compressor_state", 32_768, 94_464, 1.8828),
        ("c4a.compressed_kv", 37_440, 94_464, 1.5231),
        ("c4a.compressor_state", 32_768, 94_464, 1.8828),
        ("c4a.indexer_compressor_state", 8192, 23_616, 1.8828),
        ("c4a.indexer_kv", 8448, 23_616, 1.7955),
        ("swa_kv", 112_320, 188_928, 0.6821),
    ],
)
def test_t9_toy_share_and_padding_of_every_group(group_id: str, raw: int, share: int, padding: float) -> None:
    assert TOY.block_bytes(group_id) == raw
    assert TOY.lcm_block_bytes // TOY.packing[group_id] == share
    assert paddings(TOY)[group_id] == pytest.approx(padding, abs=5e-5)


def test_t9_toy_strides_of_the_shared_plane() -> None:
    shared = [(field.group_id, field.page_stride_bytes) for field in TOY.fields if field.plane_id == "unit.0"]
    assert shared == list(zip(GROUPS, [1728, 55_296, 55_296, 55_296, 13_824, 13_824, 110_592], strict=True))
    # Where a layer's window rows are alone, their pages are still a whole number of 576-byte units apart.
    assert {f.page_stride_bytes for f in TOY.fields if f.plane_id != "unit.0"} == {39_168}


def test_t9_toy_wastes_what_only_the_limit_of_the_family_allows() -> None:
    packing = [64, 2, 2, 2, 8, 8, 1]
    assert packed([1, 4, 128], packing, 1.8828125) == TOY
    with pytest.raises(ValueError, match="compressor_state' would waste 61696 bytes beside 32768"):
        packed([1, 4, 128], packing, 1.88)


def test_t9_schedule_of_44_layers() -> None:
    layout = packed([1, 1, *[4, 128] * 20, 4, 1], [32, 2, 2, 2, 8, 8, 1])
    assert (layout.lcm_block_bytes, len(layout.plane_bytes)) == (2_820_096, 44)
    # All seven groups reach into twenty planes, the ratio-4 ones into one more; the window rows have the rest.
    sizes = dict(layout.plane_bytes)
    assert [sizes[f"unit.{i}"] for i in range(44)] == [92_160] * 20 + [76_032] + [39_168] * 23
