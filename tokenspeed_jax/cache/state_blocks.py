"""State blocks of a step: where each row's state comes from, and where it goes (cache-runtime.md 16.2, 17.1).

Host side: a step needs three blocks of a row per state group, so these are looked up in the scheduler's tables and
uploaded instead of the tables themselves.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Int, Int32

from tokenspeed_jax.recipes.spec import CacheGroupSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StateBlocks:
    """Blocks of one state group, one per row of the step; 0 means none.

    Attributes:
        source: state before the step; 0 for a row without history, whose state is zeros.
        checkpoint: state at the row's last boundary of P tokens, where that lies strictly inside the step.
        target: state after the step; the source itself while the row stays within one block.
    """

    source: Int[Array, " rows"]
    checkpoint: Int[Array, " rows"]
    target: Int[Array, " rows"]


def checkpoint_tokens(
    before: Int[np.ndarray, " rows"], after: Int[np.ndarray, " rows"], prefix_granularity: int
) -> Int[np.ndarray, " rows"]:
    """The last multiple of P up to `after`, where it lies strictly between `before` and `after`; 0 elsewhere."""
    boundary = after // prefix_granularity * prefix_granularity
    return np.where((before < boundary) & (boundary < after), boundary, 0)


def look_up(
    spec: CacheGroupSpec,
    table: Int32[np.ndarray, "slots columns"],
    slots: Int[np.ndarray, " rows"],
    before: Int[np.ndarray, " rows"],
    after: Int[np.ndarray, " rows"],
    checkpoint: Int[np.ndarray, " rows"],
) -> Int32[np.ndarray, "3 rows"]:
    """Source, checkpoint and target block of each row.

    Args:
        table: the group's block table of each request slot.
        slots: request slot of each row.
        before, after: tokens of each row before and after the step.
        checkpoint: tokens at each row's checkpoint, 0 for none.

    Raises:
        ValueError: a row outside its table, no block for the state before or after the step, or one block that two
            rows, or two boundaries of a row, are to write. A hole at the checkpoint is no error: nothing is kept then.
    """
    span = spec.block_granularity
    if after.size and (int(after.min()) < 1 or int((after.max() - 1) // span) >= table.shape[1]):
        raise ValueError(f"rows of {after} tokens do not fit the {table.shape[1]} blocks of {spec.group_id!r}")
    source_slot, target_slot = np.maximum((before - 1) // span, 0), (after - 1) // span
    source = np.where(before > 0, table[slots, source_slot], 0)
    target = table[slots, target_slot]
    stored = np.where(checkpoint > 0, table[slots, np.maximum(checkpoint - 1, 0) // span], 0)
    where = f"cache group {spec.group_id!r}"
    if (source[before > 0] <= 0).any() or (target <= 0).any():
        raise ValueError(f"{where}: a row has no block for its state before or after {after} tokens")
    moved = source_slot != target_slot
    if (source[moved] == target[moved]).any() or len(set(target.tolist())) < len(target):
        raise ValueError(f"{where}: one block is to hold two states: sources {source}, targets {target}")
    return np.stack([source, np.maximum(stored, 0), target]).astype(np.int32)
