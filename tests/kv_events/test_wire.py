"""The bytes that subscribers of vLLM's events read."""

from typing import Any

import msgspec
import pytest

from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.kv_events.wire import AnnouncedGroup, BatchEncoder
from tokenspeed_jax.recipes.spec import CacheGroupSpec

from .msgpack_reader import read
from .samples import FULL_GROUP, announcing, batch_of, run

GROUP = AnnouncedGroup(1, "full_attention")
STATE_GROUP = CacheGroupSpec("states", "state", "full_history", False, checkpoint_granularity=2)
WINDOW_GROUP = CacheGroupSpec(
    "window", "history", "sliding_window", False, rows_per_page=2, entry_stride_tokens=1, sliding_window_tokens=32
)


def page_hash(tokens: list[int], parent: int | None = None) -> int:
    """The scheduler's name of a page: FNV-1a of parent and tokens (docs/scheduler.md)."""
    data = bytes([parent is not None]) + (b"" if parent is None else parent.to_bytes(8, "little"))
    data += len(tokens).to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in tokens)
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def test_a_prompt_is_one_event_with_the_names_of_vllm() -> None:
    first = page_hash([1, 2])
    payload = BatchEncoder(GROUP, "map").encode(batch_of([1, 2, 3, 4, 5]))
    assert read(payload) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [first, page_hash([3, 4], first)],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 1,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        0,
    ]


@pytest.mark.parametrize("as_arrays", [False, True])
def test_subscribers_that_declare_the_types_of_the_fields_can_read_them(as_arrays: bool) -> None:
    class Stored(msgspec.Struct, tag="BlockStored", array_like=as_arrays):
        block_hashes: list[int | bytes]
        parent_block_hash: int | bytes | None
        token_ids: list[int]
        block_size: int
        lora_id: int | None
        medium: str | None
        lora_name: str | None
        extra_keys: list[tuple[Any, ...] | None] | None = None
        group_idx: int | None = None
        kv_cache_spec_kind: str | None = None
        kv_cache_spec_sliding_window: int | None = None

    class Removed(msgspec.Struct, tag="BlockRemoved", array_like=as_arrays):
        block_hashes: list[int | bytes]
        medium: str | None
        group_idx: int | None = None

    class Cleared(msgspec.Struct, tag="AllBlocksCleared", array_like=as_arrays):
        pass

    class Batch(msgspec.Struct, array_like=True):
        ts: float
        events: list[Stored | Removed | Cleared]
        data_parallel_rank: int | None = None

    s = announcing(usable=3)
    run(s, "a", [1, 2, 3])
    s.scheduler.drain_kv_events()
    run(s, "b", [4, 5, 6, 7, 8], "tenant")
    events = s.scheduler.drain_kv_events()
    payload = BatchEncoder(GROUP, "array" if as_arrays else "map").encode(EventBatch(3.5, True, events))
    batch = msgspec.msgpack.decode(payload, type=Batch)
    cleared, removed, stored = batch.events
    assert (batch.ts, batch.data_parallel_rank, type(cleared)) == (3.5, 0, Cleared)
    assert removed == Removed([page_hash([1, 2])], "GPU", 1)
    assert isinstance(stored, Stored)
    assert (stored.token_ids, stored.extra_keys) == ([4, 5, 6, 7], [("tenant",), None])
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (1, "full_attention")


def test_the_older_encoding_has_the_same_values_in_vllms_order() -> None:
    first = page_hash([1, 2])
    payload = BatchEncoder(GROUP, "array").encode(batch_of([1, 2, 3]))
    stored = ["BlockStored", [first], None, [1, 2], 2, None, "GPU", None, None, 1, "full_attention"]
    assert read(payload) == [1.5, [stored], 0]
    assert read(BatchEncoder(GROUP, "array").encode(EventBatch(2.0, True, []))) == [2.0, [["AllBlocksCleared"]], 0]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_removals_come_first_and_in_one_event(encoding: str) -> None:
    s = announcing(usable=3)
    run(s, "a", [1, 2, 3, 4, 5])
    s.scheduler.drain_kv_events()
    run(s, "b", [6, 7, 8, 9, 10])
    batch = EventBatch(0.0, cleared=True, events=s.scheduler.drain_kv_events())
    first = page_hash([1, 2])
    gone = [page_hash([3, 4], first), first]
    _, events, _ = read(BatchEncoder(GROUP, encoding).encode(batch))  # type: ignore[arg-type]
    cleared, removed, stored = events
    if encoding == "map":
        assert cleared == {"type": "AllBlocksCleared"}
        assert removed == {"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 1}
        assert stored["token_ids"] == [6, 7, 8, 9]
    else:
        assert (cleared, removed) == (["AllBlocksCleared"], ["BlockRemoved", gone, "GPU", 1])
        assert stored[3] == [6, 7, 8, 9]


def test_a_salt_is_an_extra_key_of_the_first_page() -> None:
    _, (event,), _ = read(BatchEncoder(GROUP, "map").encode(batch_of([1, 2, 3, 4, 5], "tenant")))
    assert event["extra_keys"] == [["tenant"], None]
    assert (event["parent_block_hash"], event["token_ids"]) == (None, [1, 2, 3, 4])
    assert event["block_hashes"][0] != page_hash([1, 2])


def test_a_branch_is_an_event_of_its_own_behind_what_it_branches_from() -> None:
    s = announcing(usable=24)
    for name, prompt in (("a", [1, 2, 3, 4, 5, 6, 7]), ("b", [1, 2, 8, 9, 10]), ("c", [11, 12, 13])):
        run(s, name, prompt)
    _, events, _ = read(BatchEncoder(GROUP, "map").encode(EventBatch(0.0, False, s.scheduler.drain_kv_events())))
    told = [(event["parent_block_hash"], event["token_ids"]) for event in events]
    trunk, branch = (None, [1, 2, 3, 4, 5, 6]), (page_hash([1, 2]), [8, 9])
    assert len(told) == 3
    assert (None, [11, 12]) in told
    assert told.index(trunk) < told.index(branch)


@pytest.mark.parametrize(
    ("groups", "announced"),
    [
        ((FULL_GROUP,), AnnouncedGroup(0, "full_attention")),
        ((WINDOW_GROUP, STATE_GROUP, FULL_GROUP), AnnouncedGroup(2, "full_attention")),
        ((STATE_GROUP,), AnnouncedGroup(0, "mamba")),
        ((WINDOW_GROUP,), AnnouncedGroup(0, "sliding_window", 32)),
    ],
)
def test_full_attention_is_announced_where_a_model_has_it(
    groups: tuple[CacheGroupSpec, ...], announced: AnnouncedGroup
) -> None:
    assert AnnouncedGroup.of(groups) == announced


def test_a_window_is_told_in_both_encodings() -> None:
    group = AnnouncedGroup(0, "sliding_window", 32)
    _, (event,), _ = read(BatchEncoder(group, "map").encode(batch_of([1, 2, 3])))
    assert (event["kv_cache_spec_kind"], event["kv_cache_spec_sliding_window"]) == ("sliding_window", 32)
    _, (event,), _ = read(BatchEncoder(group, "array").encode(batch_of([1, 2, 3])))
    assert event[8:] == [None, 0, "sliding_window", 32]
