"""The host tier: what is copied down, what comes back, and what waits for a copy (scenarios S-HT, S-ST14)."""

from tokenspeed_jax.scheduler import Cache, ForwardEvent, KVEvent

from .scenario import FULL, STATE, Group, Scenario, Step, named, real, replayable, swa
from .simulated_tiers import load_backs, write_back_done, write_backs
from .tier_scenario import TierScenario, land_all

FULL_SWA = (FULL, swa(4))
USABLE = 20


def tiers(host: int = 6, usable: int = USABLE, **fields: object) -> TierScenario:
    return TierScenario(FULL_SWA, usable, host, **({"disable_prefix_cache": True} | fields))


def start(s: TierScenario, request_id: str, prompt: int | list[int]) -> Step:
    """Prefill, land, plan: the prompt's pages are complete, and the first decode step is out."""
    s.prefill(request_id, prompt)
    return s.plan()


def test_ht1_a_complete_prompt_is_copied_in_one_pinned_operation() -> None:
    s = tiers()
    (op,) = write_backs(start(s, "a", 8))
    assert op.pinned
    assert [transfer.group for transfer in op.transfers] == [0, 0, 0, 0, 1, 1]
    assert len({(transfer.group, transfer.source) for transfer in op.transfers}) == 6
    assert (s.cached, s.pins) == (0, 6)


def test_ht2_sources_are_held_until_the_copy_is_acknowledged() -> None:
    s = tiers()
    ops = write_backs(start(s, "a", 8))
    assert write_backs(s.end("a")) == []
    assert (s.available, s.cached) == (USABLE - 6, 0)
    s.stored(*ops)
    assert (s.available, s.cached, s.pins) == (USABLE, 6, 0)


def test_ht3_what_the_host_has_is_not_stored_again() -> None:
    s = tiers()
    prompt = s.fresh(8)
    s.stored(*write_backs(start(s, "a", prompt)))
    assert write_backs(s.end("a")) == []
    assert write_backs(start(s, "b", prompt)) == []
    assert write_backs(s.end("b")) == []


def test_ht4_a_full_host_takes_nothing_while_copies_are_under_way() -> None:
    s = tiers()
    start(s, "a", 8)
    s.end("a")
    assert write_backs(start(s, "b", 8)) == []
    assert write_backs(s.end("b")) == []
    assert s.available == USABLE - 6
    assert s.scheduler.num_dropped_stores() == 12  # six at the prompt's end, six at the request's


def test_ht5_new_stores_replace_old_entries_at_once() -> None:
    s = tiers()
    s.stored(*write_backs(start(s, "a", 8)))
    s.end("a")
    (op,) = write_backs(start(s, "b", 8))
    assert len(op.transfers) == 6
    assert s.cached == 0
    s.stored(op)
    assert s.cached == 6


def test_ht6_identical_prompts_are_stored_once() -> None:
    s = tiers(host=12)
    prompt = s.fresh(8)
    s.submit("a", prompt)
    s.submit("b", prompt)
    land_all(s, s.plan())
    (op,) = write_backs(s.plan())
    assert len(op.transfers) == 6
    assert s.scheduler.host_empty_lcm_blocks() == 6


def test_ht7_what_finds_no_room_is_dropped() -> None:
    s = tiers(host=4)
    (op,) = write_backs(start(s, "a", 8))
    assert [transfer.group for transfer in op.transfers] == [0, 0, 0, 0]
    assert write_backs(s.end("a")) == []


def test_ht8_repeated_and_unknown_acknowledgements_change_nothing() -> None:
    s = tiers()
    (op,) = write_backs(start(s, "a", 8))
    s.advance(write_back_done(op.op_id + 1), Cache.LoadBackDoneEvent(op.op_id, True))
    assert (s.cached, s.pins) == (0, 6)
    for _ in range(2):
        s.stored(op)
        assert (s.cached, s.pins) == (6, 0)


def test_an_operation_that_nobody_was_told_of_cannot_be_acknowledged() -> None:
    s = tiers(host=20)
    (op,) = write_backs(start(s, "a", 8))
    s.stored(op)
    s.land("a", 8)
    assert write_backs(s.plan()) == []
    s.land("a", 9)
    s.finish("a")  # completes a page, whose store leads the next plan
    s.advance(write_back_done(op.op_id + 1))
    assert s.cached == 6
    (late,) = write_backs(s.plan())
    assert (late.op_id, late.pinned) == (op.op_id + 1, True)
    s.stored(late)
    assert s.cached == 6 + len(late.transfers)


def test_ht9_a_chunk_that_its_own_slid_pages_would_fund_waits_for_their_copies() -> None:
    s = tiers(host=12, usable=12, budget=4)
    s.submit("a", 12)
    s.plan()
    s.land("a")
    ops = write_backs(s.plan())
    assert ops
    s.land("a")
    for _ in range(3):
        step = s.plan()
        assert (step.ids, write_backs(step)) == ([], [])
    assert s.scheduler.num_retractions() == 0
    s.stored(*ops)
    assert s.plan().inputs == [4]


