"""What operators ask of a running engine: its load, an empty prefix cache, a trace."""

import dataclasses
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokenspeed_jax import Engine, EngineClosed, ProfilerError, SamplingParams
from tokenspeed_jax.engine.activity import Activity, take_activity
from tokenspeed_jax.engine.loop import StepLoop
from tokenspeed_jax.engine.profiler import Profiler
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.requests import RequestState
from tokenspeed_jax.engine.stats import StatsCollector

from .conftest import EngineFactory

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture
def engine(tiny_engine: EngineFactory) -> Engine:
    return tiny_engine("llama", prefix_granularity=64)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def test_a_flushed_cache_has_forgotten_every_prefix(engine: Engine) -> None:
    prompts = [ids(seed, 100) for seed in range(3)]
    engine.generate(prompts, GREEDY)
    assert [output.cached_tokens for output in engine.generate(prompts, GREEDY)] == [64] * 3
    assert engine.flush_cache()
    outputs = engine.generate(prompts, GREEDY)
    assert [output.cached_tokens for output in outputs] == [0] * 3


def test_a_cache_in_use_is_left_as_it_is(engine: Engine) -> None:
    prompt = ids(5, 100)
    cold = engine.generate(prompt, GREEDY)[0]
    started, ended = threading.Event(), threading.Event()

    def watch(delta: Any) -> None:
        started.set()
        if delta.finish_reason is not None:
            ended.set()

    request = engine.submit(prompt, dataclasses.replace(GREEDY, max_tokens=400), on_delta=watch)
    assert started.wait(60)
    assert not engine.flush_cache()
    engine.abort(request)
    assert ended.wait(60)
    warm = engine.generate(prompt, GREEDY)[0]
    assert (warm.cached_tokens, warm.samples[0].token_ids) == (64, cold.samples[0].token_ids)
    assert engine.flush_cache()


