"""The contract refuses every pool that the scheduler could not run on."""

import dataclasses

import pytest

from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.recipes.spec import CacheGroupSpec

FULL = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=16, entry_stride_tokens=1)
STATE = CacheGroupSpec("state", "state", "full_history", False, checkpoint_granularity=16)
GOOD = CacheRuntimeContract(16, 10, 320, (FULL, STATE), {"full": 21, "state": 11}, {"full": 2, "state": 1})


def test_mappings_are_read_only_copies() -> None:
    source = {"full": 21, "state": 11}
    contract = dataclasses.replace(GOOD, group_page_counts=source)
    source["full"] = 5
    assert contract.group_page_counts["full"] == 21
    for mapping in (contract.group_page_counts, contract.group_packing, contract.virtual_block_counts):
        with pytest.raises(TypeError):
            mapping["full"] = 1  # pyright: ignore[reportIndexIssue]


def test_t8_shards_multiply_what_the_scheduler_sees() -> None:
    sharded = dataclasses.replace(FULL, shard_count=4)
    contract = CacheRuntimeContract(16, 1000, 16, (sharded,), {"full": 12_001}, {"full": 12})
    assert contract.virtual_block_counts == {"full": 48_001}
    assert contract.virtual_packing == {"full": 48}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prefix_granularity": 0}, "prefix_granularity"),
        ({"num_lcm_blocks": True}, "num_lcm_blocks"),
        ({"token_capacity": 0}, "token_capacity"),
        ({"group_specs": ()}, "non-empty tuple"),
        ({"group_specs": [FULL, STATE]}, "non-empty tuple"),
        ({"group_specs": (FULL, "state")}, "CacheGroupSpec objects"),
        ({"group_specs": (FULL, FULL)}, "unique"),
        ({"group_page_counts": {"full": 21}}, "group_page_counts has the keys"),
        ({"group_packing": {"full": 2, "state": 1, "x": 1}}, "group_packing has the keys"),
        ({"group_page_counts": {"full": 20, "state": 11}}, "make 21 with the null page"),
        ({"group_page_counts": {"full": 22, "state": 11}}, "make 21 with the null page"),
        ({"group_packing": {"full": 0, "state": 1}}, "group_packing of 'full'"),
        ({"prefix_granularity": 24}, "does not divide"),
        ({"token_capacity": 321}, "token_capacity 321 exceeds the 320"),
    ],
)
def test_inconsistent_contract_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GOOD, **changes)


def test_slots_and_virtual_ids_must_fit_int32() -> None:
    parents = 2**31 // 16
    with pytest.raises(ValueError, match="int32 slots"):
        CacheRuntimeContract(16, parents, 16, (FULL,), {"full": parents + 1}, {"full": 1})
    assert CacheRuntimeContract(16, parents - 1, 16, (FULL,), {"full": parents}, {"full": 1})
    sharded = dataclasses.replace(STATE, shard_count=1 << 20)
    with pytest.raises(ValueError, match="virtual blocks"):
        CacheRuntimeContract(16, 4096, 16, (sharded,), {"state": 4097}, {"state": 1})
