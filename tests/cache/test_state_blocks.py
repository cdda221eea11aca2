"""State blocks of a step against the worked vectors of the specification and a plain walk token by token."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.cache.contract import CacheRuntimeContract
from tokenspeed_jax.cache.router import CacheGroupRouter
from tokenspeed_jax.cache.state_blocks import checkpoint_tokens, look_up
from tokenspeed_jax.pallas_kernels.chunks import Chunks
from tokenspeed_jax.pallas_kernels.recurrent_problems import ragged_rows
from tokenspeed_jax.recipes.spec import CacheGroupSpec

STATE = CacheGroupSpec("state", "state", "full_history", False, checkpoint_granularity=128)
BASE = 1000


def numbered(rows: int, columns: int) -> np.ndarray:
    """Tables in which slot j of row r holds block BASE * (r + 1) + j."""
    return (BASE * (np.arange(rows)[:, None] + 1) + np.arange(columns)).astype(np.int32)


def blocks_of(
    before: list[int], after: list[int], *, granularity: int = 128, P: int = 128, table: np.ndarray | None = None
) -> np.ndarray:
    first, last = np.array(before, np.int32), np.array(after, np.int32)
    spec = dataclasses.replace(STATE, checkpoint_granularity=granularity)
    if table is None:
        table = numbered(len(before), int(max(after)) // granularity + 1)
    return look_up(spec, table, np.arange(len(before)), first, last, checkpoint_tokens(first, last, P))


@pytest.mark.parametrize(
    ("before", "after", "granularity", "source", "target", "checkpoint"),
    [
        (0, 1, 128, None, 0, None),
        (0, 128, 128, None, 0, None),
        (127, 128, 128, 0, 0, None),
        (128, 129, 128, 0, 1, None),
        (256, 257, 128, 1, 2, None),
        (50432, 51300, 128, 393, 400, 399),
        (50432, 51300, 64, 787, 801, 799),
        (51200, 51300, 128, 399, 400, None),
        (50432, 51200, 128, 393, 399, None),
    ],
)
def test_t12_slots_of_source_target_and_checkpoint(
    before: int, after: int, granularity: int, source: int | None, target: int, checkpoint: int | None
) -> None:
    found = blocks_of([before], [after], granularity=granularity)[:, 0]
    expected = [0 if slot is None else BASE + slot for slot in (source, checkpoint, target)]
    np.testing.assert_array_equal(found, expected)


def router_of(blocks: int) -> CacheGroupRouter:
    """Of one state group with so many blocks."""
    contract = CacheRuntimeContract(128, blocks, 128 * blocks, (STATE,), {"state": blocks + 1}, {"state": 1})
    return CacheGroupRouter(contract, {}, max_context_len=1024, overlap_tokens=0)


def test_t14_checkpoints_are_the_last_boundary_strictly_inside() -> None:
    def of(before: list[int], new: list[int]) -> list[int]:
        start = np.array(before)
        return checkpoint_tokens(start, start + np.array(new), 128).tolist()

    assert of([0, 0], [868, 869]) == [768, 768]
    assert of([128, 0, 300], [130, 50, 84]) == [256, 0, 0]


def test_t14_bodies_end_at_the_checkpoint() -> None:
    router = router_of(5000)
    before, after = np.array([128, 0, 300, 255]), np.array([258, 50, 384, 257])
    slots = np.array([2, 4, 1, 3])
    tables = np.full((5, 4), -1, np.int32)
    tables[slots] = numbered(4, 4)
    blocks, bodies = router.host_state_blocks({"state": tables}, slots, before, after, num_extends=3, padded_rows=6)
    # The last row is a decode row: whatever it crosses, it leaves no checkpoint.
    np.testing.assert_array_equal(bodies, [128, 50, 84, 2, 0, 0])
    np.testing.assert_array_equal(blocks["state"][0], [1000, 0, 3002, 4001, 0, 0])
    np.testing.assert_array_equal(blocks["state"][1], [1001, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(blocks["state"][2], [1002, 2000, 3002, 4002, 0, 0])


def cut(before: list[int], new: list[int], size: int) -> list[tuple[list[int], list[int]]]:
    """The tokens of each row's body and of its tail, as chunked recurrences walk them in a step of `before`, `new`."""
    first = np.array(before)
    table = numbered(len(before), 16)
    _, bodies = router_of(5000).host_state_blocks(
        {"state": table},
        np.arange(len(new)),
        first,
        first + np.array(new),
        num_extends=len(before),
        padded_rows=len(before),
    )
    chunks = Chunks.cut(ragged_rows(new, bodies.tolist()), sum(new), size)
    parts: list[tuple[list[int], list[int]]] = [([], []) for _ in before]
    in_tail = [False] * len(before)
    for i in range(int(chunks.count)):
        row = int(chunks.rows[i])
        parts[row][in_tail[row]].extend(int(token) for token in chunks.tokens[i] if token < sum(new))
        in_tail[row] |= bool(chunks.closes_body[i])
    return parts


