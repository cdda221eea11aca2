"""The external store below the host tier: what is believed to be there, fetched, and missed (scenarios S-L3)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent, KVEvent, Scheduler

from .scenario import FULL, Group, make_config, named, swa
from .simulated_tiers import load_backs, write_backs
from .tier_scenario import TierScenario, land_all


def with_store(host: int, usable: int = 20, **fields: object) -> TierScenario:
    return TierScenario([FULL], usable, host, **({"enable_l3_storage": True} | fields))


def test_l312_a_host_too_short_for_the_stored_prefix_shortens_the_hit() -> None:
    s = with_store(host=2)
    prompt = s.fresh(8)
    s.register(prompt)
    s.submit("a", prompt)
    step = s.plan()
    (op,) = load_backs(step)
    assert (step.prefixes, step.inputs, len(op.transfers)) == ([4], [4], 2)
    assert all(transfer.from_storage for transfer in op.transfers)


def test_l312_the_hit_is_derived_anew_when_the_host_has_less_room_than_keys() -> None:
    s = with_store(host=4)
    first, second = s.fresh(6), s.fresh(8)
    s.submit("filler", first)
    land_all(s, s.plan())
    assert len(write_backs(s.plan())[0].transfers) == 3  # three of the four host blocks are being filled
    s.register(second)
    s.submit("a", second)
    step = s.plan()
    (op,) = load_backs(step)
    assert (step.prefixes, step.inputs, len(op.transfers)) == ([2], [6], 1)
    assert len(step.zeroed["g0"]) == len(step.row("a")) - 1  # of the attempt that counted


def test_l313_a_missing_object_makes_the_request_a_cold_miss() -> None:
    s = with_store(host=8)
    prompt = s.fresh(8)
    s.register(prompt)
    s.submit("a", prompt)
    (op,) = load_backs(s.plan())
    keys = s.scheduler.expand_prefix_keys(s.scheduler.prefix_hashes_for_tokens(prompt))
    s.scheduler.unregister_storage_keys(*keys)
    s.advance(named(ForwardEvent.Retract, "a"))
    s.loaded(op, success=False)
    assert (s.scheduler.waiting_size(), s.pins, s.cached) == (1, 0, 0)
    step = s.plan()
    assert (step.ids, step.prefixes, load_backs(step)) == (["a"], [0], [])


def test_a_fetched_prefix_is_shared_once_it_has_arrived() -> None:
    s = with_store(host=8)
    prompt = s.fresh(8)
    s.register(prompt)
    s.submit("a", prompt)
    (op,) = load_backs(s.plan())
    assert (s.cached, s.pins) == (0, 3)
    s.submit("b", prompt)
    (again,) = load_backs(s.plan())  # not before: the second request fetches it for itself
    assert len(again.transfers) == 3
    s.loaded(op)
    assert s.cached == 3
    s.submit("c", prompt)
    step = s.plan()
    assert (step.ids[0], step.prefixes, load_backs(step)) == ("c", [6], [])
    s.loaded(again)
    assert (s.cached, s.pins) == (3, 0)


def test_l314_prefixes_are_asked_for_while_somebody_could_start() -> None:
    s = with_store(host=8, usable=8, max_batch_size=1)
    prompt = s.fresh(8)
    s.submit("a", prompt)
    assert s.scheduler.waiting_prefix_hashes() == s.scheduler.prefix_hashes_for_tokens(prompt)
    s.plan()
    assert s.scheduler.waiting_prefix_hashes() == []
    s.submit("b", 4)
    assert s.scheduler.waiting_prefix_hashes() == []  # no slot
    s = with_store(host=8, usable=4)
    s.submit("a", 7)
    s.plan()
    assert s.available == 0
    s.submit("b", 4)
    assert s.scheduler.waiting_prefix_hashes() == []  # no block


def test_prefixes_are_asked_for_once_and_no_further_than_slots_are_free() -> None:
    s = with_store(host=8, max_batch_size=2)
    shared = s.fresh(4)
    prompts = [[*shared, *s.fresh(3)] for _ in range(3)]
    for index, prompt in enumerate(prompts):
        s.submit(f"r{index}", prompt)
    hashes = [s.scheduler.prefix_hashes_for_tokens(prompt) for prompt in prompts]
    assert s.scheduler.waiting_prefix_hashes() == [*hashes[0], hashes[1][2]]


def test_nothing_new_is_asked_for_while_a_prompt_is_unfinished() -> None:
    s = with_store(host=8, budget=4)
    s.submit("a", 8)
    s.plan()
    s.submit("b", 4)
    assert s.scheduler.waiting_prefix_hashes() == []
    s.land("a")
    s.plan()
    assert len(s.scheduler.waiting_prefix_hashes()) == 1


def test_new_prompts_that_look_nothing_up_are_not_asked_for() -> None:
    s = with_store(host=8, disable_prefix_cache=True)
    s.submit("a", 8)
    assert s.scheduler.waiting_prefix_hashes() == []


def test_a_readmission_is_asked_for_first_and_takes_a_slot() -> None:
    s = TierScenario((FULL, FULL), 12, 40, enable_l3_storage=True, max_batch_size=2)
    prompt = s.fresh(4)
    s.submit("r1", prompt)
    s.submit("r2", 4)
    s.acknowledges = True
    while s.scheduler.num_retractions() == 0:
        land_all(s, s.plan())
    assert (s.scheduler.decoding_size(), s.scheduler.request_token_size("r1")) == (1, 7)
    s.submit("new", 9)
    assert s.scheduler.waiting_prefix_hashes() == s.scheduler.prefix_hashes_for_tokens([*prompt, 5, 5, 5])
    assert len(s.scheduler.waiting_prefix_hashes()) == 3


def test_stored_keys_do_not_outlive_a_clear() -> None:
    s = with_store(host=8)
    prompt = s.fresh(8)
    s.register(prompt)
    assert s.scheduler.clear_l1_cache()
    s.submit("a", prompt)
    assert s.plan().prefixes == [0]


def test_what_the_host_gives_up_is_still_known_to_be_stored() -> None:
    """A write-back is acknowledged when its external copy is there too."""
    s = TierScenario((FULL, FULL), 8, 4, enable_l3_storage=True)
    s.acknowledges = True
    first = s.fresh(3)
    s.life("a", first)
    assert s.cached == 4
    s.life("b", 3)
    assert s.cached == 4
    s.submit("filler", 7)  # recycles all that the device has
    s.plan()
    s.abort("filler")
    s.submit("c", [*first, 7, 0])
    step = s.plan()
    (op,) = load_backs(step)
    assert (step.prefixes, [transfer.from_storage for transfer in op.transfers]) == ([4], [True] * 4)


def test_salts_and_weight_versions_separate_what_is_in_the_store() -> None:
    prompt = list(range(1, 10))
    for salt, version, hit in (("", "", 8), ("s", "", 0), ("", "v2", 0)):
        s = with_store(host=8)
        s.register(prompt)
        s.scheduler.set_weight_version(version)
        s.submit("a", prompt, cache_salt=salt)
        assert s.plan().prefixes == [hit]


@pytest.mark.parametrize("success", [True, False])
def test_residency_events_wait_for_what_is_fetched(success: bool) -> None:
    s = with_store(host=8, enable_kv_cache_events=True)
    prompt = s.fresh(7)
    s.register(prompt)
    s.submit("a", prompt)
    (op,) = load_backs(s.plan())
    assert s.scheduler.drain_kv_events() == []
    s.loaded(op, success=success)
    events = s.scheduler.drain_kv_events()
    assert [event.token_ids for event in events if isinstance(event, KVEvent.BlockStored)] == (
        [prompt[0:2], prompt[2:4], prompt[4:6]] if success else []
    )
    s.abort("a")
    assert s.scheduler.clear_l1_cache()
    assert len(s.scheduler.drain_kv_events()) == (3 if success else 0)


def test_malformed_keys_are_refused_as_a_whole() -> None:
    s = with_store(host=8)
    (good,) = s.scheduler.prefix_hashes_for_tokens([1, 2, 3])
    for register in (s.scheduler.register_storage_keys, s.scheduler.unregister_storage_keys):
        with pytest.raises(IndexError, match="nope"):
            register(["g0", "nope"], [good, good], [0, 0])
        for bad in (good[:-1], good + "0", good.upper(), good[:-1] + "g", ""):
            with pytest.raises(ValueError, match=r"content_hashes\[1\] must be 64"):
                register(["g0", "g0"], [good, bad], [0, 0])
        for offset in (-1, 1, 2**31 - 1):
            with pytest.raises(ValueError, match=r"page_offsets\[1\].*\[0, 1\)"):
                register(["g0", "g0"], [good, good], [0, offset])
        with pytest.raises(ValueError, match="same length"):
            register(["g0"], [good], [])
    s.submit("a", [1, 2, 3])
    assert s.plan().prefixes == [0]


def test_the_configuration_of_a_store_is_checked() -> None:
    with pytest.raises(ValueError, match="enable_l3_storage needs a host cache"):
        Scheduler(make_config([FULL], 8, enable_l3_storage=True))
    sharded = Group(packing=2, shards=2)
    with pytest.raises(ValueError, match=r"'g1'.*enable_l3_storage needs shard_count 1, got 2"):
        Scheduler(make_config([FULL, sharded], 8, enable_l3_storage=True, num_host_pages=9))
    Scheduler(make_config([FULL, sharded], 8, num_host_pages=9))


def test_a_window_is_fetched_where_it_will_be_read() -> None:
    s = TierScenario((FULL, swa(4)), 20, 20, enable_l3_storage=True)
    prompt = s.fresh(9)
    s.register(prompt)
    s.submit("a", prompt)
    step = s.plan()
    (op,) = load_backs(step)
    assert step.prefixes == [8]
    assert [transfer.group for transfer in op.transfers] == [0, 0, 0, 0, 1, 1]
    assert step.row("a", 1)[:2] == [0, 0]
