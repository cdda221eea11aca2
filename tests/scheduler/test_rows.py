"""Results as arrays: `advance_rows` and `finish_rows`, what they refuse, and that they mean what the events mean.

That both interfaces give the same plans is checked by every workload of `test_workload.py`: it drives one scheduler by
events and its twin by rows.
"""

from collections.abc import Sequence

import numpy as np
import pytest

from tokenspeed_jax.scheduler import ForwardEvent

from .scenario import FULL, Scenario, named


def land_rows(s: Scenario, slots: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
    s.scheduler.advance_rows(np.array(slots, np.int32), np.array(counts, np.int32), np.array(tokens, np.int32))


def finish_rows(s: Scenario, *slots: int) -> None:
    s.scheduler.finish_rows(np.array(slots, np.int32))


def three_rows() -> Scenario:
    """a and b have their prompt's first token out (slots 1 and 2), c (slot 3) a chunk of an unfinished prompt."""
    s = Scenario([FULL], 63, budget=16)
    s.submit("a", 4)
    s.submit("b", 4)
    s.submit("c", 20)
    step = s.plan()
    assert (step.ids, step.batch.request_pool_indices, step.inputs) == (["a", "b", "c"], [1, 2, 3], [4, 4, 8])
    return s


def sizes(s: Scenario) -> list[int]:
    return [s.scheduler.request_token_size(request_id) for request_id in "abc"]


def test_one_call_lands_a_step() -> None:
    s = three_rows()
    land_rows(s, [3, 1, 2], [0, 1, 1], [11, 12])
    assert sizes(s) == [5, 5, 20]
    step = s.plan()
    assert (step.ids, step.inputs) == (["c"], [12])
    land_rows(s, [3], [1], [13])
    step = s.plan()
    assert (step.ids, step.batch.decode_input_ids) == (["a", "b", "c"], [-1, -1, -1])
    finish_rows(s, 2, 1, 3)
    assert s.plan().ids == []
    assert s.available == 63


def test_no_rows_are_no_change() -> None:
    s = three_rows()
    land_rows(s, [], [], [])
    finish_rows(s)
    assert sizes(s) == [4, 4, 20]


@pytest.mark.parametrize(
    ("slots", "counts", "tokens", "error", "words"),
    [
        ([1, 2], [1], [7], ValueError, "slots and token_counts must have the same length, got 2 and 1"),
        ([1, 2], [1, 1], [7], ValueError, "token_counts sum up to 2, but there are 1 tokens"),
        ([1, 2], [1, 0], [7, 8], ValueError, "token_counts sum up to 1, but there are 2 tokens"),
        ([1, 2], [2**31 - 1, 2**31 - 1], [7], ValueError, "token_counts sum up to 4294967294"),
        ([1, 2], [2, -1], [7], ValueError, r"entry 1 \(slot 2\): its token count must be >= 0, got -1"),
        ([1, 2, 1], [1, 1, 1], [7, 8, 9], ValueError, r"entry 2 \(slot 1\): the slot occurs twice"),
        ([1, 2], [1, 3], [7, 8, 9, 9], ValueError, r"entry 1 \(slot 2\): request 'b' got 3 tokens, more than"),
        ([1, 3], [1, 1], [7, 8], RuntimeError, r"entry 1 \(slot 3\): request 'c' has an unfinished prompt"),
        ([1, 4], [1, 1], [7, 8], RuntimeError, r"entry 1 \(slot 4\): no request holds this slot"),
        ([1, 0], [1, 1], [7, 8], RuntimeError, r"entry 1 \(slot 0\): no request holds this slot"),
        ([1, -1], [1, 1], [7, 8], RuntimeError, r"entry 1 \(slot -1\): no request holds this slot"),
        ([1, 2**31 - 1], [1, 1], [7, 8], RuntimeError, r"entry 1 \(slot 2147483647\): no request holds this slot"),
    ],
)
def test_a_bad_row_is_named_and_nothing_lands(
    slots: list[int], counts: list[int], tokens: list[int], error: type[Exception], words: str
) -> None:
    s = three_rows()
    with pytest.raises(error, match=words):
        land_rows(s, slots, counts, tokens)
    assert sizes(s) == [4, 4, 20]
    land_rows(s, [1, 2, 3], [1, 1, 0], [7, 8])
    assert sizes(s) == [5, 5, 20]


def test_a_row_lands_once() -> None:
    s = three_rows()
    land_rows(s, [1], [1], [7])
    with pytest.raises(RuntimeError, match=r"entry 0 \(slot 1\): request 'a' has no forward in flight"):
        land_rows(s, [1], [1], [7])
    with pytest.raises(RuntimeError, match="no forward in flight"):
        s.land("a", 7)


@pytest.mark.parametrize(
    ("slots", "error", "words"),
    [
        ([1, 1], ValueError, r"finish_rows entry 1 \(slot 1\): the slot occurs twice"),
        ([1, 3], RuntimeError, r"finish_rows entry 1 \(slot 3\): request 'c' has an unfinished prompt"),
        ([1, 7], RuntimeError, r"finish_rows entry 1 \(slot 7\): no request holds this slot"),
    ],
)
def test_a_bad_finish_is_named_and_nothing_finishes(slots: list[int], error: type[Exception], words: str) -> None:
    s = three_rows()
    land_rows(s, [1, 2], [1, 1], [7, 8])
    with pytest.raises(error, match=words):
        finish_rows(s, *slots)
    assert s.scheduler.prefilling_size() == 3
    finish_rows(s, 1)
    assert s.scheduler.prefilling_size() == 2


@pytest.mark.parametrize("end", ["abort", "finish", "retract"])
def test_a_slot_is_free_as_soon_as_its_request_has_let_go(end: str) -> None:
    s = three_rows()
    if end == "finish":
        finish_rows(s, 1)
    else:
        s.advance(named({"abort": ForwardEvent.Abort, "retract": ForwardEvent.Retract}[end], "a"))
    with pytest.raises(RuntimeError, match="no request holds this slot"):
        land_rows(s, [1], [1], [7])
    with pytest.raises(RuntimeError, match="no request holds this slot"):
        finish_rows(s, 1)


def test_a_stale_row_is_refused_while_the_slots_next_request_has_nothing_out() -> None:
    s = Scenario([FULL], 63, max_batch_size=1)
    s.submit("old", 4)
    s.submit("new", 4)
    assert s.plan().ids == ["old"]
    s.abort("old")
    step = s.plan()
    assert (step.ids, step.batch.request_pool_indices) == (["new"], [1])
    s.land("new", 5)
    with pytest.raises(RuntimeError, match="request 'new' has no forward in flight"):
        land_rows(s, [1], [1], [7])
    assert s.scheduler.request_token_size("new") == 5


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (np.ones(1, np.int64), TypeError),
        (np.ones(1, np.uint32), TypeError),
        (np.ones(1, np.float32), TypeError),
        (np.ones(3, np.int32)[::2], TypeError),
        ([1], TypeError),
        (None, TypeError),
        (np.int32(1), TypeError),
        (np.ones((1, 1), np.int32), ValueError),
        (np.array(1, np.int32), ValueError),
    ],
)
def test_only_contiguous_int32_arrays_of_one_dimension_are_taken(bad: object, error: type[Exception]) -> None:
    s = three_rows()
    good = [np.array([1], np.int32), np.array([1], np.int32), np.array([7], np.int32)]
    for position in range(3):
        arguments: list[object] = [*good]
        arguments[position] = bad
        with pytest.raises(error):
            s.scheduler.advance_rows(*arguments)  # type: ignore[arg-type]
    with pytest.raises(error):
        s.scheduler.finish_rows(bad)  # type: ignore[arg-type]
    assert sizes(s) == [4, 4, 20]