def test_stats_count_the_tokens_and_parents_of_live_samples(engine: Engine) -> None:
    params = dataclasses.replace(GREEDY, n=3, max_tokens=20)
    seen: list[tuple[int, int]] = []
    received = [0, 0, 0]
    ended: set[int] = set()
    done = threading.Event()

    def watch(delta: Any) -> None:
        received[delta.sample_index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            ended.add(delta.sample_index)
        expected = sum(30 + count for index, count in enumerate(received) if index not in ended)
        seen.append((engine.stats().live_tokens, expected))
        if len(ended) == 3:
            done.set()

    engine.submit(ids(7, 30), params, on_delta=watch)
    assert done.wait(120)
    assert len(seen) == 60
    assert all(counted == expected for counted, expected in seen)
    stats = engine.stats()
    assert (stats.live_tokens, stats.parents_in_use, stats.kv_usage) == (0, 0, 0.0)
    assert stats.num_parents == engine.memory_report.num_parents > 0


def test_aborted_requests_leave_no_tokens_behind(engine: Engine) -> None:
    ended = threading.Semaphore(0)

    def watch(delta: Any) -> None:
        if delta.finish_reason is not None:
            ended.release()

    # More than run at once, so that some are aborted while they wait.
    requests = [
        engine.submit(ids(seed, 20), dataclasses.replace(GREEDY, max_tokens=300), on_delta=watch) for seed in range(24)
    ]
    for request in requests:
        engine.abort(request)
    for _ in requests:
        assert ended.acquire(timeout=120)
    assert engine.stats().live_tokens == 0


def test_activity_is_what_requests_hold_between_two_steps(engine: Engine) -> None:
    assert engine.flush_cache()
    looks: list[Future[Activity]] = []
    done = threading.Semaphore(0)

    def watch(delta: Any) -> None:
        if not looks:
            looks.append(engine.activity())
        if delta.finish_reason is not None:
            done.release()

    engine.submit(ids(9, 100), dataclasses.replace(GREEDY, n=2, max_tokens=30), on_delta=watch)
    for _ in range(2):
        assert done.acquire(timeout=120)
    during = looks[0].result(60)
    (request,) = during.requests
    assert (request.phase, request.prompt_tokens, request.cached_tokens, request.samples) == ("decode", 100, 0, 2)
    assert 1 <= request.output_tokens < 60
    assert 0.0 < request.age < 120.0
    assert during.parent_uses.shape == (engine.memory_report.num_parents,)
    assert (during.parent_uses > 0).any()
    after = engine.activity().result(60)
    assert after.requests == ()
    assert not (after.parent_uses > 0).any()
    assert (after.parent_uses < 0).any()


def request_state(name: str, prompt_tokens: int, output_tokens: int) -> RequestState:
    state = RequestState(name, [5] * prompt_tokens, GREEDY, RequestOptions(), 4, on_delta=lambda _: None)
    state.samples.append(SimpleNamespace(token_ids=[7] * output_tokens))  # type: ignore[arg-type]
    return state


def test_activity_lists_the_oldest_of_each_phase() -> None:
    requests = [request_state(name, index + 1, index % 2) for index, name in enumerate("abcdefgh")]
    queued = {"a", "c", "d", "e", "h"}
    scheduler = SimpleNamespace(lcm_block_uses=lambda: np.array([1, -1, 0]))

    def listed(most: int) -> list[tuple[str, int]]:
        activity = take_activity(scheduler, requests, queued, most)  # type: ignore[arg-type]
        return [(request.phase, request.prompt_tokens) for request in activity.requests]

    waiting = [("waiting", length) for length in (1, 3, 4, 5, 8)]
    assert listed(9) == [("decode", 2), ("decode", 6), ("prefill", 7), *waiting]
    assert listed(2) == [("decode", 2), ("decode", 6), ("waiting", 1), ("waiting", 3)]
    assert listed(0) == []


@pytest.mark.parametrize("ends_by", ["answer", "failure"])
def test_a_question_that_nobody_waits_for_any_more_harms_nobody(ends_by: str) -> None:
    loop = idle_loop(SimpleNamespace(lcm_block_uses=lambda: np.zeros(1, np.int32)))
    gate = threading.Event()

    def hold() -> None:
        gate.wait(30)
        if ends_by == "failure":
            raise OSError("injected")

    loop.call(hold)
    given_up, kept = loop.activity(1), loop.activity(1)
    assert given_up.cancel()
    gate.set()
    if ends_by == "failure":
        with pytest.raises(EngineClosed):
            kept.result(30)
        assert isinstance(loop.failure, OSError)
    else:
        assert kept.result(30).requests == ()
        assert loop.is_healthy
    loop.close()


def test_a_receiver_that_waits_for_the_loop_is_told_that_it_cannot(engine: Engine) -> None:
    errors: list[Exception] = []
    done = threading.Event()

    def watch(delta: Any) -> None:
        try:
            engine.flush_cache()
        except RuntimeError as error:
            errors.append(error)
        if delta.finish_reason is not None:
            done.set()

    engine.submit(ids(8, 10), GREEDY, on_delta=watch)
    assert done.wait(60)
    assert len(errors) == 4


def idle_loop(scheduler: object) -> StepLoop:
    """A step loop that never gets to a step."""
    stats = StatsCollector(1, prefix_caching=True)
    return StepLoop(scheduler, None, None, stats, overlap_depth=1, eos_token_ids=())  # type: ignore[arg-type]


def test_answers_and_errors_reach_who_asks_and_the_loop_goes_on() -> None:
    loop = idle_loop(SimpleNamespace(clear_cache=lambda: True))
    with pytest.raises(ZeroDivisionError):
        loop.ask(lambda: 1 // 0)
    assert loop.is_healthy
    assert loop.ask(lambda: 5) == 5
    assert loop.flush_cache()
    loop.close()
    with pytest.raises(EngineClosed):
        loop.flush_cache()


@pytest.mark.parametrize("ends_by", ["close", "failure"])
def test_whoever_waits_when_the_loop_ends_is_told(ends_by: str) -> None:
    loop = idle_loop(SimpleNamespace(clear_cache=lambda: True))
    entered, gate = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(30)

    def fail() -> None:
        raise OSError("injected")

    loop.call(hold)
    assert entered.wait(30)
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(loop.flush_cache())
        except EngineClosed as error:
            answers.append(error)

    if ends_by == "failure":
        loop.call(fail)
    waiting = threading.Thread(target=ask)
    waiting.start()
    while len(loop._inbox) < (2 if ends_by == "failure" else 1):
        pass
    closing = threading.Thread(target=loop.close)
    if ends_by == "close":
        closing.start()
        while not loop._inbox.is_closing:
            pass
    gate.set()
    waiting.join(30)
    assert not waiting.is_alive()
    assert isinstance(answers[0], EngineClosed)
    loop.close()


def test_a_trace_runs_once_and_is_written_when_it_ends(tmp_path: Path) -> None:
    first, second = Profiler(), Profiler()
    with pytest.raises(ProfilerError, match="no trace runs"):
        first.stop()
    first.start(str(tmp_path / "a"))
    with pytest.raises(ProfilerError, match="runs already"):
        first.start(str(tmp_path / "b"))
    with pytest.raises(ProfilerError, match="cannot start"):
        second.start(str(tmp_path / "b"))
    first.stop()
    assert list((tmp_path / "a").rglob("*.xplane.pb"))
    assert not (tmp_path / "b").exists()
    second.start(str(tmp_path / "b"))
    second.close()
    assert list((tmp_path / "b").rglob("*.xplane.pb"))
    second.close()


def test_a_trace_that_cannot_be_written_is_an_error_and_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    profiler = Profiler()
    profiler.start(str(tmp_path / "file" / "folder"))
    with pytest.raises(ProfilerError, match="cannot write"):
        profiler.stop()
    profiler.start(str(tmp_path / "good"))
    profiler.stop()
    assert list((tmp_path / "good").rglob("*.xplane.pb"))


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_no_step_runs_after_the_last_token_that_was_asked_for(engine: Engine, max_tokens: int) -> None:
    before = engine.stats().steps
    engine.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    assert engine.stats().steps - before == max_tokens


def watched(engine: Engine, prompt: list[int], params: SamplingParams) -> list[Any]:
    """All deltas of a request."""
    deltas, ended = [], threading.Semaphore(0)

    def watch(delta: Any) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            ended.release()

    engine.submit(prompt, params, on_delta=watch)
    for _ in range(params.n):
        assert ended.acquire(timeout=120)
    return deltas


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_are_measured(tiny_engine: EngineFactory, overlap: bool) -> None:
    engine = tiny_engine("llama", prefix_granularity=64, overlap_schedule=overlap)
    before, begun = engine.stats(), time.monotonic()
    for seed in range(2):
        engine.generate([ids(40 + seed, 100), ids(50 + seed, 30)], dataclasses.replace(GREEDY, max_tokens=12))
    after, took = engine.stats(), time.monotonic() - begun
    # The last of the twelve tokens is never computed on; with overlap nothing runs in vain, since the end is known.
    assert after.step_tokens.total - before.step_tokens.total == 2 * (100 + 30 + 2 * 11)
    assert after.step_tokens.count == after.step_seconds.count == after.steps
    assert 0 < after.step_seconds.total - before.step_seconds.total < took
    in_time, late = after.overlapped_steps - before.overlapped_steps, after.late_steps - before.late_steps
    # Two stretches of work, or one if the second request was there before the loop had noticed that it was idle.
    assert after.steps - before.steps - 2 <= in_time + late <= after.steps - before.steps
    assert (in_time == 0) or overlap
    assert after.compile_seconds > 0


def test_samples_say_when_they_were_scheduled(engine: Engine) -> None:
    submitted = time.monotonic()
    deltas = watched(engine, ids(60, 30), dataclasses.replace(GREEDY, n=2))
    for index in range(2):
        (moment,) = {delta.scheduled_at for delta in deltas if delta.sample_index == index}
        assert submitted < moment < time.monotonic()


def test_a_hit_is_counted_for_its_cache_group(engine: Engine) -> None:
    prompt = ids(61, 100)
    engine.generate(prompt, GREEDY)
    before = engine.stats().group_hit_tokens
    assert list(before) == [group.group_id for group in engine.memory_report.groups]
    engine.generate(prompt, GREEDY)
    assert engine.stats().group_hit_tokens == {group: tokens + 64 for group, tokens in before.items()}


def test_a_step_is_in_time_if_the_one_before_still_runs_behind_its_dispatch() -> None:
    loop = idle_loop(SimpleNamespace())

    def dispatched(*predecessors: bool) -> tuple[int, int]:
        """Overlapped and late steps, once a step was dispatched behind one that has landed (none) or ended or not."""
        loop._in_flight.extend(
            SimpleNamespace(packed=SimpleNamespace(is_ready=lambda x=ended: x)) for ended in predecessors
        )
        loop._observe_overlap()
        loop._in_flight.clear()
        stats = loop._stats.snapshot(arena_bytes=0, compilations_after_warmup=0, compile_seconds=0.0)
        return stats.overlapped_steps, stats.late_steps

    assert dispatched() == (0, 0)  # the first one after a time without work
    assert dispatched(False) == (1, 0)
    assert dispatched(True) == (1, 1)
    assert dispatched() == (1, 2)
    loop.close()


@pytest.mark.parametrize(("in_time", "late", "efficiency"), [(0, 0, 1.0), (3, 1, 0.75), (0, 2, 0.0)])
def test_overlap_efficiency_is_the_share_of_steps_in_time(in_time: int, late: int, efficiency: float) -> None:
    stats = StatsCollector(1, prefix_caching=True)
    for _ in range(in_time):
        stats.observe_dispatch(overlapped=True)
    for _ in range(late):
        stats.observe_dispatch(overlapped=False)
    seen = stats.snapshot(arena_bytes=0, compilations_after_warmup=0, compile_seconds=0.0)
    assert seen.overlap_efficiency == efficiency
