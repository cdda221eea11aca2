"""The device's copy of the block tables of all resident requests, kept by what each plan changes.

The scheduler writes the tables of all requests in place, one row per request slot, and tells with every plan which
entries changed. A step scatters those into its own, donated copy and takes the rows of its batch from there: what is
uploaded for a decode step is what changed, and not what its rows hold.

Invariant: once a step has applied what `TableChanges.take` gave for it, its copy holds, for every slot and routed
group, the scheduler's table, with 0 or -1 for holes and for what lies behind a row's end. Row 0 belongs to no request
and stays empty; padding rows read it.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Int32

from tokenspeed_jax.cache.router import CacheGroupRouter

EARLY_ENTRIES = 4096
"""Entries per group that one call of the update program takes, where a step has no room for all changes."""

_NOWHERE = np.iinfo(np.int32).max
"""Slot of an entry that stands for none; a scatter drops it."""

_NONE = np.zeros((3, 0), np.int32)

Tables = dict[str, jax.Array]
"""History group -> int32[slots + 1, columns]."""


def empty_tables(router: CacheGroupRouter, num_slots: int) -> Tables:
    """The copy before the first plan, on the device."""
    return {group: jnp.zeros((num_slots + 1, router.table_columns(group)), jnp.int32) for group in router.group_ids}


def apply_changes(tables: Tables, changes: Mapping[str, Int[Array, "3 entries"]]) -> Tables:
    """The copy after changes as `TableChanges` gives them; inside a compiled step."""
    after = dict(tables)
    for group, (slots, columns, blocks) in changes.items():
        after[group] = tables[group].at[slots, columns].set(blocks, mode="drop")
    return after


class TableChanges:
    """What the device's copy does not have yet. Owned by the step loop; not thread-safe."""

    def __init__(self, router: CacheGroupRouter) -> None:
        self._router = router
        self._waiting: dict[str, list[Int32[np.ndarray, "3 entries"]]] = {group: [] for group in router.group_ids}

    def capacity(self, group_id: str, rows: int, tokens: int) -> int:
        """Entries of a group that a step of a bucket has room for.

        Each row begins a block and leaves one behind a window, beside the blocks that a prompt's tokens fill. A prefix
        hit or the end of a long request changes more.
        """
        return 2 * rows + -(-tokens // self._router.block_granularity(group_id)) + 16

    def note(self, changes: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Adds what a plan changed (`ExecutionPlan.table_changes`), whether the plan has rows or not.

        Raises:
            ValueError: an entry that the group's tables cannot hold.
        """
        for group, waiting in self._waiting.items():
            if group in changes:
                waiting.append(self._router.changed_entries(group, *changes[group]))

    def take(
        self, capacities: Mapping[str, int]
    ) -> tuple[dict[str, Int32[np.ndarray, "3 entries"]], list[Int32[np.ndarray, "groups 3 entries"]]]:
        """All that waits: for the step itself, padded to its capacities, and what has to be applied before it.

        Each place is named once in all of it, with its newest block.
        """
        entries = {group: _newest(waiting) for group, waiting in self._waiting.items()}
        for waiting in self._waiting.values():
            waiting.clear()
        own = {group: _padded(entries[group][:, :count], count) for group, count in capacities.items()}
        left = {group: entries[group][:, count:] for group, count in capacities.items()}
        early = []
        for begin in range(0, max((rest.shape[1] for rest in left.values()), default=0), EARLY_ENTRIES):
            parts = [left[group][:, begin : begin + EARLY_ENTRIES] for group in self._router.group_ids]
            early.append(np.stack([_padded(part, EARLY_ENTRIES) for part in parts]))
        return own, early


def _newest(waiting: Sequence[Int32[np.ndarray, "3 entries"]]) -> Int32[np.ndarray, "3 entries"]:
    if not waiting:
        return _NONE
    entries = np.concatenate(waiting, axis=1)[:, ::-1]
    places = entries[0].astype(np.int64) << 32 | entries[1]
    return entries[:, np.unique(places, return_index=True)[1]]


def _padded(entries: Int32[np.ndarray, "3 entries"], count: int) -> Int32[np.ndarray, "3 count"]:
    out = np.zeros((3, count), np.int32)
    out[0] = _NOWHERE
    out[:, : entries.shape[1]] = entries
    return out
