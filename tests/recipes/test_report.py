"""The capacity report: what each group could hold, in tokens or requests."""

import math

import pytest

from tokenspeed_jax.recipes.plan import pack
from tokenspeed_jax.recipes.report import capacity_report
from tokenspeed_jax.recipes.spec import CacheFieldSpec, CacheGroupSpec

FULL = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=16, entry_stride_tokens=1)
SLIDING = CacheGroupSpec(
    "sliding", "history", "sliding_window", False, rows_per_page=16, entry_stride_tokens=1, sliding_window_tokens=40
)


def field(name: str, plane: str) -> CacheFieldSpec:
    return CacheFieldSpec(name, plane, (16, 1, 8), "bfloat16")


PLAN = pack(
    [
        (FULL, (field("layer.0.k", "unit.0.k"),)),
        (SLIDING, (field("layer.1.k", "unit.0.k"), field("layer.2.k", "unit.1.k"))),
    ],
    16,
    {"full": 1, "sliding": 1},
    1,
    math.inf,
).bind(10)


def test_full_history_counts_tokens_and_has_no_request_bound() -> None:
    full, _ = capacity_report(PLAN, (FULL, SLIDING), max_num_seqs=2)
    assert (full.unit, full.capacity, full.supported_requests, full.dead_bytes) == ("tokens", 160, None, 0)
    assert (full.block_bytes, full.bytes_per_token, full.cache_blocks_per_lcm_block) == (256, 16.0, 1)
    assert (full.padding_bytes_per_lcm_block, full.binding_utilization) == (256, 0.5)


def test_sliding_group_supports_as_many_requests_as_windows_fit() -> None:
    _, sliding = capacity_report(PLAN, (FULL, SLIDING), max_num_seqs=2)
    assert (sliding.capacity, sliding.supported_requests, sliding.bytes_per_token) == (160, 4, 32.0)
    # Two requests hold 3 blocks each; 4 of the 10 blocks can never be used.
    assert sliding.dead_bytes == 4 * 512
    assert (sliding.padding_bytes_per_lcm_block, sliding.binding_utilization) == (0, 1.0)
    _, unbounded = capacity_report(PLAN, (FULL, SLIDING))
    assert unbounded.dead_bytes is None
    _, many = capacity_report(PLAN, (FULL, SLIDING), max_num_seqs=100)
    assert many.dead_bytes == 0


def test_per_request_groups_count_requests() -> None:
    full, _ = capacity_report(PLAN, (FULL, SLIDING), max_num_seqs=3, per_request_blocks={"full": 3})
    assert (full.unit, full.capacity, full.supported_requests, full.bytes_per_token) == ("requests", 3, 3, None)
    assert full.dead_bytes == 1 * 256


def test_unknown_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="undeclared cache groups: other"):
        capacity_report(PLAN, (FULL,), per_request_blocks={"other": 1})
    with pytest.raises(ValueError, match="per_request_blocks"):
        capacity_report(PLAN, (FULL,), per_request_blocks={"full": 0})
