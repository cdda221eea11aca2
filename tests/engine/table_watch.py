"""Compares the device's block tables with the scheduler's while an engine works."""

import numpy as np

from tokenspeed_jax import Engine
from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.step import DeviceOutputs


def watch_tables(engine: Engine, every: int = 4) -> list[int]:
    """After each step, how many update calls came before it; every few steps all tables are compared."""
    programs, scheduler = engine._assembly.programs, engine._assembly.loop._scheduler
    run, early_calls = programs.run, []

    def watched(built: BuiltBatch) -> DeviceOutputs:
        outputs = run(built)
        if len(early_calls) % every == 0:
            views = scheduler.block_table_views()
            for group, table in programs.device_state.tables.items():
                assert_equal_tables(np.asarray(table), views[group])
        early_calls.append(len(built.early_changes))
        return outputs

    programs.run = watched  # type: ignore[method-assign]
    return early_calls


def assert_equal_tables(copy: np.ndarray, view: np.ndarray) -> None:
    """Equal but for how wide they are, and how they write that nothing is there."""
    columns = min(copy.shape[1], view.shape[1])
    np.testing.assert_array_equal(np.maximum(copy[:, :columns], 0), np.maximum(view[:, :columns], 0))
    assert (copy[:, columns:] <= 0).all()
    assert (view[:, columns:] <= 0).all()
