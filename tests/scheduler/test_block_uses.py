"""What each parent is taken for: empty, held by requests, or only cached."""

import numpy as np

from .scenario import FULL, Scenario, swa


def test_a_parent_goes_from_empty_to_held_to_cached_and_back() -> None:
    s = Scenario([FULL, swa(4)], 8)
    assert s.scheduler.lcm_block_uses().tolist() == [0] * 8
    s.prefill("a", 4)
    assert s.scheduler.lcm_block_uses().tolist() == [1, 1, 1, 2, 2, 2, 0, 0]
    s.finish("a")
    s.plan()
    assert s.scheduler.lcm_block_uses().tolist() == [-1, -1, 0, -2, -2, 0, 0, 0]
    assert s.scheduler.clear_cache()
    assert s.scheduler.lcm_block_uses().tolist() == [0] * 8


def test_what_was_handed_out_does_not_change_with_the_pool() -> None:
    s = Scenario([FULL], 8)
    before = s.scheduler.lcm_block_uses()
    assert (before.dtype, before.flags.owndata) == (np.int32, True)
    s.prefill("a", 4)
    assert before.tolist() == [0] * 8
    before[:] = 7
    assert s.scheduler.lcm_block_uses().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
