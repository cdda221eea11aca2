"""The device's copy of the block tables equals the scheduler's, whatever changed and however it came."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.cache import resident_tables
from tokenspeed_jax.cache.resident_tables import TableChanges, apply_changes, empty_tables

from .test_router import router

SLOTS, IDS = 3, {"full": 20, "sliding": 40}
COLUMNS = {group: router().table_columns(group) for group in IDS}
CAPACITIES = {"full": 4, "sliding": 6}
EARLY = 5

apply = jax.jit(apply_changes)


@st.composite
def spans(draw: st.DrawFn, group: str) -> tuple[tuple[int, int], list[int]]:
    """A slot and column, and the new entries from there on."""
    first = draw(st.integers(0, COLUMNS[group] - 1))
    ids = draw(st.lists(st.integers(-1, IDS[group]), min_size=1, max_size=COLUMNS[group] - first))
    return (draw(st.integers(1, SLOTS)), first), ids


changes = st.fixed_dictionaries({group: st.lists(spans(group), max_size=5) for group in IDS})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(changes, st.booleans()), min_size=1, max_size=6))
def test_the_copy_follows_the_scheduler(plans: list) -> None:
    """Plans without rows run no step, so that their changes wait for the next one that does."""
    waiting = TableChanges(router())
    truth = {group: np.zeros((SLOTS + 1, columns), np.int32) for group, columns in COLUMNS.items()}
    copy = empty_tables(router(), SLOTS)
    resident_tables.EARLY_ENTRIES, whole = EARLY, resident_tables.EARLY_ENTRIES
    try:
        for changed, runs in plans:
            told = {}
            for group, parts in changed.items():
                for (slot, first), ids in parts:
                    truth[group][slot, first : first + len(ids)] = ids
                if parts:
                    told[group] = (
                        np.array([(*place, len(ids)) for place, ids in parts], np.int32),
                        np.array([block for _, ids in parts for block in ids], np.int32),
                    )
            waiting.note({**told, "state": (np.zeros((0, 3), np.int32), np.zeros(0, np.int32))})
            if runs:
                copy = take_a_step(waiting, copy)
                for group, expected in truth.items():
                    np.testing.assert_array_equal(copy[group], expected)
    finally:
        resident_tables.EARLY_ENTRIES = whole


def take_a_step(waiting: TableChanges, copy: dict[str, jax.Array]) -> dict[str, jax.Array]:
    own, early = waiting.take(CAPACITIES)
    named: dict[str, list[tuple[int, int]]] = {group: [] for group in IDS}
    for part in [*(dict(zip(IDS, array, strict=True)) for array in early), own]:
        for group, entries in part.items():
            assert entries.shape == (3, EARLY if part is not own else CAPACITIES[group])
            named[group] += [(slot, column) for slot, column in entries[:2].T.tolist() if slot <= SLOTS]
        copy = apply(copy, part)
    assert all(len(places) == len(set(places)) for places in named.values()), "a place is named twice"
    return copy


def test_nothing_waits_after_it_was_taken() -> None:
    waiting = TableChanges(router())
    waiting.note({"full": (np.array([[1, 0, 2]], np.int32), np.array([3, 4], np.int32))})
    assert waiting.take(CAPACITIES)[0]["full"][:, :2].T.tolist() == [[1, 0, 3], [1, 1, 4]]
    own, early = waiting.take(CAPACITIES)
    assert not early
    assert all((entries[0] > SLOTS).all() for entries in own.values())


def test_a_decode_row_that_begins_a_block_and_leaves_one_fits_its_step() -> None:
    waiting = TableChanges(router())
    assert waiting.capacity("full", rows=64, tokens=64) >= 2 * 64
    assert waiting.capacity("full", rows=1, tokens=8192) >= 8192 // 128 + 1
