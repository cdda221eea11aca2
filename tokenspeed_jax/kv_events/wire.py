"""The bytes of a batch: msgpack, as vLLM's subscribers read it.

A batch is `[ts, events, data_parallel_rank]`. An event is a map with its kind under "type", or in the older encoding an
array that begins with its kind; names and their order are vLLM's. What is None and may be left out is.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenspeed_jax.kv_events.config import EventEncoding
from tokenspeed_jax.kv_events.feed import EventBatch
from tokenspeed_jax.recipes.spec import CacheGroupSpec
from tokenspeed_jax.scheduler import KVEvent

_MEDIUM = "GPU"  # where the cache is, as subscribers call an engine's own memory
_RANK = 0


@dataclass(frozen=True)
class AnnouncedGroup:
    """The cache group whose pages are announced, in vLLM's words.

    Attributes:
        index: its place among the model's groups.
        kind: what its layers are.
        window: tokens that a sliding window keeps.
    """

    index: int
    kind: str
    window: int | None = None

    @classmethod
    def of(cls, groups: Sequence[CacheGroupSpec]) -> "AnnouncedGroup":
        """The first group that keeps every row, as the scheduler's events tell of these alone; else the first."""
        for index, group in enumerate(groups):
            if group.family == "history" and group.retention == "full_history":
                return cls(index, "full_attention")
        if groups[0].family == "state":
            return cls(0, "mamba")
        return cls(0, "sliding_window", groups[0].sliding_window_tokens)


class BatchEncoder:
    """Encodes the batches of one engine."""

    def __init__(self, group: AnnouncedGroup, encoding: EventEncoding) -> None:
        self._group = group
        self._as_maps = encoding == "map"
        self._pack = msgspec.msgpack.Encoder()

    def encode(self, batch: EventBatch) -> bytes:
        """The payload of a message."""
        events = []
        if batch.cleared:
            events.append(self._event("AllBlocksCleared", {}, {}))
        removed = [event for event in batch.events if isinstance(event, KVEvent.BlockRemoved)]
        if removed:
            hashes = [hash_ for event in removed for hash_ in event.block_hashes]
            required = {"block_hashes": hashes, "medium": _MEDIUM}
            events.append(self._event("BlockRemoved", required, {"group_idx": self._group.index}))
        stored = (event for event in batch.events if isinstance(event, KVEvent.BlockStored))
        events += [self._stored(run) for run in _runs(stored)]
        return self._pack.encode([batch.time, events, _RANK])

    def _stored(self, run: "_Run") -> Any:
        required = {
            "block_hashes": run.hashes,
            "parent_block_hash": run.parent,
            "token_ids": run.token_ids,
            "block_size": run.block_size,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
        }
        optional = {
            "extra_keys": run.extra_keys if any(run.extra_keys) else None,
            "group_idx": self._group.index,
            "kv_cache_spec_kind": self._group.kind,
            "kv_cache_spec_sliding_window": self._group.window,
        }
        return self._event("BlockStored", required, optional)

    def _event(self, kind: str, required: Mapping[str, Any], optional: Mapping[str, Any]) -> Any:
        if self._as_maps:
            return {"type": kind, **required, **{name: value for name, value in optional.items() if value is not None}}
        rest = list(optional.values())
        while rest and rest[-1] is None:
            rest.pop()
        return [kind, *required.values(), *rest]


@dataclass
class _Run:
    """Pages that follow one another in a prompt; `extra_keys` has the salt of a prompt's first page."""

    parent: int | None
    block_size: int
    hashes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    extra_keys: list[list[str] | None] = field(default_factory=list)


def _runs(events: Iterable[KVEvent.BlockStored]) -> list[_Run]:
    """The pages in runs as long as possible, none ahead of the one it follows. Pages come shallowest first."""
    runs: list[_Run] = []
    ending_in: dict[int, _Run] = {}
    for event in events:
        (page,) = event.block_hashes
        parent = event.parent_block_hash
        run = None if parent is None else ending_in.pop(parent, None)
        if run is None:
            run = _Run(parent, event.block_size)
            runs.append(run)
        run.hashes.append(page)
        run.token_ids += event.token_ids
        run.extra_keys.append([event.cache_salt] if event.cache_salt else None)
        ending_in[page] = run
    return runs