def on_host(usable: int = 12, **fields: object) -> TierScenario:
    """The prompt 1..8 is on the host alone."""
    s = TierScenario(FULL_SWA, usable, 32, **fields)
    s.acknowledges = True
    s.submit("a", list(range(1, 9)))
    for _ in range(4):
        land_all(s, s.plan())
    s.finish("a")
    s.plan()
    s.acknowledges = False
    assert s.scheduler.clear_l1_cache()
    assert (s.available, s.pins) == (usable, 0)
    return s


def test_ht10_a_prefix_comes_back_from_the_host() -> None:
    s = on_host()
    s.submit("c", list(range(1, 11)))
    step = s.plan()
    (op,) = load_backs(step)
    assert (step.prefixes, step.inputs, len(step.row("c"))) == ([8], [2], 6)
    assert [transfer.group for transfer in op.transfers] == [0, 0, 0, 0, 1, 1]
    placed = [step.row("c", 0)[slot] for slot in range(4)] + [step.row("c", 1)[slot] for slot in (2, 3)]
    assert [transfer.destination for transfer in op.transfers] == placed
    assert all(not transfer.from_storage and transfer.content_hash == "" for transfer in op.transfers)
    assert not {(t.group, t.destination) for t in op.transfers} & {
        (group, block) for group in (0, 1) for block in step.zeroed[f"g{group}"]
    }
    assert (s.available, s.pins) == (12 - 10, 6)
    s.loaded(op)
    assert s.pins == 0


def test_ht11_an_aborted_request_leaves_its_load_its_blocks() -> None:
    s = on_host()
    s.submit("c", list(range(1, 11)))
    ops = load_backs(s.plan())
    s.abort("c")
    s.plan()
    assert (s.available, s.pins) == (12 - 6, 6)
    assert not s.scheduler.can_clear_cache()
    assert not s.scheduler.clear_l1_cache()
    s.loaded(*ops)
    assert (s.available, s.pins) == (12, 0)
    assert s.scheduler.clear_cache()
    assert s.cached == 0


def test_ht12_a_prompt_alone_waits_for_the_blocks_of_a_load_and_then_runs() -> None:
    s = on_host()
    s.submit("c", list(range(1, 11)))
    ops = load_backs(s.plan())
    s.abort("c")
    s.submit("d", 8)
    for _ in range(2):
        assert s.plan().ids == []
    assert s.scheduler.num_retractions() == 0
    s.loaded(*ops)
    assert s.plan().ids == ["d"]


def test_ht10_recycled_device_copies_come_back_as_well() -> None:
    s = TierScenario(FULL_SWA, 12, 32)
    s.acknowledges = True
    s.life("a", list(range(1, 9)))
    s.life("b", 10)
    s.submit("c", list(range(1, 11)))
    step = s.plan()
    (op,) = load_backs(step)
    assert (step.prefixes, len(op.transfers)) == ([8], 6)


def test_ht13_a_refused_admission_pins_nothing() -> None:
    s = on_host()
    s.prefill("filler", 4)  # takes and keeps six blocks
    s.submit("c", list(range(1, 11)))
    step = s.plan()
    assert step.ids == ["filler"]
    s.stored(*write_backs(step))
    assert (load_backs(step), s.pins) == ([], 0)
    s.land("filler", 8)
    s.finish("filler")
    step = s.plan()
    assert step.ids == ["c"]
    assert len(load_backs(step)[0].transfers) == 6


def test_ht14_destinations_that_slide_out_stay_held_by_their_load() -> None:
    s = on_host(20, budget=4)
    s.submit("c", [*range(1, 9), *s.fresh(8)])
    step = s.plan()
    ops = load_backs(step)
    assert (step.prefixes, step.inputs, s.available) == ([8], [4], 20 - 10)
    s.land("c")
    step = s.plan()
    s.stored(*write_backs(step))
    assert (step.prefixes, s.available) == ([12], 20 - 16)
    s.loaded(*ops)
    assert s.available == 20 - 14


def test_a_completed_chunk_is_stored_while_the_prompt_goes_on() -> None:
    s = tiers(host=20, budget=4)
    s.submit("a", 12)
    s.plan()
    s.land("a")
    (op,) = write_backs(s.plan())
    assert [transfer.group for transfer in op.transfers] == [0, 0, 1, 1]


def test_decode_steps_store_what_will_slide_out_and_the_end_stores_the_rest() -> None:
    s = tiers(host=20)
    s.acknowledges = True
    step = start(s, "a", 4)
    groups = [[t.group for op in write_backs(step) for t in op.transfers]]
    for token in range(5):
        s.land("a", token)
        groups.append([t.group for op in write_backs(s.plan()) for t in op.transfers])
    assert groups == [[0, 0, 1, 1], [], [1], [], [1], []]
    assert [t.group for op in write_backs(s.end("a")) for t in op.transfers] == [1, 0, 0, 0]


