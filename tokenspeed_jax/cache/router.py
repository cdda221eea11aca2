"""`CacheGroupRouter`: the one place where block ids become kernel pages and token positions become slots.

On the host it checks and pads the scheduler's tables to the widths that the compiled step knows. Inside the step it
expands them and gives a layer the slots of the step's tokens; models and the step loop compute neither. Of state
groups it looks up, on the host, the three blocks that a row's state comes from and goes to.
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

    def host_tables(
        self, tables: Mapping[str, np.ndarray], padded_rows: int
    ) -> dict[str, Int32[np.ndarray, "rows columns"]]:
        """The scheduler's tables as the compiled step takes them: `padded_rows` x `table_columns`, 0 where nothing is.

        Args:
            tables: `Forward.Batch.block_tables_arrays()`; all rows are live. Other groups are ignored.

        Raises:
            ValueError: a routed group is missing, tables differ in rows, or a table is not int32[rows, columns]
                within the padded shape, or holds an id that the group does not have. Device code cannot raise, so
                nothing of that kind may pass here.
        """
        missing = [group_id for group_id in self.group_ids if group_id not in tables]
        # An idle step has no rows and needs no tables.
        if missing and any(len(table) for table in tables.values()):
            raise ValueError(f"the batch has no block table for cache groups {', '.join(missing)}")
        row_counts = {group_id: len(tables[group_id]) for group_id in self.group_ids if group_id in tables}
        if len(set(row_counts.values())) > 1:
            raise ValueError(f"block tables differ in rows: {row_counts}")
        padded = {}
        for group_id in self.group_ids:
            out = np.zeros((padded_rows, self._columns[group_id]), np.int32)
            if group_id in tables:
                self._check_table(group_id, tables[group_id], out.shape)
                rows, columns = tables[group_id].shape
                np.maximum(tables[group_id], 0, out=out[:rows, :columns])
            padded[group_id] = out
        return padded

    def host_state_blocks(
        self,
        tables: Mapping[str, np.ndarray],
        before: Int[np.ndarray, " rows"],
        after: Int[np.ndarray, " rows"],
        num_extends: int,
        padded_rows: int,
    ) -> tuple[dict[str, Int32[np.ndarray, "3 rows"]], Int32[np.ndarray, " rows"]]:
        """Blocks of every state group, and how many tokens of each row come before its checkpoint.

        Args:
            tables: as for `host_tables`.
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
                raise ValueError(f"the batch has no block table for cache group {spec.group_id}")
            table = tables[spec.group_id]
            self._check_ids(spec.group_id, table)
            blocks[spec.group_id][:, : len(after)] = look_up(spec, table, before, after, checkpoint)
        return blocks, bodies

    def _check_table(self, group_id: str, table: np.ndarray, limit: tuple[int, int]) -> None:
        self._check_ids(group_id, table)
        if table.shape[0] > limit[0] or table.shape[1] > limit[1]:
            where = f"block table of cache group {group_id!r}"
            raise ValueError(f"{where} has shape {table.shape}, the step takes at most {limit}")

    def _check_ids(self, group_id: str, table: np.ndarray) -> None:
        where = f"block table of cache group {group_id!r}"
        if table.ndim != 2 or table.dtype != np.int32:
            raise ValueError(f"{where} must be int32 with 2 axes, got {table.dtype} with {table.ndim}")
        count = self._block_ids[group_id]
        if table.size and (int(table.min()) < -1 or int(table.max()) >= count):
            raise ValueError(f"{where} holds ids in [{table.min()}, {table.max()}], allowed are -1 to {count - 1}")

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
            tables: as `host_tables` gives them (0 and -1 are both taken as holes).
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
