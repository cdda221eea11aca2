"""Who shares a prefix with whom: requests of one cache salt, submitted under one weight version."""

import itertools

import pytest

from tokenspeed_jax.scheduler import ForwardEvent, KVEvent, RequestSpec, Scheduler

from .scenario import FULL, Scenario, make_config, named, spec, swa

PROMPT = list(range(1, 10))
NAMES = ("", "a", "b", "ab", "\0", "\u00e4\U0001f600")


def life(s: Scenario, request_id: str, prompt: list[int], salt: str) -> int:
    """Runs the prompt to its end; how many of its tokens were there already."""
    s.submit(request_id, prompt, cache_salt=salt)
    step = s.plan()
    assert step.ids == [request_id]
    s.land(request_id, 7)
    s.finish(request_id)
    s.plan()
    return step.prefixes[0]


def test_prefixes_are_shared_within_a_salt_and_a_version_and_never_across() -> None:
    s = Scenario([FULL, swa(32)], 1023)
    pairs = list(itertools.product(NAMES, NAMES))
    for visit, expected in (("first", 0), ("second", 8)):
        for index, (salt, version) in enumerate(pairs):
            s.scheduler.set_weight_version(version)
            assert life(s, f"{visit}{index}", PROMPT, salt) == expected, (salt, version)


def test_the_version_of_the_configuration_is_the_first_one() -> None:
    s = Scenario([FULL], 63, weight_version="w1")
    assert life(s, "a", PROMPT, "") == 0
    s.scheduler.set_weight_version("w2")
    assert life(s, "b", PROMPT, "") == 0
    s.scheduler.set_weight_version("w1")
    assert life(s, "c", PROMPT, "") == 8


def test_running_requests_keep_their_version() -> None:
    s = Scenario([FULL], 63)
    s.scheduler.set_weight_version("old")
    s.submit("r", PROMPT)
    s.scheduler.set_weight_version("new")
    s.plan()
    s.land("r", 7)
    s.plan()
    s.land("r", 8)
    s.advance(named(ForwardEvent.Retract, "r"))
    # It finds its own blocks again, so what it publishes under the old version is what it looks up.
    assert s.plan().prefixes == [8]
    s.land("r", 9)
    s.finish("r")
    assert life(s, "new", PROMPT, "") == 0
    s.scheduler.set_weight_version("old")
    assert life(s, "again", PROMPT, "") == 8


def test_hashes_for_tokens_are_those_of_a_request_submitted_now() -> None:
    scheduler = Scheduler(make_config([FULL], 8, P=4))
    plain = scheduler.prefix_hashes_for_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert plain == [
        "65a73aeec7de373d87d0bb665fb1b7e9c490f83287b644f3ea58f3eea1ee271f",
        "9f99734c64c898db6698530d61968eeba422fe1f4f044203644087f9ec65e01c",
    ]
    salted = scheduler.prefix_hashes_for_tokens(PROMPT, cache_salt="s")
    scheduler.set_weight_version("s")
    versioned = scheduler.prefix_hashes_for_tokens(PROMPT)
    assert not {*plain} & {*salted}
    assert not {*plain, *salted} & {*versioned}
    scheduler.set_weight_version("")
    assert scheduler.prefix_hashes_for_tokens(PROMPT, "") == plain


def test_residency_events_of_two_salts_are_two_prefixes() -> None:
    s = Scenario([FULL], 63, enable_kv_cache_events=True)
    hashes = []
    for salt in ("", "a", "b"):
        life(s, f"r{salt}", PROMPT, salt)
        stored = [event for event in s.scheduler.drain_kv_events() if isinstance(event, KVEvent.BlockStored)]
        assert len(stored) == 4
        assert stored[0].parent_block_hash is None
        hashes += [value for event in stored for value in event.block_hashes]
    assert len(set(hashes)) == 12


def test_a_salt_or_version_that_is_too_long_is_refused_and_the_longest_is_not() -> None:
    config = make_config([FULL], 63, weight_version="v" * 65537)
    with pytest.raises(ValueError, match="weight_version must have at most 65536 bytes, got 65537"):
        Scheduler(config)
    s = Scenario([FULL], 63)
    with pytest.raises(ValueError, match="weight_version"):
        s.scheduler.set_weight_version("v" * 65537)
    with pytest.raises(ValueError, match="cache_salt"):
        s.scheduler.prefix_hashes_for_tokens(PROMPT, "s" * 65537)
    with pytest.raises(ValueError, match=r"'bad'.*cache_salt must have at most 65536 bytes, got 131072"):
        s.scheduler.submit_requests([spec("good", PROMPT), spec("bad", PROMPT, cache_salt="\u00e4" * 65536)])
    assert s.scheduler.waiting_size() == 0
    s.scheduler.set_weight_version("v" * 65536)
    assert life(s, "r", PROMPT, "s" * 65536) == 0


@pytest.mark.parametrize("field", ["request_id", "cache_salt"])
@pytest.mark.parametrize(("value", "error"), [(b"\xff", TypeError), (7, TypeError), ("\ud800", ValueError)])
def test_what_is_no_text_is_refused_by_the_attribute(field: str, value: object, error: type[Exception]) -> None:
    made = RequestSpec()
    with pytest.raises(error):
        setattr(made, field, value)
    assert getattr(made, field) == ""
    with pytest.raises(error):
        Scheduler(make_config([FULL], 8)).set_weight_version(value)  # type: ignore[arg-type]


def test_an_id_has_at_least_one_byte_and_at_most_4096() -> None:
    s = Scenario([FULL], 63)
    longest = "\U0001f600" * 1024
    with pytest.raises(ValueError, match="entry 1: request_id must have at most 4096 bytes, got 4097"):
        s.scheduler.submit_requests([spec("good", PROMPT), spec(longest + "x", PROMPT)])
    with pytest.raises(ValueError, match="entry 0: request_id must not be empty"):
        s.submit("", 4)
    assert s.scheduler.waiting_size() == 0
    s.submit(longest, 4)
    assert s.plan().ids == [longest]
    with pytest.raises(ValueError, match="already in use"):
        s.submit(longest, 4)
