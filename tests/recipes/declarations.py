"""Groups and fields as tests declare them, in one line each, and what a layout wastes on them."""

from tokenspeed_jax.recipes.plan import CacheLayout
from tokenspeed_jax.recipes.spec import CacheFieldSpec, CacheGroupSpec, Group


def history(group_id: str, rows: int, *fields: CacheFieldSpec, window: int | None = None, stride: int = 1) -> Group:
    """`stride` tokens share a row."""
    retention = "full_history" if window is None else "sliding_window"
    spec = CacheGroupSpec(
        group_id,
        "history",
        retention,
        False,
        rows_per_page=rows,
        entry_stride_tokens=stride,
        sliding_window_tokens=window,
    )
    return spec, fields


def state(group_id: str, granularity: int, *fields: CacheFieldSpec) -> Group:
    return CacheGroupSpec(group_id, "state", "full_history", False, checkpoint_granularity=granularity), fields


def exact(field_id: str, plane: str, shape: tuple[int, ...], dtype: str = "uint8") -> CacheFieldSpec:
    return CacheFieldSpec(field_id, plane, shape, dtype)


def flexible(field_id: str, plane: str, shape: tuple[int, ...], dtype: str = "uint8", align: int = 1) -> CacheFieldSpec:
    return CacheFieldSpec(field_id, plane, shape, dtype, False, align)


def paddings(layout: CacheLayout) -> dict[str, float]:
    """Bytes that a block of each group wastes, as a fraction of its payload."""
    return {
        group_id: layout.lcm_block_bytes / packing / layout.block_bytes(group_id) - 1
        for group_id, packing in layout.group_packing
    }
