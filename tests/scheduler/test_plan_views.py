"""The arrays of a plan: equal to the lists, read-only, without a copy, and alive as long as anybody looks at them."""

import gc

import numpy as np
import pytest

from tokenspeed_jax.scheduler import ExecutionEvent, ExecutionPlan, Scheduler

from .scenario import FULL, Scenario, extend_result, make_config, spec, swa

COLUMNS = [
    "request_pool_indices",
    "input_lengths",
    "prefill_lengths",
    "input_ids",
    "shifted_input_ids",
    "extend_prefix_lens",
    "extend_replay_lens",
    "decode_input_ids",
]


def mixed_step() -> tuple[Scenario, ExecutionPlan]:
    s = Scenario([FULL, swa(4)], 63, enable_mixed_prefill_decode=True)
    s.prefill("a", 12)
    s.plan()
    s.submit("b", 5)
    return s, s.scheduler.next_execution_plan()


def test_arrays_equal_lists_and_cannot_be_written() -> None:
    _, plan = mixed_step()
    (batch,) = plan.forward
    assert batch.num_extends() == 1
    assert len(batch.request_ids) == 2
    for name in COLUMNS:
        array = getattr(batch, f"{name}_array")()
        assert array.dtype == np.int32
        assert array.tolist() == getattr(batch, name)
        assert not array.flags.writeable
    arrays = batch.arrays()
    assert {name: array.tolist() for name, array in arrays.items()} == {name: getattr(batch, name) for name in COLUMNS}
    assert not any(array.flags.writeable for array in arrays.values())
    for group, array in batch.block_tables_arrays().items():
        assert array.dtype == np.int32
        assert array.tolist() == batch.block_tables[group]
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 1
    for group, array in plan.pages_to_zero_arrays().items():
        assert array.tolist() == plan.pages_to_zero[group]


def test_arrays_share_memory_with_the_plan_and_outlive_it() -> None:
    s, plan = mixed_step()
    (batch,) = plan.forward
    tables, again = batch.block_tables_arrays(), batch.block_tables_arrays()
    zeroed = plan.pages_to_zero_arrays()
    inputs = batch.input_ids_array()
    assert all(np.shares_memory(tables[group], again[group]) for group in tables)
    expected = [{group: array.tolist() for group, array in part.items()} for part in (tables, zeroed)]
    fed = inputs.tolist()
    del plan, batch, again
    gc.collect()
    for _ in range(50):
        s.scheduler.next_execution_plan()
    del s
    gc.collect()
    assert [{group: array.tolist() for group, array in part.items()} for part in (tables, zeroed)] == expected
    assert inputs.tolist() == fed


def test_shorter_rows_are_padded_and_holes_stay_null() -> None:
    _, plan = mixed_step()
    tables = plan.forward[0].block_tables
    assert tables["g0"][0][3:] == [-1] * (len(tables["g0"][0]) - 3)
    assert 0 in tables["g1"][1]


def test_plans_without_dense_tables_say_where_the_tables_are() -> None:
    s = Scenario([FULL], 63, dense_block_tables=False)
    s.submit("a", 12)
    plan = s.scheduler.next_execution_plan()
    (batch,) = plan.forward
    for read in (lambda: batch.block_tables, batch.block_tables_arrays):
        with pytest.raises(RuntimeError, match="block_table_views"):
            read()
    (slot,) = batch.request_pool_indices
    view = s.scheduler.block_table_views()["g0"]
    assert view.dtype == np.int32
    assert not view.flags.writeable
    spans, ids = plan.table_changes()["g0"]
    assert spans.tolist() == [[slot, 0, len(ids)]]
    assert view[slot, : len(ids)].tolist() == ids.tolist() == plan.pages_to_zero["g0"]
    assert (view[slot, len(ids) :] == -1).all()
    assert s.scheduler.next_execution_plan().table_changes() == {}


def test_calls_that_overlap_are_refused_rather_than_corrupting() -> None:
    """Plans from one thread while another asks for gauges: each call works or is refused, and the plans stay right."""
    import threading

    scheduler = Scheduler(make_config([FULL], 4096, P=16, max_batch_size=128, budget=4096))
    scheduler.submit_requests([spec(f"r{index}", range(index * 100, index * 100 + 20)) for index in range(100)])
    stop = threading.Event()
    unexpected: list[Exception] = []

    def gauge() -> None:
        while not stop.is_set():
            try:
                scheduler.decoding_size()
                scheduler.available_lcm_blocks()
            except RuntimeError as error:
                if "must not overlap" not in str(error):
                    unexpected.append(error)

    thread = threading.Thread(target=gauge)
    thread.start()

    def patiently(call):
        while True:
            try:
                return call()
            except RuntimeError as error:
                if "must not overlap" not in str(error):
                    raise

    for token in range(100):
        batch = patiently(scheduler.next_execution_plan).forward[0]
        assert len(batch.request_ids) == 100
        landed = ExecutionEvent()
        for request_id in batch.request_ids:
            landed.add_event(extend_result(request_id, [token]))
        patiently(lambda: scheduler.advance(landed))  # noqa: B023
    stop.set()
    thread.join()
    assert unexpected == []
