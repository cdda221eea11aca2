"""An executor's copy of the resident block tables, kept by the changes that plans carry."""

import numpy as np

from tokenspeed_jax.scheduler import ExecutionPlan, Scheduler

PADDING = -1


class TableFollower:
    """Follows one scheduler from its start; every plan must be shown to it, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.copies: dict[str, np.ndarray] = {}

    def follow(self, plan: ExecutionPlan) -> dict[str, list[list[int]]]:
        """Applies the plan's changes; the batch's tables as a plan with dense tables would carry them."""
        views = self.scheduler.block_table_views()
        changes = plan.table_changes()
        for group, view in views.items():
            copy = self.copies.get(group, np.zeros((view.shape[0], 0), np.int32))
            copy = np.pad(copy, ((0, 0), (0, view.shape[1] - copy.shape[1])), constant_values=PADDING)
            spans, ids = changes.get(group, (np.zeros((0, 3), np.int32), np.zeros(0, np.int32)))
            read = 0
            for slot, first, count in spans.tolist():
                copy[slot, first : first + count] = ids[read : read + count]
                read += count
            assert read == len(ids)
            assert np.array_equal(copy, view)
            self.copies[group] = copy
        return self._rows(plan)

    def _rows(self, plan: ExecutionPlan) -> dict[str, list[list[int]]]:
        slots = plan.forward[0].request_pool_indices
        tables = {}
        for group, copy in self.copies.items():
            rows = copy[slots]
            columns = int((rows != PADDING).sum(axis=1).max(initial=0))
            if columns:
                tables[group] = rows[:, :columns].tolist()
        return tables
