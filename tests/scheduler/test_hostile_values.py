"""Values at, beyond and far from their limits, and objects of wrong kinds: refused in words, with nothing changed."""

from collections.abc import Callable
from enum import Enum
from types import ModuleType

import numpy as np
import pytest

from tokenspeed_jax import _scheduler
from tokenspeed_jax.scheduler import (
    PD,
    Cache,
    CacheGroupConfig,
    ExecutionEvent,
    ForwardEvent,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
)

from .scenario import FULL, STATE, Group, extend_result, make_config, named, replayable, reserve, spec, swa
from .twins import Twins, advance, result

GROUP_SETS = [(FULL,), (FULL, swa(4), STATE), (Group(packing=2), replayable(3))]


@pytest.fixture(params=GROUP_SETS, ids=["full", "mixed", "replayable"])
def twins(request: pytest.FixtureRequest) -> Twins:
    """a and b (slots 1, 2) have their prompt's first token out, c (slot 3) a chunk of an unfinished prompt."""
    made = Twins(request.param, budget=16)
    made.submit("a", range(4))
    made.submit("b", range(10, 14))
    made.submit("c", range(20, 40))
    step = made.plan()
    assert (step.ids, step.batch.request_pool_indices, step.inputs) == (["a", "b", "c"], [1, 2, 3], [4, 4, 8])
    return made


