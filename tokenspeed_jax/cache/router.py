"""`CacheGroupRouter`: the one place where block ids become kernel pages and token positions become slots.

On the host it checks what the scheduler changed in its tables. Inside the step it expands them and gives a layer the
slots of the step's tokens; models and the step loop compute neither. Of state groups it looks up, on the host, the
three blocks that a row's state comes from and goes to.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Array, Int, Int32

from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.cache.state_blocks import checkpoint_tokens, look_up
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.table_expansion import TableGeometry, expand_tables
from tokenspeed_jax.recipes.spec import require_positive_int


class CacheGroupRouter:
    """Routes the groups of a contract: history groups by pages and slots, state groups by blocks.

    Args:
        kernel_page_sizes: tokens of one kernel page, for every history group and no other.
        max_context_len: longest prompt plus output, tokens.
        overlap_tokens: tokens past it that a table may cover (`SchedulerLimits.overlap_tokens`).

    Raises:
        ValueError: a group has no kernel page size, or it does not divide the group's block granularity.
    """

    def __init__(
        self,
        contract: CacheRuntimeContract,
        kernel_page_sizes: Mapping[str, int],
        max_context_len: int,
        overlap_tokens: int,
    ) -> None:
        require_positive_int("max_context_len", max_context_len)
        if overlap_tokens < 0:
            raise ValueError(f"overlap_tokens must be at least 0, got {overlap_tokens}")
        history = [spec for spec in contract.group_specs if spec.family == "history"]
        self.group_ids: tuple[str, ...] = tuple(spec.group_id for spec in history)
        """History groups, in contract order."""
        self._states = tuple(spec for spec in contract.group_specs if spec.family == "state")
        self._prefix_granularity = contract.prefix_granularity
        if set(kernel_page_sizes) != set(self.group_ids):
            raise ValueError(
                f"kernel page sizes are given for {sorted(kernel_page_sizes)}, the history groups are "
                f"{sorted(self.group_ids)}"
            )
        self._page_size: dict[str, int] = {}
        self._pages_per_block: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._block_ids = dict(contract.virtual_block_counts)
        for spec in history:
            page_size = require_positive_int(f"kernel page size of {spec.group_id!r}", kernel_page_sizes[spec.group_id])
            granularity = spec.block_granularity
            if granularity % page_size:
                raise ValueError(
                    f"kernel page size {page_size} does not divide block_granularity {granularity} of cache group "
                    f"{spec.group_id!r}"
                )
            self._page_size[spec.group_id] = page_size
            self._pages_per_block[spec.group_id] = granularity // page_size
            self._columns[spec.group_id] = -(-(max_context_len + overlap_tokens) // granularity)

    @property
    def state_group_ids(self) -> tuple[str, ...]:
        """State groups, in contract order."""
        return tuple(spec.group_id for spec in self._states)

    def kernel_page_size(self, group_id: str) -> int:
        """Tokens of one kernel page of the group."""
        return self._page_size[group_id]

    def table_columns(self, group_id: str) -> int:
        """Columns of the group's block table, for the engine's life. Column i covers tokens [i*g, (i+1)*g) always."""
        return self._columns[group_id]

    def block_granularity(self, group_id: str) -> int:
        """Tokens of one block of the group."""
        return self._pages_per_block[group_id] * self._page_size[group_id]

    def changed_entries(
        self, group_id: str, spans: Int32[np.ndarray, "spans 3"], ids: Int32[np.ndarray, " entries"]
    ) -> Int32[np.ndarray, "3 entries"]:
        """Slot, column and block of each entry of a group's tables that a plan changed, in the plan's order.

        Args:
            spans, ids: as `ExecutionPlan.table_changes` gives them.

        Raises:
            ValueError: a column or a block id that the group does not have. Device code cannot raise, so nothing of
                that kind may pass here.
        """
        self._check_ids(group_id, ids)
        slots, firsts, counts = spans.T
        columns = np.arange(len(ids)) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
        if columns.size and int(columns.max()) >= self._columns[group_id]:
            raise ValueError(
                f"block tables of cache group {group_id!r} reach column {columns.max()}, the step takes "
                f"{self._columns[group_id]} columns"
            )
        return np.stack([np.repeat(slots, counts), columns, ids]).astype(np.int32)

    def host_state_blocks(
        self,
        tables: Mapping[str, np.ndarray],
        slots: Int[np.ndarray, " rows"],
        before: Int[np.ndarray, " rows"],
        after: Int[np.ndarray, " rows"],
        num_extends: int,
        padded_rows: int,
    ) -> tuple[dict[str, Int32[np.ndarray, "3 rows"]], Int32[np.ndarray, " rows"]]:
        """Blocks of every state group, and how many tokens of each row come before its checkpoint.

        Args:
            tables: `Scheduler.block_table_views()`, a row per request slot. Other groups are ignored.
            slots: request slot of each live row.
            before, after: tokens of each live row before and after the step.
            num_extends: rows that may have a checkpoint, the first ones; decode rows have none.
            padded_rows: rows of the result; those beyond the live ones name no block and have length 0.

        Returns:
            (group id -> source, checkpoint and target blocks, body length of each row: its length if it has no
            checkpoint).

        Raises:
            ValueError: a group is missing, or its table has no block where a state is read or stored.
        """
        checkpoint = checkpoint_tokens(before, after, self._prefix_granularity)
        checkpoint[num_extends:] = 0
        bodies = np.zeros(padded_rows, np.int32)
        bodies[: len(after)] = np.where(checkpoint > 0, checkpoint, after) - before
        blocks = {}
        for spec in self._states:
            blocks[spec.group_id] = np.zeros((3, padded_rows), np.int32)
            if not len(after):
                continue
            if spec.group_id not in tables:
                raise ValueError(f"the scheduler has no block tables for cache group {spec.group_id}")
            found = look_up(spec, tables[spec.group_id], slots, before, after, checkpoint)
            self._check_ids(spec.group_id, found)
            blocks[spec.group_id][:, : len(after)] = found
        return blocks, bodies

    def _check_ids(self, group_id: str, ids: np.ndarray) -> None:
        count = self._block_ids[group_id]
        if ids.dtype != np.int32:
            raise ValueError(f"block tables of cache group {group_id!r} must be int32, got {ids.dtype}")
        if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= count):
            raise ValueError(
                f"block tables of cache group {group_id!r} hold ids in [{ids.min()}, {ids.max()}], allowed are -1 to "
                f"{count - 1}"
            )

    def route(
        self,
        tables: Mapping[str, Int[Array, "rows columns"]],
        rows: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        *,
        implementation: Implementation | None = None,
    ) -> "RoutedStep":
        """Kernel page tables and write slots of every history group, all by one launch; inside the step.

        Args:
            tables: block table of each row, 0 and -1 for holes and behind a row's end.
            rows, positions: table row of each of the step's tokens and its position in its sequence, as
                `write_locations.decode_window` and `.extend_span` give them; padding tokens have row -1, or a row
                whose table is empty.
            implementation: None takes the fastest that serves the call.
        """
        missing = [group_id for group_id in self.group_ids if group_id not in tables]
        if missing:
            raise ValueError(f"the step has no block table for cache groups {', '.join(missing)}")
        if not self.group_ids:
            return RoutedStep({}, {})
        geometries = [TableGeometry(self._pages_per_block[name], self._page_size[name]) for name in self.group_ids]
        expanded = expand_tables(
            [tables[group_id] for group_id in self.group_ids],
            geometries,
            rows,
            positions,
            implementation=implementation,
        )
        return RoutedStep(
            dict(zip(self.group_ids, expanded.page_tables, strict=True)),
            dict(zip(self.group_ids, expanded.slots, strict=True)),
        )


@dataclass(frozen=True)
class RoutedStep:
    """What the history groups of one step's tables became.

    Attributes:
        page_tables: kernel page ids of each row, per group. Page 0 is a hole or padding.
    """

    page_tables: Mapping[str, Int[Array, "rows pages"]]
    _slots: Mapping[str, Int[Array, " tokens"]]

    def write_locations(self, layer: LayerBinding) -> Int[Array, " tokens"]:
        """Slot of each of the step's tokens in the layer's group; 0 where nothing may be written.

        The only accessor of slots.
        """
        return self._slots[layer.group_id]
