"""What a prompt copies of the unfinished prefix page that an ended request has left (`reuse_partial_pages`)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent, Scheduler, SchedulerConfig

from .scenario import FULL, STATE, Group, Scenario, Step, make_config, named, replayable, spec, swa
from .simulated_tiers import load_backs, write_backs
from .test_kv_events import drain
from .tier_scenario import TierScenario

P = 8


def scenario(*groups: Group, usable: int = 63, **fields: object) -> Scenario:
    return Scenario(groups or (FULL,), usable, **({"P": P, "reuse_partial_pages": True} | fields))


def turn(s: Scenario, request_id: str, prompt: list[int]) -> tuple[list[int], Step]:
    """A whole life with two tokens of output: what is written of it at the end, and its last decode step."""
    s.prefill(request_id, prompt)
    step = s.plan()
    assert step.ids == [request_id]
    s.land(request_id, 8)
    s.finish(request_id)
    return [*prompt, 7], step


def start(s: Scenario, request_id: str, prompt: list[int], **fields: object) -> Step:
    s.submit(request_id, prompt, **fields)
    step = s.plan()
    assert step.ids == [request_id]
    return step


def test_the_next_turn_of_a_conversation_starts_where_the_last_one_ended() -> None:
    s = scenario()
    written, last = turn(s, "a", s.fresh(12))
    prompt = [*written, 8, *s.fresh(20)]
    step = start(s, "b", prompt)
    assert (step.prefixes, step.inputs, step.batch.input_ids) == ([13], [21], prompt[13:])
    old, new = last.row("a"), step.row("b")
    assert new[0] == old[0]
    assert step.copied == {"g0": [(old[1], new[1])]}
    assert new[1] != old[1]
    assert step.zeroed == {"g0": new[2:]}


def test_without_the_flag_only_whole_pages_are_shared() -> None:
    s = scenario(reuse_partial_pages=False)
    written, _ = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written, 8, *s.fresh(20)])
    assert (step.prefixes, step.copied) == ([8], {})


def test_as_many_tokens_are_taken_over_as_are_the_same() -> None:
    s = scenario()
    written, last = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written[:11], *s.fresh(20)])
    assert step.prefixes == [11]
    assert step.copied["g0"] == [(last.row("a")[1], step.row("b")[1])]
    s.abort("b")
    assert start(s, "c", [*written[:8], *s.fresh(20)]).copied == {}


def test_a_page_in_which_nothing_is_common_is_not_copied() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written[:7], *s.fresh(20)])
    assert (step.prefixes, step.copied) == ([0], {})


def test_the_last_prompt_token_is_always_computed() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    assert start(s, "b", written).prefixes == [12]
    s.abort("b")
    assert start(s, "c", written[:10]).prefixes == [9]


def test_replay_tokens_are_computed_again() -> None:
    s = scenario(prefix_replay_tokens=3)
    written, _ = turn(s, "a", s.fresh(12))
    step = start(s, "b", written)
    assert (step.prefixes, step.inputs) == ([10], [3])
    s.abort("b")
    assert start(s, "c", written[:10]).copied == {}


def test_a_prompt_shorter_than_a_page_is_taken_over_under_its_own_salt_only() -> None:
    s = scenario()
    prompt = s.fresh(4)
    turn(s, "a", prompt)
    step = start(s, "b", [*prompt, 7, 1, 2])
    assert (step.prefixes, len(step.copied["g0"])) == ([5], 1)
    s.abort("b")
    assert start(s, "salted", [*prompt, 7, 1, 2], cache_salt="pepper").prefixes == [0]
    s.abort("salted")
    s.scheduler.set_weight_version("w2")
    assert start(s, "later", [*prompt, 7, 1, 2]).prefixes == [0]


def test_a_partial_page_of_other_weights_is_not_found() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    s.scheduler.set_weight_version("w2")
    assert start(s, "b", [*written, 1, 2]).prefixes == [0]


def test_of_several_the_one_with_most_in_common_is_copied() -> None:
    s = scenario()
    page = s.fresh(8)
    rows = {}
    for request_id, tail in (("short", [1, 2]), ("long", [1, 2, 3, 4]), ("other", [9, 9, 9, 9, 9])):
        _, last = turn(s, request_id, [*page, *tail])
        rows[request_id] = last.row(request_id)
    step = start(s, "b", [*page, 1, 2, 3, 4, 5, 6])
    assert (step.prefixes, step.copied) == ([12], {"g0": [(rows["long"][1], step.row("b")[1])]})


def test_behind_one_page_the_eight_left_last_are_known() -> None:
    s = scenario()
    page = s.fresh(8)
    for number in range(9):
        turn(s, f"r{number}", [*page, 100 + number, 0])
        if number == 7:
            turn(s, "again", [*page, 100, 0])  # as r0
    s.plan()
    found = []
    for number in range(9):
        found.append(start(s, f"s{number}", [*page, 100 + number, 0, 7, 5]).prefixes == [11])
        s.abort(f"s{number}")
    assert found == [True, False, *[True] * 7]
    assert s.scheduler.clear_cache()
    assert s.scheduler.empty_lcm_blocks() == 63


def test_a_whole_page_is_worth_more_than_its_beginning() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    longer, _ = turn(s, "b", [*written, 8, 1, 2, 3])
    step = start(s, "c", [*longer, 5, 5])
    assert (step.prefixes, len(step.copied["g0"])) == ([18], 1)
    assert len(longer) == 18 == 2 * P + 2, "the page that a left unfinished is whole in b"


def test_blocks_of_a_page_are_copied_one_by_one() -> None:
    s = scenario(Group(granularity=2, packing=4), FULL)
    written, last = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written[:11], *s.fresh(9)])
    old, new = last.row("a"), step.row("b")
    assert step.copied == {
        "g0": [(old[4], new[4]), (old[5], new[5])],
        "g1": [(last.row("a", 1)[1], step.row("b", 1)[1])],
    }
    assert new[:4] == old[:4]
    assert step.zeroed["g0"] == new[6:]


def test_a_window_copies_what_it_still_reads_and_leaves_holes() -> None:
    s = scenario(FULL, swa(3, granularity=1, packing=2))
    written, last = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written, 8, *s.fresh(9)])
    row = step.row("b", 1)
    assert step.prefixes == [13]
    assert [source for source, _ in step.copied["g1"]] == last.row("a", 1)[11:13]
    assert [block > 0 for block in row[:11]] == [slot in (6, 7) for slot in range(11)], "rows 6 and 7 are a hit"
    assert [destination for _, destination in step.copied["g1"]] == row[11:13]
    assert step.zeroed["g1"] == row[13:]


def test_a_window_that_has_passed_on_gives_back_less() -> None:
    """Behind 10 tokens rows 8 and 9 are read, which the window of the ended request had let go of."""
    s = scenario(FULL, swa(3, granularity=1, packing=2))
    prompt = s.fresh(10)
    s.prefill("a", prompt)
    written = list(prompt)
    for token in range(4):
        written.append(token + 7)
        assert s.plan().ids == ["a"]
        s.land("a", token + 8)
    s.finish("a")
    assert start(s, "b", [*written[:10], *s.fresh(9)]).prefixes == [8]
    s.abort("b")
    assert start(s, "c", [*written, 1, 2]).prefixes == [14]


def test_a_partial_page_gives_way_to_whoever_needs_its_block() -> None:
    s = scenario(usable=4)
    written, _ = turn(s, "a", s.fresh(12))
    s.plan()
    assert s.available == 4
    s.prefill("big", 3 * P)
    s.plan()
    s.finish("big")
    step = start(s, "b", [*written, 8, 1])
    assert step.copied == {}
    assert step.prefixes in ([0], [8])


def test_what_is_copied_is_not_evicted_for_the_same_prompt() -> None:
    """It would fit with one block less in the cache, so it starts without the partial page."""
    s = scenario(usable=4)
    written, _ = turn(s, "a", s.fresh(12))
    step = start(s, "b", [*written, *s.fresh(14)])
    assert (step.prefixes, step.inputs, step.copied) == ([8], [19], {})
    assert s.available == 0


def test_what_is_copied_is_not_given_to_another_prompt_of_the_same_plan() -> None:
    """Four blocks: the page that is shared, what is copied, what it is copied to, and one that is not enough for c."""
    s = scenario(usable=4)
    written, _ = turn(s, "a", s.fresh(12))
    s.submit("b", [*written, 8])
    s.submit("c", 8)
    step = s.plan()
    assert (step.ids, step.prefixes, s.available) == (["b"], [13], 2)
    ((source, _),) = step.copied["g0"]
    later = s.plan()
    assert (later.ids, source in later.row("c")) == (["c"], True)


def test_several_prompts_of_one_plan_copy_the_same_page() -> None:
    s = scenario()
    written, last = turn(s, "a", s.fresh(12))
    s.submit("b", [*written, 8, 1])
    s.submit("c", [*written, 8, 2])
    step = s.plan()
    assert step.prefixes == [13, 13]
    assert step.copied["g0"] == [(last.row("a")[1], step.row(request_id)[1]) for request_id in ("b", "c")]


@pytest.mark.parametrize("ends", ["abort", "retract"])
def test_only_a_finish_leaves_a_partial_page(ends: str) -> None:
    s = scenario()
    prompt = s.fresh(12)
    s.prefill("a", prompt)
    s.plan()
    s.land("a", 8)
    if ends == "abort":
        s.abort("a")
    else:
        s.advance(named(ForwardEvent.Retract, "a"))
        s.finish("a")
    assert start(s, "b", [*prompt, 7, 8, 1]).prefixes[0] % P == 0


def test_a_prompt_that_is_cancelled_before_it_runs_leaves_no_trace() -> None:
    s = scenario()
    written, last = turn(s, "a", s.fresh(12))
    s.plan()
    before = s.available
    start(s, "b", [*written, 8, 1])
    s.abort("b")
    step = start(s, "c", [*written, 8, 2])
    assert step.copied == {"g0": [(last.row("a")[1], step.row("c")[1])]}
    s.abort("c")
    assert (s.available, s.scheduler.active_lcm_blocks()) == (before, 0)


def test_a_retracted_request_comes_back_behind_a_partial_page() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    start(s, "b", [*written, 8, 1])
    s.land("b", 2)
    s.advance(named(ForwardEvent.Retract, "b"))
    step = s.plan()
    assert (step.ids, step.prefixes, step.inputs) == (["b"], [13], [3])


def test_clearing_the_cache_forgets_partial_pages() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    s.plan()
    assert (s.available, s.scheduler.empty_lcm_blocks(), s.scheduler.active_lcm_blocks()) == (63, 61, 0)
    assert s.scheduler.clear_l1_cache()
    assert s.scheduler.empty_lcm_blocks() == 63
    assert start(s, "b", [*written, 1, 2]).prefixes == [0]


def test_a_chunk_that_starts_inside_a_page_is_followed_by_others() -> None:
    s = scenario(budget=6)
    prompt = s.fresh(6)
    turn(s, "a", prompt)
    rest = s.fresh(15)
    step = start(s, "b", [*prompt, 7, *rest])
    assert (step.prefixes, step.inputs) == ([7], [6])
    s.land("b")
    step = s.plan()
    assert (step.prefixes, step.inputs, step.copied) == ([13], [6], {})
    s.land("b")
    assert s.plan().prefixes == [19]
    s.land("b", 7)
    s.finish("b")
    assert start(s, "c", [*prompt, 7, *rest, 1]).prefixes == [22]


def test_the_router_hears_of_whole_pages_only() -> None:
    s = scenario(usable=4, enable_kv_cache_events=True)
    written, _ = turn(s, "a", s.fresh(12))
    stored, removed = drain(s)
    assert ([event.token_ids for event in stored], removed) == ([written[:8]], [])
    s.submit("big", 3 * P)
    s.plan()
    stored, removed = drain(s)
    assert (stored, len(removed)) == ([], 1)


def test_with_a_host_tier_partial_pages_stay_on_the_device() -> None:
    s = TierScenario((FULL,), 4, 8, P=P, reuse_partial_pages=True)
    s.acknowledges = True
    written, _ = turn(s, "a", s.fresh(12))
    s.plan()
    assert s.cached == 1
    step = start(s, "b", [*written, 8, 1])
    assert (step.prefixes, load_backs(step), len(step.copied["g0"])) == ([13], [], 1)
    s.abort("b")
    s.prefill("big", 4 * P - 1)
    s.plan()
    s.abort("big")
    step = start(s, "c", [*written, 8, 1])
    assert (step.prefixes, len(load_backs(step)), step.copied) == ([8], 1, {})
    assert write_backs(step) == []


def test_a_partial_page_is_found_behind_what_the_host_brings_back() -> None:
    """In a window, what goes first of one request is not always its end."""
    s = TierScenario((swa(16),), 4, 8, P=P, reuse_partial_pages=True)
    s.acknowledges = True
    written, last = turn(s, "a", s.fresh(12))
    s.plan()
    s.prefill("x", 2 * P)
    s.abort("x")
    step = start(s, "b", [*written, 8, 1])
    row = step.row("b")
    (op,) = load_backs(step)
    assert [transfer.destination for transfer in op.transfers] == row[:1]
    assert (step.prefixes, step.inputs, step.copied) == ([13], [2], {"g0": [(last.row("a")[1], row[1])]})


@pytest.mark.parametrize(
    ("groups", "fields", "words"),
    [
        ((FULL,), {"role": SchedulerConfig.Role.P}, "reuse_partial_pages needs role Fused"),
        ((FULL,), {"role": SchedulerConfig.Role.D}, "reuse_partial_pages needs role Fused"),
        ((FULL,), {"disable_prefix_cache": True}, "reuse_partial_pages needs disable_prefix_cache False"),
        ((FULL, STATE), {}, "reuse_partial_pages: cache group 'g1' has family State"),
        ((FULL, replayable(4)), {}, "reuse_partial_pages: cache group 'g1' is replayable"),
    ],
)
def test_what_cannot_be_taken_over_inside_a_page_is_refused(
    groups: tuple[Group, ...], fields: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Scheduler(make_config(groups, 63, P=P, reuse_partial_pages=True, **fields))  # pyright: ignore[reportArgumentType]


def test_forks_of_a_prompt_that_starts_inside_a_page_take_its_blocks_over() -> None:
    s = scenario()
    written, _ = turn(s, "a", s.fresh(12))
    prompt = [*written, 8, *s.fresh(6)]
    s.scheduler.submit_requests([spec("b", prompt), spec("f", prompt, fork_of="b")])
    first = s.plan()
    assert (first.ids, first.prefixes) == (["b"], [13])
    s.land("b", 1)
    second = s.plan()
    assert second.prefixes[second.ids.index("f")] == 19
    assert second.copied == {"g0": [(first.row("b")[2], second.row("f")[2])]}