def test_t14_both_prompts_are_cut_at_768_and_every_token_is_walked_once() -> None:
    first, second = cut([0, 0], [868, 869], 64)
    assert first == (list(range(768)), list(range(768, 868)))
    assert second == (list(range(868, 1636)), list(range(1636, 1737)))
    # The example of section 17.4: 1536 tokens in the bodies, 100 and 101 in the tails.
    assert (len(first[0] + second[0]), len(first[1]), len(second[1])) == (1536, 100, 101)


@pytest.mark.parametrize("size", [16, 64])
def test_t14_only_the_row_that_crosses_a_boundary_has_a_tail(size: int) -> None:
    # The last row ends on its boundary: its final state is the checkpoint, and nothing is left for a tail.
    parts = cut([128, 0, 300], [130, 50, 84], size)
    assert [len(body) for body, _ in parts] == [128, 50, 84]
    assert [tail for _, tail in parts] == [[128, 129], [], []]


def test_a_step_without_live_rows_names_no_block() -> None:
    router = router_of(8)
    none = np.zeros(0, np.int32)
    blocks, bodies = router.host_state_blocks({}, none, none, none, num_extends=0, padded_rows=3)
    assert not blocks["state"].any()
    assert not bodies.any()
    with pytest.raises(ValueError, match="no block tables for cache group state"):
        router.host_state_blocks({}, np.array([1]), np.array([0]), np.array([1]), num_extends=1, padded_rows=3)
    with pytest.raises(ValueError, match=r"hold ids in \[0, 9\], allowed are -1 to 8"):
        router.host_state_blocks(
            {"state": np.full((2, 1), 9, np.int32)},
            np.array([1]),
            np.array([0]),
            np.array([1]),
            num_extends=1,
            padded_rows=1,
        )


@pytest.mark.parametrize("hole", [0, -1])
@pytest.mark.parametrize("slot", [1, 3])
def test_a_hole_where_a_state_is_read_or_left_is_refused(slot: int, hole: int) -> None:
    table = numbered(2, 4)
    table[1, slot] = hole
    with pytest.raises(ValueError, match="'state': a row has no block for its state"):
        blocks_of([100, 200], [120, 400], table=table)


def test_holes_that_no_state_of_the_step_uses_are_allowed() -> None:
    table = numbered(1, 5)
    table[0, [0, 2, 4]] = [0, -1, -1]
    np.testing.assert_array_equal(blocks_of([200], [500], table=table)[:, 0], [1001, 0, 1003])


@pytest.mark.parametrize("after", [0, 513])
def test_rows_outside_their_table_are_refused(after: int) -> None:
    with pytest.raises(ValueError, match="do not fit the 4 blocks of 'state'"):
        blocks_of([0], [after], table=numbered(1, 4))


def test_one_block_for_two_states_is_refused() -> None:
    for row, slot, block in ((0, 1, 1000), (1, 1, 1001)):
        table = numbered(2, 2)
        table[row, slot] = block
        with pytest.raises(ValueError, match="one block is to hold two states"):
            blocks_of([128, 128], [129, 129], table=table)
    # Rows may read one snapshot together: it is what a shared prefix is.
    table = numbered(2, 2)
    table[:, 0] = 7
    np.testing.assert_array_equal(blocks_of([128, 128], [129, 129], table=table)[0], [7, 7])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_are_those_of_a_walk_token_by_token(data: st.DataObject) -> None:
    granularity = data.draw(st.sampled_from([1, 2, 4, 8]))
    P = granularity * data.draw(st.sampled_from([1, 2, 4]))
    rows = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=4))
    found = blocks_of([b for b, _ in rows], [b + n for b, n in rows], granularity=granularity, P=P)
    for row, (before, new) in enumerate(rows):
        # slot_of[t]: where the state of the first t tokens stands; 0 tokens have none.
        slot_of = {0: None}
        slot = -1
        for token in range(before + new):
            slot += token % granularity == 0
            slot_of[token + 1] = slot
        # Where the step ends on a boundary, its final state is that boundary's snapshot.
        boundary = max(t for t in range(before + new + 1) if t % P == 0)
        checkpoint = slot_of[boundary] if before < boundary < before + new else None
        wanted = (slot_of[before], checkpoint, slot_of[before + new])
        names = [0 if slot is None else BASE * (row + 1) + slot for slot in wanted]
        np.testing.assert_array_equal(found[:, row], names)
