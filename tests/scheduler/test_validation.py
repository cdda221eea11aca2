"""What is refused, with which words, and that nothing is changed by it (scenarios S-VA)."""

from collections.abc import Callable

import pytest

from tokenspeed_jax.scheduler import (
    PD,
    Cache,
    CacheGroupConfig,
    CacheGroupFamily,
    CacheRetention,
    CacheTransferPolicy,
    CapacityModel,
    ExecutionEvent,
    ForwardEvent,
    Scheduler,
    SchedulerConfig,
)

from .scenario import FULL, Scenario, extend_result, make_config, named, spec, swa

Role = SchedulerConfig.Role


def with_group(**fields: object) -> SchedulerConfig:
    config = make_config([FULL], 8, P=4)
    group = config.cache_groups[0]
    for name, value in fields.items():
        setattr(group, name, value)
    config.cache_groups = [group]
    return config


STATE = {"family": CacheGroupFamily.State}
WINDOW = {"retention": CacheRetention.SlidingWindow, "sliding_window_tokens": 4}


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prefix_granularity", 0, "prefix_granularity"),
        ("max_scheduled_tokens", 0, "max_scheduled_tokens"),
        ("max_batch_size", -1, "max_batch_size"),
        ("max_batch_size", 0, "max_batch_size"),
        ("decode_input_tokens", -1, "decode_input_tokens"),
        ("decode_input_tokens", 0, "decode_input_tokens"),
        ("overlap_schedule_depth", -1, "overlap_schedule_depth"),
        ("overlap_schedule_depth", 2, "overlap_schedule_depth"),
        ("num_device_pages", 0, "device cache"),
        ("num_device_pages", 1, "device cache"),
        ("num_device_pages", 2**31 - 1, "num_device_pages"),
        ("prefix_replay_tokens", -1, "prefix_replay_tokens"),
        ("max_overtaken_rounds", -1, "max_overtaken_rounds must be >= 0, got -1"),
        ("enable_l3_storage", True, "enable_l3_storage"),
        ("cache_groups", [], "cache_groups"),
        ("num_host_pages", -1, "num_host_pages must be >= 0, got -1"),
        ("num_host_pages", 2**31 - 1, "num_host_pages"),
    ],
)
def test_va1_a_wrong_field_is_named(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduler(make_config([FULL], 8, **{field: value}))  # pyright: ignore[reportArgumentType]


def test_va1_overlap_needs_a_decode_width() -> None:
    config = make_config([FULL], 8, overlap_schedule_depth=1, decode_input_tokens=0)
    with pytest.raises(ValueError, match="decode_input_tokens"):
        CapacityModel(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group_id": ""}, "group_id"),
        ({"block_granularity": 0}, "block_granularity"),
        ({"block_granularity": 3}, "block_granularity"),
        ({"block_granularity": 8}, "block_granularity"),
        ({"cache_blocks_per_lcm_block": 0}, "cache_blocks_per_lcm_block"),
        ({"cache_blocks_per_lcm_block": 2**31 - 1}, "cache_blocks_per_lcm_block"),
        ({"shard_count": 0}, "shard_count"),
        ({"shard_count": 2}, "shard_count"),
        ({"total_pages": 0}, "total_pages"),
        ({"retention": CacheRetention.SlidingWindow}, "sliding_window_tokens"),
        ({**WINDOW, "sliding_window_tokens": 0}, "sliding_window_tokens"),
        ({**STATE, **WINDOW}, "State"),
        ({"replayable": True}, "replayable"),
    ],
)
def test_va3_a_wrong_group_is_named(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduler(with_group(**fields))


@pytest.mark.parametrize("fields", [{"replayable": True}, {**STATE, **WINDOW}, {"group_id": ""}])
def test_a_group_can_be_validated_alone(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="group"):
        with_group(**fields).cache_groups[0].validate()


def test_group_ids_are_unique() -> None:
    config = make_config([FULL, FULL], 8)
    config.cache_groups = [config.cache_groups[0]] * 2
    for build in (CapacityModel, Scheduler):
        with pytest.raises(ValueError, match="'g0' occurs twice"):
            build(config)


def test_va1_va3_budgets_too_small_for_state_or_replay_are_refused() -> None:
    config = with_group(**STATE)
    config.max_scheduled_tokens = 3
    with pytest.raises(ValueError, match="max_scheduled_tokens"):
        CapacityModel(config)
    config = with_group(**WINDOW, replayable=True)
    config.max_scheduled_tokens = 7
    with pytest.raises(ValueError, match="max_scheduled_tokens"):
        CapacityModel(config)
    config.max_scheduled_tokens = 8
    CapacityModel(config)
    config.cache_groups = [*config.cache_groups, CacheGroupConfig("s", 4, 9, family=CacheGroupFamily.State)]
    with pytest.raises(ValueError, match="replayable"):
        CapacityModel(config)


@pytest.mark.parametrize("role", [Role.P, Role.D])
@pytest.mark.parametrize(
    ("family", "policy", "right"),
    [
        (CacheGroupFamily.History, CacheTransferPolicy.Unspecified, False),
        (CacheGroupFamily.History, CacheTransferPolicy.LatestSnapshot, False),
        (CacheGroupFamily.History, CacheTransferPolicy.FullSuffix, True),
        (CacheGroupFamily.State, CacheTransferPolicy.FullSuffix, False),
        (CacheGroupFamily.State, CacheTransferPolicy.LatestSnapshot, True),
    ],
)
def test_va2_transfer_policies_of_the_split_roles(
    role: SchedulerConfig.Role, family: CacheGroupFamily, policy: CacheTransferPolicy, right: bool
) -> None:
    config = with_group(family=family, transfer_policy=policy)
    config.role = role
    if not right:
        with pytest.raises(ValueError, match="transfer_policy"):
            CapacityModel(config)
        return
    CapacityModel(config)
    Scheduler(config)


def test_host_pages_are_fine_when_the_host_cache_is_off() -> None:
    Scheduler(make_config([FULL], 8, num_host_pages=9, disable_l2_cache=True))
    Scheduler(make_config([FULL], 8, num_host_pages=1))


@pytest.mark.parametrize("max_new", [-1, 100])
def test_va4_a_bad_submission_inserts_nothing(max_new: int) -> None:
    s = Scenario([FULL], 8)
    good, bad = spec("good", range(4)), spec("bad", range(4), max_new)
    with pytest.raises(ValueError, match=r"'bad'.*max_new_tokens"):
        s.scheduler.submit_requests([good, bad])
    assert s.scheduler.waiting_size() == 0
    s.scheduler.submit_requests([good])
    assert s.plan().ids == ["good"]


def test_va4_empty_prompts_and_repeated_ids_are_refused() -> None:
    s = Scenario([FULL], 8)
    with pytest.raises(ValueError, match="tokens must not be empty"):
        s.submit("r", [])
    with pytest.raises(ValueError, match="occurs twice"):
        s.scheduler.submit_requests([spec("r", [1]), spec("r", [2])])
    s.submit("r", 4)
    with pytest.raises(ValueError, match="already in use"):
        s.submit("r", 4)
    s.abort("r")
    s.plan()
    s.submit("r", 4)


def test_va5_unknown_groups_and_uneven_storage_lists_are_refused() -> None:
    s = Scenario([FULL], 8)
    assert (s.scheduler.cache_group_total_pages("g0"), s.scheduler.cache_group_available_pages("g0")) == (9, 8)
    for query in (s.scheduler.cache_group_total_pages, s.scheduler.cache_group_available_pages):
        with pytest.raises(IndexError, match="nope"):
            query("nope")
    for register in (s.scheduler.register_storage_keys, s.scheduler.unregister_storage_keys):
        register(["g0"], ["0" * 64], [0])
        with pytest.raises(ValueError, match="same length"):
            register(["g0"], [], [0])


def test_what_belongs_to_other_roles_and_tiers_is_empty() -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    assert s.scheduler.bootstrapping_size() == 0
    assert s.scheduler.remote_prefilling_size() == 0
    assert s.scheduler.pd_transfer_size() == 0
    assert not s.scheduler.pd_transfer_pinned("r")
    assert s.scheduler.waiting_prefix_hashes() == []
    assert s.scheduler.request_token_size("nobody") == -1


@pytest.mark.parametrize(
    "event",
    [
        named(ForwardEvent.Finish, "nobody"),
        named(ForwardEvent.Abort, "nobody"),
        extend_result("nobody", [1]),
        Cache.WriteBackDoneEvent(),
        Cache.LoadBackDoneEvent(3, False),
        PD.BootstrappedEvent("r"),
        PD.FailedEvent("nobody"),
        PD.SucceededEvent("nobody"),
        PD.RemotePrefillDoneEvent("nobody", -1),
    ],
)
def test_events_of_nobody_are_ignored(event: object) -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    s.advance(event)
    assert s.scheduler.waiting_size() == 1


@pytest.mark.parametrize(
    ("event", "name"),
    [
        (extend_result("r"), "ExtendResultEvent"),
        (named(ForwardEvent.Retract, "r"), "RetractEvent"),
        (named(ForwardEvent.UpdateReserveNumTokens, "r"), "UpdateReserveNumTokensEvent"),
        (PD.SucceededEvent("r"), "SucceededEvent"),
        (PD.RemotePrefillDoneEvent("r", 5), "RemotePrefillDoneEvent"),
    ],
)
def test_a_submitted_request_refuses_what_needs_a_forward(event: object, name: str) -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    with pytest.raises(RuntimeError, match=f"event=tokenspeed::fsm::{name}; state=tokenspeed::fsm::Submitted"):
        s.advance(event)


@pytest.mark.parametrize("make", [lambda: PD.FailedEvent("r"), lambda: PD.SucceededEvent("r")])
def test_a_peer_event_ends_a_running_request(make: Callable[[], object]) -> None:
    s = Scenario([FULL], 8)
    s.prefill("r", 4)
    s.advance(make())
    assert s.plan().ids == []
    assert s.available == 8


@pytest.mark.parametrize("value", [2**31, 1.5, "4", None])
def test_values_of_the_wrong_type_are_refused_by_the_attribute(value: object) -> None:
    config = SchedulerConfig()
    with pytest.raises(TypeError):
        config.num_device_pages = value  # type: ignore[assignment]
    with pytest.raises(TypeError):
        ExecutionEvent().add_event(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        spec("r", [value])  # type: ignore[list-item]


def test_sliding_groups_need_no_full_group_beside_them() -> None:
    s = Scenario([swa(4)], 8)
    s.submit("r", 4)
    assert s.plan().ids == ["r"]
