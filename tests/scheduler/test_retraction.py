"""Who gives way when the cache is full, and how they come back (scenarios S-RT of the fused role)."""

import pytest

from tokenspeed_jax.scheduler import ForwardEvent

from .scenario import FULL, Scenario, extend_result, named, real, reserve, swa

TWO_FULL = (FULL, FULL)


def blocked_pair() -> Scenario:
    """r1 and r2 fill the pool and cannot grow; r2's last result is still out."""
    s = Scenario(TWO_FULL, 12)
    s.submit("r1", 4)
    s.submit("r2", 4)
    s.plan()
    assert s.available == 0
    for token in (1, 2):
        s.land("r1", token)
        s.land("r2", token)
        assert s.plan().ids == ["r1", "r2"]
    s.land("r1", 3)
    return s


def decode_until_blocked(s: Scenario, *ids: str) -> None:
    """Decodes and lands until a round schedules nobody."""
    for token in range(100):
        step = s.plan()
        if not step.ids:
            return
        s.advance(*(extend_result(request_id, [token]) for request_id in step.ids))
    pytest.fail(f"{ids} never blocked")


def test_rt1_nobody_gives_way_while_the_chosen_victim_has_a_result_out() -> None:
    s = blocked_pair()
    assert s.plan().ids == []
    assert (s.scheduler.num_retractions(), s.scheduler.waiting_size(), s.scheduler.decoding_size()) == (0, 0, 2)


def test_rt2_rt3_a_quiescent_victim_gives_way_and_returns_with_its_output_as_prompt() -> None:
    s = blocked_pair()
    s.land("r2", 3)
    assert s.plan().ids == []
    assert (s.available, s.scheduler.waiting_size(), s.scheduler.decoding_size()) == (6, 1, 1)
    assert s.scheduler.num_retractions() == 1
    assert s.plan().ids == ["r2"]
    s.land("r2", 4)
    s.finish("r2")
    step = s.plan()
    assert (step.ids, step.batch.prefill_lengths) == (["r1"], [7])
    assert step.prefixes[0] + step.inputs[0] == 7
    assert s.scheduler.request_token_size("r1") == 7


def blocked_unequal(budget: int = 64) -> Scenario:
    """a (6 prompt tokens) and b (4) run until they block; a has been retracted."""
    s = Scenario(TWO_FULL, 14, budget=budget)
    s.submit("a", 6)
    s.submit("b", 4)
    landed = dict.fromkeys("ab", 0)
    while s.scheduler.num_retractions() == 0:
        step = s.plan()
        for row, request_id in enumerate(step.ids):
            chunk = row < step.batch.num_extends()
            whole = not chunk or step.prefixes[row] + step.inputs[row] == step.batch.prefill_lengths[row]
            s.land(request_id, *([1] if whole else []))
            landed[request_id] += whole
    return s


def test_rt4_the_victim_is_who_releases_most() -> None:
    s = blocked_unequal()
    assert (s.scheduler.request_token_size("a"), s.available, s.scheduler.waiting_size()) == (9, 8, 1)


def test_rt5_a_retracted_request_is_prefilled_in_chunks() -> None:
    s = blocked_unequal(budget=4)
    s.abort("b")
    # What a had computed is cached and would leave one token to compute, in no chunks.
    assert s.scheduler.clear_l1_cache()
    step = s.plan()
    assert (step.ids, step.prefixes, step.inputs, step.batch.prefill_lengths) == (["a"], [0], [4], [9])
    with pytest.raises(RuntimeError):
        s.land("a", 5)
    s.land("a")
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([4], [4])
    s.land("a")
    step = s.plan()
    assert (step.prefixes, step.inputs) == ([8], [1])


def half_prefilled() -> tuple[Scenario, list[int]]:
    s = Scenario(TWO_FULL, 18, budget=8)
    s.prefill("done", 4)
    half = s.fresh(16)
    s.submit("half", half)
    assert s.plan().inputs == [8]
    s.submit("waiting", 2)
    return s, half


def test_rt6_an_unfinished_prompt_gives_way_before_any_decode() -> None:
    s, _ = half_prefilled()
    s.land("half")
    step = s.plan()
    assert step.ids == ["done"]
    assert (s.scheduler.waiting_size(), s.available, s.scheduler.num_retractions()) == (2, 12, 1)


def test_rt7_an_unfinished_prompt_does_not_give_way_with_its_chunk_out() -> None:
    s, _ = half_prefilled()
    assert s.plan().ids == ["done"]
    assert s.scheduler.num_retractions() == 0
    s.land("done", 1)
    s.land("half")
    s.plan()
    assert s.scheduler.num_retractions() == 1


def test_rt8_a_retracted_prompt_takes_over_no_more_than_it_had_computed() -> None:
    s, half = half_prefilled()
    s.land("half")
    s.plan()
    s.land("done", 1)
    s.finish("done")
    step = s.plan()
    assert step.ids[0] == "half"
    assert step.prefixes[0] <= 8
    assert s.scheduler.request_token_size("half") == len(half)


def test_rt9_a_lone_request_that_outgrows_the_pool_gives_way_to_one_that_fits() -> None:
    s = Scenario(TWO_FULL, 8)
    s.prefill("a", 6)
    decode_until_blocked(s, "a")
    assert (s.scheduler.num_retractions(), s.available) == (1, 8)
    s.submit("d", 6)
    assert s.plan().ids == ["d"]
    assert s.available == 0