def test_nothing_of_a_replayable_group_is_ever_stored() -> None:
    s = TierScenario((FULL, replayable(4)), 20, 20, P=2, budget=64)
    s.acknowledges = True
    step = start(s, "a", 8)
    assert {t.group for op in write_backs(step) for t in op.transfers} == {0}
    s.abort("a")
    s.plan()
    prompt = s.fresh(8)
    s.life("b", prompt)
    assert s.scheduler.clear_l1_cache()
    s.submit("c", [*prompt, 1, 2])
    step = s.plan()
    (op,) = load_backs(step)
    assert {t.group for t in op.transfers} == {0}
    assert (step.prefixes, step.replays, step.inputs) == ([4], [4], [6])


def test_st14_a_long_prompt_leaves_one_snapshot_per_state_group_on_the_host() -> None:
    s = TierScenario((Group(packing=4), STATE, STATE, STATE), 60, 60, budget=8)
    s.acknowledges = True
    prompt = s.fresh(32)
    s.submit("a", prompt)
    stored: list[int] = []
    for _ in range(8):
        step = s.plan()
        stored += [t.group for op in write_backs(step) for t in op.transfers]
        land_all(s, step)
    s.finish("a")
    stored += [t.group for op in write_backs(s.plan()) for t in op.transfers]
    assert [stored.count(group) for group in range(4)] == [18, 1, 1, 1]
    assert s.scheduler.clear_l1_cache()
    s.submit("b", [*prompt, 1])
    step = s.plan()
    assert (step.prefixes, len(load_backs(step)[0].transfers)) == ([32], 19)


def test_salts_and_weight_versions_separate_what_is_on_the_host() -> None:
    prompt = list(range(1, 11))
    for salt, version, hit in (("", "", 8), ("s", "", 0), ("", "v2", 0)):
        s = on_host()
        s.scheduler.set_weight_version(version)
        s.submit("c", prompt, cache_salt=salt)
        step = s.plan()
        assert (step.prefixes, bool(load_backs(step))) == ([hit], hit > 0)


def test_a_version_that_returns_finds_its_host_blocks_again() -> None:
    s = on_host(40)
    s.scheduler.set_weight_version("v2")
    s.acknowledges = True
    assert s.life("b", list(range(1, 11))).prefixes == [0]
    s.scheduler.set_weight_version("")
    assert s.scheduler.clear_l1_cache()
    assert s.life("c", list(range(1, 11))).prefixes == [8]


def test_residency_events_tell_of_the_device_alone() -> None:
    s = on_host(enable_kv_cache_events=True)
    s.scheduler.drain_kv_events()
    s.submit("c", list(range(1, 11)))
    (op,) = load_backs(s.plan())
    stored = [event for event in s.scheduler.drain_kv_events() if isinstance(event, KVEvent.BlockStored)]
    # The window's first two pages did not come back, but what a router is told of is the full history.
    assert [event.token_ids for event in stored] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    s.loaded(op)
    assert s.scheduler.drain_kv_events() == []


def test_a_copy_that_failed_takes_its_publication_back() -> None:
    s = on_host()
    s.submit("c", list(range(1, 11)))
    (op,) = load_backs(s.plan())
    s.advance(named(ForwardEvent.Retract, "c"))
    s.loaded(op, success=False)
    step = s.plan()
    assert (step.prefixes, len(load_backs(step)[0].transfers)) == ([8], 6)


def test_clearing_the_device_keeps_the_host() -> None:
    s = on_host()
    assert s.cached == 8  # the prompt's and a generated page's
    assert s.scheduler.can_clear_cache()
    assert s.scheduler.clear_cache()
    assert (s.cached, s.scheduler.host_empty_lcm_blocks()) == (0, 32)


def test_every_operation_names_keys_that_a_store_can_be_asked_for() -> None:
    s = tiers(host=12)
    prompt = s.fresh(9)
    (op,) = write_backs(start(s, "a", prompt))
    hashes = s.scheduler.prefix_hashes_for_tokens(prompt)
    assert [(t.group, t.content_hash, t.offset) for t in op.transfers] == [
        *((0, content_hash, 0) for content_hash in hashes),
        *((1, content_hash, 0) for content_hash in hashes[2:]),
    ]


def test_without_a_host_no_plan_has_an_operation() -> None:
    for fields in ({"num_host_pages": 1}, {"num_host_pages": 9, "disable_l2_cache": True}):
        s = Scenario(FULL_SWA, USABLE, **fields)
        s.prefill("a", 8)
        assert s.plan().plan.cache == []
        assert (s.scheduler.host_cached_blocks(), s.scheduler.host_empty_lcm_blocks()) == (0, 0)


def test_a_window_longer_than_what_came_back_stays_readable() -> None:
    s = on_host()
    s.submit("c", list(range(1, 11)))
    step = s.plan()
    assert real(step.row("c", 1)) == 4
    assert step.row("c", 1)[:2] == [0, 0]
