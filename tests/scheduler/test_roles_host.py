"""Roles P and D over a host tier: the latter uses it for retraction snapshots only (scenario S-PD9)."""

from tokenspeed_jax.scheduler import Cache

from .peers import SCATTERING_GROUPS, TWO_FULL, DecodeWorker, PrefillWorker, run_scattered_prompt
from .scenario import Scenario, extend_result
from .simulated_tiers import load_backs


def acknowledge(s: Scenario, *op_ids: int) -> None:
    for op_id in op_ids:
        event = Cache.WriteBackDoneEvent()
        event.op_id = op_id
        s.advance(event)


def test_pd9_a_retracted_request_recovers_from_its_snapshot_locally_and_alone() -> None:
    s = DecodeWorker(TWO_FULL, 12, num_host_pages=33)
    s.start("r1", 4)
    s.start("r2", 4)
    for request_id in ("r1", "r2"):
        step = s.plan()
        assert step.landing is not None
        assert (step.landing.ids, step.plan.cache) == ([request_id], [])
    s.done("r1")
    s.done("r2")
    for token in (1, 2):
        step = s.plan()
        assert (step.ids, step.plan.cache) == (["r1", "r2"], [])  # no continuous streaming on this role
        s.advance(extend_result("r1", [token]), extend_result("r2", [token]))
    step = s.plan()
    assert (step.ids, s.scheduler.num_retractions()) == ([], 1)
    (write_back,) = step.plan.cache
    assert write_back.source_pinned == [False]
    acknowledge(s, *write_back.op_ids)
    assert s.plan().ids == ["r2"]
    s.start("new", 2)
    s.land("r2", 3)
    step = s.plan()
    # The readmission does not fit beside r2: new prompts wait for it, decodes do not.
    assert (step.ids, step.landing) == (["r2"], None)
    s.land("r2", 4)
    s.finish("r2")
    # What r1 left on the device must be gone, or nothing has to be loaded.
    assert s.scheduler.clear_l1_cache()
    step = s.plan()
    assert (step.ids, step.landing) == (["r1"], None)
    (load_back,) = step.plan.cache
    # 4 prompt tokens and 3 more, of which 6 are in whole pages: three pages of two groups.
    assert [len(pages) for pages in load_back.dst_pages] == [6]
    assert (step.prefixes, step.inputs, step.batch.prefill_lengths) == ([6], [1], [7])
    assert not s.scheduler.pd_transfer_pinned("r1")
    assert s.scheduler.remote_prefilling_size() == 0
    (op_id,) = load_back.op_ids
    s.advance(Cache.LoadBackDoneEvent(op_id, True))
    s.land("r1", 5)
    step = s.plan()
    assert step.ids == ["r1"]
    assert step.landing is not None
    assert step.landing.ids == ["new"]


def test_a_lone_prompt_that_starts_again_leaves_the_keys_of_the_store() -> None:
    s = PrefillWorker(SCATTERING_GROUPS, 10, budget=6, num_host_pages=9, enable_l3_storage=True)
    stored = s.fresh(5)
    s.scheduler.register_storage_keys(*s.scheduler.expand_prefix_keys(s.scheduler.prefix_hashes_for_tokens(stored)))
    run_scattered_prompt(s)
    assert s.scheduler.num_retractions() == 1
    s.succeed("long")
    s.start("stored", stored)
    step = s.plan()
    assert (step.ids, step.prefixes, step.inputs) == (["stored"], [4], [1])
    (load,) = load_backs(step)
    assert all(transfer.from_storage for transfer in load.transfers)
