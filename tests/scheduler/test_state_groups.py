"""Recurrent state: what is kept of it, what of it may be shared, and how chunks are cut for it (scenarios S-ST)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent

from .scenario import FULL, STATE, Group, Scenario, Step, extend_result, named, real, reserve, swa

PAIR = (FULL, STATE)


def shape(row: list[int]) -> list[bool]:
    """Which slots hold a snapshot."""
    return [block > 0 for block in row]


def scenario(groups: tuple[Group, ...] = PAIR, usable: int = 63, **fields: object) -> Scenario:
    return Scenario(groups, usable, **({"P": 4} | fields))


def probe(s: Scenario, prompt: list[int], request_id: str = "probe") -> Step:
    """The first step of a prompt, which is then given up."""
    s.submit(request_id, prompt)
    step = s.plan()
    assert request_id in step.ids
    s.abort(request_id)
    s.plan()
    return step


def hit(s: Scenario, prompt: list[int]) -> int:
    step = probe(s, prompt)
    return step.prefixes[step.ids.index("probe")]


def test_st1_unfinished_chunks_end_on_boundaries() -> None:
    s = scenario(budget=6)
    s.submit("r", 12)
    rows = []
    for _ in range(3):
        step = s.plan()
        rows.append((step.prefixes, step.inputs))
        s.land("r", *([1] if step.prefixes == [8] else []))
    assert rows == [([0], [4]), ([4], [4]), ([8], [4])]


def test_st2_one_forward_keeps_the_last_boundary_and_the_end() -> None:
    s = scenario()
    s.submit("a", 10)
    s.submit("b", 10)
    step = s.plan()
    assert step.inputs == [10, 10]
    for request_id in ("a", "b"):
        assert shape(step.row(request_id, 1)) == [False, True, True, True]


def test_st4_the_first_decode_finds_its_block_reserved() -> None:
    s = scenario(budget=12)
    s.submit("r", 12)
    step = s.plan()
    assert len(step.row("r")) == 4
    assert shape(step.row("r", 1)) == [False, False, True, True]
    assert len(step.zeroed["g1"]) == 2
    s.land("r", 1)
    step = s.plan()
    assert step.ids == ["r"]
    assert step.zeroed == {"g0": [], "g1": []}


def test_st5_a_later_chunk_reads_the_snapshot_of_the_one_before() -> None:
    s = scenario(budget=12, overlap_schedule_depth=1)
    s.submit("r", 16)
    first = s.plan().row("r", 1)
    assert shape(first) == [False, False, True]
    second = s.plan().row("r", 1)
    assert shape(second) == [False, False, True, True, True]
    assert second[2] == first[2]


def test_snapshots_finer_than_the_identity_grain() -> None:
    s = scenario((FULL, Group(granularity=2, state=True)), P=8)
    s.submit("r", 13)
    # The boundary at 8 is in slot 3, the end at 13 in slot 6; slot 7 is to move on to.
    assert shape(s.plan().row("r", 1)) == [False] * 3 + [True] * 5
    s.land("r", 1)
    assert shape(s.plan().row("r", 1)) == [False] * 6 + [True] * 2


@pytest.mark.parametrize(("budget", "ids", "inputs"), [(4, ["p"], [4]), (5, ["p", "d"], [4, 1])])
def test_st6_mixed_rounds_keep_a_whole_boundary_for_the_prompt(budget: int, ids: list[str], inputs: list[int]) -> None:
    s = scenario(budget=budget, enable_mixed_prefill_decode=True)
    s.prefill("d", 3)
    s.submit("p", 8)
    step = s.plan()
    assert (step.ids, step.inputs) == (ids, inputs)


@pytest.mark.parametrize("obstacle", [{"max_batch_size": 1}, {"usable": 5}])
def test_a_prompt_that_cannot_move_keeps_no_budget_from_decodes(obstacle: dict[str, int]) -> None:
    s = scenario(**({"budget": 4, "enable_mixed_prefill_decode": True} | obstacle))  # pyright: ignore[reportArgumentType]
    s.prefill("d", 3)
    s.submit("p", 4)
    for token in range(2):
        assert s.plan().ids == ["d"]
        s.land("d", token)
    assert s.scheduler.num_retractions() == 0
    s.finish("d")
    assert s.plan().ids == ["p"]


def test_st7_a_promotion_stop_holds_the_line() -> None:
    s = scenario(P=2, budget=8)
    seed = s.fresh(12)
    s.submit("seed", seed)
    s.plan()
    s.land("seed")
    s.plan()
    s.land("seed", 1)
    s.finish("seed")
    s.submit("first", seed[:6] + s.fresh(4))
    s.submit("second", 2)
    step = s.plan()
    assert (step.ids, step.inputs, step.prefixes) == (["first"], [6], [0])


def test_st8_a_promoted_boundary_is_hit_by_the_next_prompt() -> None:
    s = scenario((FULL, STATE, STATE, STATE), P=2)
    shared = s.fresh(8)
    assert s.life("seed", shared + s.fresh(3)).inputs == [11]
    s.submit("promote", shared + s.fresh(3))
    assert (step := s.plan()).inputs == [8]
    assert step.prefixes == [0]
    s.land("promote")
    assert (step := s.plan()).inputs == [3]
    s.land("promote", 1)
    s.finish("promote")
    assert hit(s, shared + s.fresh(3)) == 8


@pytest.mark.parametrize(
    ("groups", "lost"), [((FULL, STATE), 8), ((FULL, STATE, swa(4)), 8), ((FULL,), 0), ((STATE,), 0)]
)
def test_history_without_a_snapshot_at_its_end_counts_as_lost_once(groups: tuple[Group, ...], lost: int) -> None:
    s = scenario(groups, P=2)
    shared = s.fresh(8)
    s.life("seed", shared + s.fresh(3))
    assert s.scheduler.num_checkpoint_lost_tokens() == 0
    # The seed left a snapshot at 10 only; this prompt computes the shared tokens again and leaves one at 8.
    s.submit("promote", shared + s.fresh(3))
    if lost:
        assert s.plan().inputs == [8]
        s.land("promote")
    s.plan()
    s.land("promote", 1)
    s.finish("promote")
    s.plan()
    assert s.scheduler.num_checkpoint_lost_tokens() == lost
    s.life("reuse", shared + s.fresh(3))
    assert s.scheduler.num_checkpoint_lost_tokens() == lost


def decode(s: Scenario, stream: list[int], accepted: tuple[int, ...]) -> None:
    """Decode steps of request r that accept so many tokens each; `stream` grows by them."""
    for count in accepted:
        assert s.plan().ids == ["r"]
        tokens = s.fresh(count)
        s.advance(extend_result("r", tokens), reserve("r", count))
        stream += tokens


def test_a_turn_that_takes_up_where_the_last_one_ended_makes_no_stop() -> None:
    s = scenario((FULL, STATE), P=2)
    history = s.fresh(7)
    s.submit("r", history)
    s.plan()
    first = s.fresh(1)
    s.advance(extend_result("r", first))
    history += first
    decode(s, history, (1,) * 4)
    s.finish("r")
    # History is cached to token 10, behind the snapshot at token 6, but nobody else has gone on from there.
    s.submit("second", history + s.fresh(4))
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([6], [10])
    s.land("second", 1)
    s.finish("second")
    # Now somebody has: another way on from the same place may be taken again.
    s.submit("third", history[:10] + s.fresh(6))
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([6], [4])
    s.land("third")
    s.plan()
    s.land("third", 1)
    s.finish("third")
    assert hit(s, history[:10] + s.fresh(6)) == 10


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("accepted", [(1, 4, 1, 4, 3), (4, 4, 4, 4), (2, 3, 1, 1, 4, 2), (1,) * 13])
@pytest.mark.parametrize("groups", [PAIR, (FULL,)])
def test_st9_what_decoding_passes_is_no_snapshot(
    groups: tuple[Group, ...], accepted: tuple[int, ...], finish: bool
) -> None:
    s = scenario(groups, decode_input_tokens=4)
    stream = s.fresh(3)
    s.submit("r", stream)
    s.plan()
    first = s.fresh(1)
    s.advance(extend_result("r", first))
    stream += first
    decode(s, stream, accepted)
    if finish:
        s.finish("r")
    for shared in (4, 8, 12):
        assert hit(s, stream[:shared] + s.fresh(5)) == (0 if STATE in groups else shared)


@pytest.mark.parametrize("accepted", [(1,) * 9, (4, 4, 4), (3, 4, 4), (2, 1, 4, 1)])
def test_st10_history_crossed_while_decoding_stays_cached_without_a_snapshot(accepted: tuple[int, ...]) -> None:
    s = scenario(P=128, budget=256, decode_input_tokens=4)
    stream = s.fresh(124)
    s.submit("r", stream)
    s.plan()
    first = s.fresh(1)
    s.advance(extend_result("r", first))
    stream += first
    decode(s, stream, accepted)
    s.finish("r")
    s.plan()
    assert s.usable - s.scheduler.empty_lcm_blocks() == 1
    assert hit(s, stream + s.fresh(11)) == 0


def test_st14_a_long_prompt_leaves_one_snapshot_per_group() -> None:
    s = scenario((Group(packing=32), STATE, STATE, STATE), 64, P=128, budget=8192)
    prompt = s.fresh(128 * 256)
    s.submit("r", prompt)
    for chunk in range(4):
        assert s.plan().inputs == [8192]
        s.land("r", *([1] if chunk == 3 else []))
    s.finish("r")
    s.plan()
    assert s.usable - s.scheduler.empty_lcm_blocks() == 256 // 32 + 3
    assert hit(s, prompt + s.fresh(5)) == len(prompt)


def test_st15_every_state_group_takes_its_blocks() -> None:
    s = scenario((FULL, STATE, STATE, STATE), 32, P=2)
    for index in range(4):
        s.submit(f"r{index}", 4)
    assert s.plan().ids == ["r0", "r1", "r2"]
    assert (s.available, s.scheduler.waiting_size()) == (32 - 3 * 9, 1)


@pytest.mark.parametrize("budget", [64, 8])
def test_st16_the_prompts_last_boundary_is_shared_and_its_end_is_not(budget: int) -> None:
    s = scenario(budget=budget)
    prompt = s.fresh(10)
    s.submit("r", prompt)
    for _ in range(64 // budget if budget == 64 else 2):
        step = s.plan()
        s.land("r", *([1] if step.prefixes[0] + step.inputs[0] == 10 else []))
    s.plan()
    assert hit(s, prompt + s.fresh(4)) == 8
    stream = [*prompt, 1]
    for token in (2, 3, 4):
        s.land("r", token)
        stream.append(token)
        s.plan()
    s.finish("r")
    # History covers 12 tokens by now, but nobody has left a snapshot there.
    assert hit(s, [*stream[:12], *s.fresh(4)]) == 8


def test_a_boundary_in_the_middle_of_a_chunked_prompt_is_not_kept() -> None:
    s = scenario(budget=8)
    prompt = s.fresh(20)
    s.submit("r", prompt)
    for last in (False, False, True):
        s.plan()
        s.land("r", *([1] if last else []))
    s.finish("r")
    s.plan()
    assert hit(s, prompt[:12] + s.fresh(8)) == 0
    assert hit(s, prompt + s.fresh(4)) == 20


def test_a_shared_snapshot_is_read_and_never_written() -> None:
    s = scenario()
    prompt = s.fresh(8)
    seed = s.life("seed", prompt)
    s.submit("r", prompt + s.fresh(1))
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([8], [1])
    row = step.row("r", 1)
    assert row[:2] == [0, seed.row("seed", 1)[1]]
    assert set(step.zeroed["g1"]) == set(row[2:])


def test_a_refused_chunk_keeps_the_proof_of_its_snapshot() -> None:
    s = scenario(usable=8, budget=8)
    prompt = s.fresh(10)
    s.prefill("d", 4)
    s.plan()
    s.submit("r", prompt)
    assert s.plan().inputs == [8]
    # "d" leaves too little for the second chunk, and the first one is still out, so "r" does not give way either.
    assert s.available == 1
    assert s.plan().ids == ["d"]
    assert s.scheduler.num_retractions() == 0
    s.land("r")
    s.abort("d")
    assert s.plan().inputs == [2]
    s.land("r", 1)
    s.finish("r")
    assert hit(s, prompt + s.fresh(2)) == 8


def test_a_retracted_request_resumes_from_its_prompts_snapshot() -> None:
    s = scenario()
    s.prefill("r", 10)
    s.plan()
    s.land("r", 9)
    s.advance(named(ForwardEvent.Retract, "r"))
    assert s.available == s.usable
    step = s.plan()
    assert (step.batch.prefill_lengths, step.prefixes, step.inputs) == ([12], [8], [4])


def test_rt14_a_lone_request_that_outgrows_the_pool_gives_everything_back() -> None:
    s = scenario(usable=8, P=2)
    s.prefill("r", 4)
    for token in range(100):
        if not s.plan().ids:
            break
        s.land("r", token)
    assert (s.scheduler.num_retractions(), s.scheduler.waiting_size(), s.available) == (1, 1, 8)
    s.abort("r")
    s.plan()
    assert (s.scheduler.waiting_size(), s.available) == (0, 8)


def test_cm4_a_prompt_longer_than_a_chunk_runs_in_the_parents_of_the_bound() -> None:
    fields = {"budget": 8, "disable_prefix_cache": True}
    assert scenario((STATE,), 2, **fields).scheduler.max_single_request_tokens() == 5
    assert scenario((STATE,), 3, **fields).scheduler.max_single_request_tokens() == 9
    s = scenario((STATE,), 4, **fields)
    s.submit("r", 14)
    assert s.plan().inputs == [8]
    s.land("r")
    assert s.plan().inputs == [6]


@pytest.mark.parametrize(("parents", "tokens"), [(284, 417_792), (97, 130_560), (98, 132_096)])
def test_cm8_three_state_groups_leave_the_rest_to_history(parents: int, tokens: int) -> None:
    groups = (Group(packing=12), STATE, STATE, STATE)
    s = scenario(groups, parents, P=128, budget=8192)
    assert s.scheduler.max_single_request_tokens() == tokens


def test_a_decoding_request_holds_what_it_reads_and_what_it_writes() -> None:
    s = scenario((FULL, STATE, swa(3)))
    s.prefill("r", 6)
    for token in range(40):
        step = s.plan()
        assert 1 <= real(step.row("r", 1)) <= 2
        s.land("r", token)
    s.finish("r")
    s.plan()
    assert s.available == s.usable