def test_rt10_the_blocked_first_is_granted_in_the_round_of_a_later_retraction() -> None:
    s = Scenario(TWO_FULL, 24)
    for request_id, length in (("r8", 8), ("r6", 6), ("r4", 4)):
        s.submit(request_id, length)
    retractions = 0
    for token in range(40):
        step = s.plan()
        if s.scheduler.num_retractions() > retractions:
            retractions += 1
            if retractions == 1:
                assert (s.scheduler.request_token_size("r8"), s.available, step.ids) == (11, 10, [])
            else:
                assert (step.ids, step.batch.num_extends()) == (["r8"], 1)
                return
        s.advance(*(extend_result(request_id, [token]) for request_id in step.ids))
    pytest.fail("no second retraction")


def test_rt11_wide_decodes_block_once_the_reserve_is_spent() -> None:
    width = 1024
    s = Scenario([FULL], 4, P=4096, budget=16384, decode_input_tokens=width)
    s.submit("r1", 4096, max_new=6000)
    s.submit("r2", 4096, max_new=6000)
    s.plan()
    s.advance(extend_result("r1", [1]), extend_result("r2", [1]))
    for _ in range(4):
        assert s.plan().inputs == [width, width]
        for request_id in ("r1", "r2"):
            s.advance(extend_result(request_id, range(width)), reserve(request_id, width))
    assert s.plan().ids == []
    assert (s.scheduler.num_retractions(), s.available) == (1, 2)
    s.finish("r2")
    step = s.plan()
    assert (step.ids, step.inputs, step.prefixes) == (["r1"], [4097], [4096])


def test_rt13_when_everybody_is_covered_the_last_resort_still_moves_someone() -> None:
    s = Scenario([swa(8)], 7)
    assert s.scheduler.max_single_request_tokens() == 14
    s.submit("r1", 2, max_new=12)
    s.submit("r2", 2, max_new=12)
    held: dict[str, int] = {}
    for token in range(30):
        step = s.plan()
        if s.scheduler.num_retractions() == 1:
            break
        held = {request_id: real(step.row(request_id)) for request_id in step.ids}
        s.advance(*(extend_result(request_id, [token]) for request_id in step.ids))
    assert token == 7
    (running,) = step.ids
    (victim,) = {"r1", "r2"} - {running}
    assert (held[victim], step.batch.num_extends()) == (4, 0)


@pytest.mark.parametrize(("declared", "victim"), [(6, "small"), (0, "large")])
def test_whose_reserve_covers_the_rest_does_not_give_way(declared: int, victim: str) -> None:
    s = Scenario([FULL], 9)
    s.submit("large", 8, max_new=declared)
    s.submit("small", 2)
    for token in range(20):
        step = s.plan()
        if s.scheduler.num_retractions() > 0:
            break
        assert step.ids == ["large", "small"]
        s.advance(*(extend_result(request_id, [token]) for request_id in step.ids))
    assert s.scheduler.num_retractions() == 1
    # The other one decodes on, in this round or in the next.
    assert {*step.ids, *s.plan().ids} == {"large", "small"} - {victim}


@pytest.mark.parametrize("landed", [True, False])
def test_rt15_a_runtime_retraction_starts_the_request_again(landed: bool) -> None:
    s = Scenario([FULL], 8)
    s.submit("r", 4)
    s.plan()
    if landed:
        s.land("r", 9)
    s.advance(named(ForwardEvent.Retract, "r"))
    assert (s.scheduler.waiting_size(), s.available) == (1, 8)
    assert s.plan().batch.prefill_lengths == [5 if landed else 4]


def test_rt16_results_may_land_out_of_order_within_a_prompt() -> None:
    s = Scenario([FULL], 8, budget=2)
    s.submit("r", 4)
    s.plan()
    s.plan()
    s.land("r", 9)
    assert s.scheduler.prefilling_size() == 1
    s.land("r")
    with pytest.raises(RuntimeError, match="no forward in flight"):
        s.land("r")
    assert s.scheduler.request_token_size("r") == 5


def test_only_the_schedulers_own_retractions_raise_the_headroom() -> None:
    s = Scenario([FULL], 30, P=1024, budget=20480)
    s.submit("r", 1023, max_new=20000)
    assert len(s.plan().row("r")) == 5  # 1023 + 4096 tokens
    s.land("r", 1)
    s.advance(named(ForwardEvent.Retract, "r"))
    assert s.scheduler.num_retractions() == 1
    assert len(s.plan().row("r")) == 5  # 1024 + 4096 tokens


def test_a_request_whose_headroom_was_too_short_comes_back_with_more() -> None:
    width = 1024
    s = Scenario([FULL], 12, P=1024, budget=20480, decode_input_tokens=width)
    for request_id in ("r1", "r2"):
        s.submit(request_id, 1024, max_new=8000)
    assert len(s.plan().row("r1")) == 5
    s.advance(extend_result("r1", [1]), extend_result("r2", [1]))
    while s.scheduler.num_retractions() == 0:
        for request_id in s.plan().ids:
            s.advance(extend_result(request_id, range(width)), reserve(request_id, width))
    (victim,) = [r for r in ("r1", "r2") if s.scheduler.waiting_size() == 1 and r not in s.plan().ids]
    s.abort({"r1": "r2", "r2": "r1"}[victim])
    size = s.scheduler.request_token_size(victim)
    remaining = 8000 - (size - 1024)
    assert remaining > 0
    row = s.plan().row(victim)
    assert len(row) == -(-(size + min(remaining, 2 * 4096)) // 1024)
