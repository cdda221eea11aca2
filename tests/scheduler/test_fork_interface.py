"""Forks at the border: what is refused at submission, and copies as lists and arrays."""

import numpy as np
import pytest

from tokenspeed_jax.scheduler import RequestSpec, Scheduler

from .scenario import FULL, Group, Scenario, make_config, spec, swa
from .test_fork import family


def refused(scheduler: Scheduler, specs: list[RequestSpec], match: str) -> None:
    before = scheduler.waiting_size()
    with pytest.raises(ValueError, match=match):
        scheduler.submit_requests(specs)
    assert scheduler.waiting_size() == before


def test_wrong_forks_are_refused_with_their_whole_submission() -> None:
    scheduler = Scheduler(make_config([FULL], 20))
    scheduler.submit_requests([spec("live", [1, 2, 3], cache_salt="s")])
    fine = spec("fine", [1])

    def fork(tokens: list[int], of: str, cache_salt: str = "") -> RequestSpec:
        return spec("f", tokens, fork_of=of, cache_salt=cache_salt)

    refused(scheduler, [fine, fork([1], "nobody")], "'f': fork_of 'nobody' is neither a live request nor an earlier")
    refused(scheduler, [fork([1], "fine"), fine], "neither a live request nor an earlier one of this submission")
    refused(scheduler, [fine, fork([1], "f")], "must not be the request itself")
    refused(scheduler, [fine, fork([1, 2], "fine")], "other tokens: 1, against 2, of which the first 1 agree")
    refused(scheduler, [fork([1, 9, 3], "live", cache_salt="s")], "other tokens: 3, against 3, of which the first 1")
    refused(scheduler, [fork([1, 2, 3], "live")], "another cache_salt")
    refused(scheduler, [fine, fork([1], "fine", cache_salt="x")], "another cache_salt")
    refused(scheduler, [fine, fork([1], "fine"), spec("g", [1], fork_of="f")], "'f' is a fork itself")
    scheduler.submit_requests([fork([1, 2, 3], "live", cache_salt="s")])
    refused(scheduler, [spec("g", [1, 2, 3], fork_of="f", cache_salt="s")], "name the request that it is a fork of")
    scheduler.set_weight_version("2")
    refused(scheduler, [spec("g", [1, 2, 3], fork_of="live", cache_salt="s")], "another weight version")


def test_a_parent_that_has_ended_is_refused() -> None:
    s = Scenario([FULL], 20)
    s.prefill("r", [1, 2, 3])
    s.plan()
    s.land("r", 1)
    refused(s.scheduler, [spec("f", [1, 2, 3, 7], fork_of="r")], "other tokens: 3, against 4")
    s.finish("r")
    for _ in range(2):
        refused(s.scheduler, [spec("f", [1, 2, 3], fork_of="r")], "neither a live request")
        s.plan()  # forgets the request


def test_copies_can_be_read_as_arrays() -> None:
    s = Scenario([Group(granularity=4), FULL], 40, P=4)
    family(s, 10, 3)
    assert s.scheduler.next_execution_plan().pages_to_copy_arrays() == {}
    plan = s.scheduler.next_execution_plan()
    arrays = plan.pages_to_copy_arrays()
    again = plan.pages_to_copy_arrays()
    lists = plan.pages_to_copy
    assert set(arrays) == {"g0", "g1"}
    for group, array in arrays.items():
        assert (array.dtype, array.shape) == (np.int32, (3, 2))
        assert [tuple(pair) for pair in array.tolist()] == lists[group]
        assert np.shares_memory(array, again[group])
        assert not array.flags.writeable
    del plan, again
    assert arrays["g0"].tolist() == [list(pair) for pair in lists["g0"]]


def test_a_plan_that_forks_in_one_group_names_every_group() -> None:
    s = Scenario([Group(granularity=4), swa(1)], 40, P=4)
    family(s, 10, 1)
    s.plan()
    plan = s.scheduler.next_execution_plan()
    assert {group: array.shape for group, array in plan.pages_to_copy_arrays().items()} == {"g0": (1, 2), "g1": (0, 2)}