# Configurations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"decode_input_tokens": -1}, "decode_input_tokens must be >= 0, got -1"),
        ({"decode_input_tokens": 0}, "decode_input_tokens must be >= 1, got 0"),
        ({"decode_input_tokens": 65}, "decode_input_tokens must be <= 64, got 65"),
        ({"decode_input_tokens": 2**31 - 1}, "decode_input_tokens must be <= 64, got 2147483647"),
        ({"max_batch_size": 0}, "max_batch_size must be >= 1, got 0"),
        ({"max_batch_size": -1}, "max_batch_size must be >= 0, got -1"),
        ({"max_batch_size": 2**16 + 1}, "max_batch_size must be <= 65536, got 65537"),
        ({"max_batch_size": 2**31 - 1}, "max_batch_size must be <= 65536, got 2147483647"),
        ({"max_kv_events": 0}, "max_kv_events must be >= 1, got 0"),
        ({"num_device_pages": 2**26 + 1}, "num_device_pages must be <= 67108864"),
    ],
)
def test_configurations_that_could_never_work(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduler(make_config([FULL], 8, **fields))  # type: ignore[arg-type]


def test_the_widest_step_that_fits_the_budget_works() -> None:
    twins = Twins([FULL, swa(4)], usable=127, decode_input_tokens=64)
    twins.submit("a", range(4))
    twins.run_out()


def test_duplicate_group_names() -> None:
    config = make_config([FULL, swa(4)], 8)
    first, second = config.cache_groups
    second.group_id = first.group_id
    config.cache_groups = [first, second]
    with pytest.raises(ValueError, match="group_id 'g0' occurs twice"):
        Scheduler(config)


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", GROUP_SETS, ids=["full", "mixed", "replayable"])
@pytest.mark.parametrize("width", [1, 2])
def test_prompts_at_one_under_and_one_over_the_limit(groups: tuple[Group, ...], width: int) -> None:
    twins = Twins(groups, usable=12, decode_input_tokens=width)
    limit = twins.victim.max_single_request_tokens()
    for size in (limit - width - 1, limit - width):
        twins.submit(f"r{size}", range(size))
        assert twins.plan().ids == [f"r{size}"]
        twins.land(f"r{size}", 7)
        twins.end(ForwardEvent.Finish, f"r{size}")
        twins.plan()
    words = f"need room for {limit + 1} tokens; the device cache holds at most {limit} of one request"
    over = spec("over", range(limit - width + 1))
    twins.refused(ValueError, words, lambda scheduler: scheduler.submit_requests([over]))
    declared = spec("over", range(limit - 5), max_new=6)
    twins.refused(ValueError, words, lambda scheduler: scheduler.submit_requests([declared]))
    twins.run_out()


@pytest.mark.parametrize("budget", [8, 9])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_prompts_around_the_budget_and_the_prefix_granularity(budget: int, offset: int) -> None:
    twins = Twins([FULL, swa(4), STATE], P=4, budget=budget)
    for base in (4, budget, 2 * budget):
        twins.submit(f"r{base}", range(base + offset))
        twins.run_out()


def test_tokens_at_the_ends_of_their_range() -> None:
    twins = Twins([FULL])
    twins.submit("a", [-(2**31), 2**31 - 1, 0, -1])
    for token in (2**31, -(2**31) - 1):
        with pytest.raises(TypeError, match=rf"tokens\[1\] must fit 32 bits, got {token}"):
            spec("b", [0, token])
        with pytest.raises(TypeError):
            extend_result("a", [token])
    twins.run_out()


def test_tokens_may_be_any_sequence_of_integers_and_nothing_else() -> None:
    class Shrinking:
        def __index__(self) -> int:
            hostile.clear()
            return 5

    made, expected = RequestSpec(), [1, 2, 3]
    for tokens in (tuple(expected), np.array(expected, np.int32), np.array(expected), range(1, 4), [True, 2, 3]):
        made.tokens = tokens  # type: ignore[assignment]
        assert made.tokens == expected
    hostile: list[object] = [1, Shrinking(), *range(1000)]
    made.tokens = hostile  # type: ignore[assignment]
    assert made.tokens == [1, 5, *range(1000)]
    for wrong in ("12", b"12", 7, None, [1, None], [1, 2.0], {1, 2}, np.zeros((2, 2), np.int32)):
        with pytest.raises(TypeError):
            made.tokens = wrong  # type: ignore[assignment]
    assert made.tokens == [1, 5, *range(1000)]


def test_a_request_for_too_many_keys() -> None:
    config = make_config([Group(granularity=1)], 8, P=2**20)
    scheduler = Scheduler(config)
    assert len(scheduler.expand_prefix_keys(["h"])[0]) == 2**20
    with pytest.raises(ValueError, match="17 pages of 1048576 block keys are more than 16777216 keys"):
        scheduler.expand_prefix_keys(["h"] * 17)


# Ids ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        *(lambda value, kind=kind: named(kind, value) for kind in (ForwardEvent.Finish, ForwardEvent.Abort)),
        extend_result,
        lambda value: reserve(value, 1),
        lambda value: named(ForwardEvent.Retract, value),
        PD.BootstrappedEvent,
        PD.FailedEvent,
        PD.SucceededEvent,
        lambda value: PD.RemotePrefillDoneEvent(value, 1),
        lambda value: spec(value, [1]),
        lambda value: CacheGroupConfig(value, 4, 9),
        lambda value: setattr(CacheGroupConfig(), "group_id", value),
        Scheduler(make_config([FULL], 8)).request_token_size,
    ],
)
@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("\ud800", ValueError, "surrogates not allowed"),
        (b"\xff", TypeError, "argument"),
        (None, TypeError, "argument"),
        (7, TypeError, "argument"),
    ],
)
def test_ids_that_are_no_text(
    make: Callable[[object], object], value: object, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(value)


@pytest.mark.parametrize(
    ("group_id", "words"), [("", "must not be empty"), ("x" * 4097, "must have at most 4096 bytes, got 4097")]
)
def test_group_ids_that_are_empty_or_huge(group_id: str, words: str) -> None:
    config = make_config([FULL], 8)
    group = config.cache_groups[0]
    group.group_id = group_id
    config.cache_groups = [group]
    with pytest.raises(ValueError, match=f"group_id {words}"):
        Scheduler(config)


@pytest.mark.parametrize("request_id", ["\0", "a\0b", " ", "'", "\U0001f600" * 1024, "x" * 4096])
def test_odd_ids_work(request_id: str) -> None:
    twins = Twins([FULL])
    twins.submit(request_id, range(4))
    assert twins.plan().ids == [request_id]
    twins.refused(RuntimeError, "FSM transition invalid", advance(reserve(request_id, 1)))
    twins.land(request_id, 7)
    twins.run_out()


# Kinds of objects ----------------------------------------------------------------------------------------------------


def test_calls_with_wrong_types(twins: Twins) -> None:
    for name in ("submit_requests", "advance", "advance_rows", "finish_rows", "set_weight_version"):
        for arguments in ((), (None,), (7,), ([None],), (object(),), (None, None, None), ([spec("x", [1])], 1)):
            twins.refused(
                TypeError,
                "incompatible function arguments",
                lambda s, name=name, arguments=arguments: getattr(s, name)(*arguments),
            )
    with pytest.raises(TypeError):
        Scheduler()  # type: ignore[call-arg]
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()


def classes(scope: object) -> list[type]:
    found = [member for member in vars(scope).values() if isinstance(member, type) and not issubclass(member, Enum)]
    inner = [classes(member) for member in vars(scope).values() if isinstance(member, ModuleType)]
    return found + [kind for kinds in inner for kind in kinds]


@pytest.mark.parametrize("kind", classes(_scheduler), ids=lambda kind: kind.__name__)
def test_an_object_that_was_never_initialised(kind: type) -> None:
    words = "made without calling its class"
    bare = kind.__new__(kind)
    tried = 0
    for name, member in vars(kind).items():
        if isinstance(member, property):
            with pytest.raises(TypeError, match=words):
                getattr(bare, name)
            tried += 1
        elif callable(member) and not isinstance(member, type) and not name.startswith("_"):
            with pytest.raises(TypeError, match=f"{words}|incompatible function arguments"):
                getattr(bare, name)()
            tried += 1
    assert tried


def test_uninitialised_objects_as_arguments(twins: Twins) -> None:
    words = "made without calling its class"
    with pytest.raises(TypeError, match=words):
        Scheduler(SchedulerConfig.__new__(SchedulerConfig))
    twins.refused(TypeError, words, lambda s: s.submit_requests([spec("x", [1]), RequestSpec.__new__(RequestSpec)]))
    twins.refused(TypeError, words, lambda s: s.advance(ExecutionEvent.__new__(ExecutionEvent)))
    for kind in (ForwardEvent.ExtendResult, Cache.LoadBackDoneEvent, PD.FailedEvent):
        with pytest.raises(TypeError, match=words):
            ExecutionEvent().add_event(kind.__new__(kind))
    twins.advance(result("a", [7]), result("b", [7]), result("c"))
    twins.run_out()
