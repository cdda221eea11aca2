"""`Engine` as a user calls it: inputs, outputs, streaming, aborts, refusals."""

import asyncio
import dataclasses
import itertools
import threading
import time

import jax
import numpy as np
import pytest

from tokenspeed_jax import (
    CheckpointError,
    ConfigError,
    Engine,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    SamplingParams,
)

from .conftest import GOLDEN, EngineFactory

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=5)


@pytest.fixture
def engine(tiny_engine: EngineFactory) -> Engine:
    return tiny_engine("llama")


def ids(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def test_text_chat_and_token_prompts_mean_the_same(engine: Engine) -> None:
    text = "def main(): return 1"
    messages = [{"role": "user", "content": "hi"}]
    rendered = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    outputs = engine.generate([text, engine.tokenizer.encode(text), messages], GREEDY)
    assert outputs[0].samples == outputs[1].samples
    assert outputs[2].prompt_token_ids == engine.tokenizer.encode(rendered, add_special_tokens=False)
    sample = outputs[0].samples[0]
    assert sample.text == engine.tokenizer.decode(sample.token_ids, skip_special_tokens=True)


def test_a_single_prompt_of_any_kind_is_a_batch_of_one(engine: Engine) -> None:
    for prompt in ("abc", ids(0), [{"role": "user", "content": "abc"}]):
        assert len(engine.generate(prompt, GREEDY)) == 1


def test_the_prompts_of_a_batch_are_planned_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first step with one of them alone would leave room for the tokens of others empty."""
    intake, programs, rows = engine._assembly.intake, engine._assembly.programs, []
    sample, run = intake._sample, programs.run
    monkeypatch.setattr(intake, "_sample", lambda *arguments: (time.sleep(0.05), sample(*arguments))[1])
    monkeypatch.setattr(programs, "run", lambda built: (rows.append(len(built.slots)), run(built))[1])
    engine.generate([ids(seed, 9) for seed in range(4)], GREEDY)
    assert rows[0] == 4


def test_a_batch_that_is_refused_half_way_leaves_no_id_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are counted; a caller may have taken the one that comes next."""
    intake = engine._assembly.intake
    ended = threading.Event()
    monkeypatch.setattr(intake, "_serial", itertools.count(10**6))
    taken = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine.pause()
    engine.submit(
        ids(1), taken, request_id="request-1000002", on_delta=lambda delta: delta.finish_reason and ended.set()
    )
    with pytest.raises(InvalidRequest, match="request-1000002"):
        engine.generate([ids(2), ids(3)], GREEDY)
    assert intake._live_ids._ids == {"request-1000002"}
    assert engine.num_queued_requests == 1
    engine.resume()
    assert ended.wait(60)
    assert len(engine.generate([ids(2), ids(3)], GREEDY)) == 2


def test_a_seeded_request_draws_the_same_whatever_runs_beside_it(engine: Engine) -> None:
    alone = engine.generate(ids(1), RANDOM)[0].samples[0].token_ids
    crowd = [ids(seed, 30) for seed in range(2, 9)]
    noisy = dataclasses.replace(RANDOM, seed=None, top_k=7)
    together = engine.generate([*crowd, ids(1)], [noisy] * len(crowd) + [RANDOM])[-1].samples[0].token_ids
    assert together == alone
    assert engine.generate(ids(1), dataclasses.replace(RANDOM, seed=6))[0].samples[0].token_ids != alone


def test_n_samples_come_in_order_and_differ(engine: Engine) -> None:
    params = dataclasses.replace(RANDOM, n=4, logprobs=True)
    output = engine.generate(ids(1), params)[0]
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 4
    again = engine.generate(ids(1), params)[0]
    assert [s.token_ids for s in again.samples] == [s.token_ids for s in output.samples]
    assert all(len(s.logprobs or ()) == len(s.sampling_logprobs or ()) == 12 for s in output.samples)


def test_score_agrees_with_the_log_probabilities_of_generation(engine: Engine) -> None:
    sample = engine.generate(ids(3), dataclasses.replace(GREEDY, logprobs=True))[0].samples[0]
    scores = engine.score([*ids(3), *sample.token_ids])
    assert scores[0] is None
    assert scores[-12:] == pytest.approx(sample.logprobs, abs=1e-4)


def test_scores_of_completions_are_those_of_each_sequence_alone(engine: Engine) -> None:
    prompts, completions = [ids(3), ids(4), "hello"], [ids(5), [], [7]]
    scores = engine.score(prompts, completions)
    assert [len(score) for score in scores] == [len(completion) for completion in completions]
    assert scores[0] == pytest.approx(engine.score([*ids(3), *ids(5)])[-len(ids(5)) :], abs=1e-5)
    assert scores[2] == pytest.approx(engine.score([*engine.tokenizer.encode("hello"), 7])[-1:], abs=1e-5)
    for arguments, message in [
        (([ids(3)], []), "completions must be one per prompt, got 0 for 1"),
        (("hello", [[7]]), "completions must be one per prompt"),
        (([[]], [[7]]), "prompt must not be empty"),
        (([ids(3)], [[10**6]]), "outside the vocabulary"),
        (([ids(3)], [[7] * engine.max_model_len]), "the limit is max_model_len"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            engine.score(*arguments)
    with pytest.raises(InvalidRequest, match="method must be plain or paged"):
        engine.score(prompts, completions, method="fast")
    full = [7] * engine.max_model_len
    with pytest.raises(InvalidRequest, match="the limit is max_model_len"):
        engine.score(full, method="paged")


def test_stop_ids_stop_strings_and_limits_end_a_sample(engine: Engine) -> None:
    free = engine.generate(ids(4), GREEDY)[0].samples[0]
    token = free.token_ids[5]
    first = free.token_ids.index(token)
    stopped = engine.generate(ids(4), dataclasses.replace(GREEDY, stop_token_ids=[token]))[0].samples[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert stopped.stop_reason == token
    piece = free.text[4:7]
    cut = engine.generate(ids(4), dataclasses.replace(GREEDY, stop=[piece]))[0].samples[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (free.text[: free.text.index(piece)], "stop", piece)
    assert free.finish_reason == "length"


def test_min_tokens_holds_the_end_back(engine: Engine) -> None:
    bias = {engine.tokenizer.eos_token_ids[0]: 100.0}
    params = SamplingParams(max_tokens=12, temperature=0.0, logit_bias=bias)
    assert len(engine.generate(ids(5), params)[0].samples[0].token_ids) == 1
    held = engine.generate(ids(5), dataclasses.replace(params, min_tokens=6))[0].samples[0]
    assert len(held.token_ids) == 7
    assert held.finish_reason == "stop"


def test_penalties_and_bias_change_the_draw_and_survive_in_the_slot(engine: Engine) -> None:
    plain = engine.generate(ids(6), GREEDY)[0].samples[0].token_ids
    banned = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(plain, -100.0))
    assert not set(engine.generate(ids(6), banned)[0].samples[0].token_ids) & set(plain)
    unique = dataclasses.replace(GREEDY, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    tokens = engine.generate(ids(6), unique)[0].samples[0].token_ids
    assert len(set(tokens)) == len(tokens)
    assert engine.generate(ids(6), GREEDY)[0].samples[0].token_ids == plain


def test_a_stream_yields_what_generate_returns(engine: Engine) -> None:
    async def collect() -> tuple[list[int], str, list[str | None]]:
        tokens, text, reasons = [], "", []
        async for delta in engine.stream(ids(7), GREEDY):
            tokens += delta.token_ids
            text += delta.text
            reasons.append(delta.finish_reason)
        return tokens, text, reasons

    tokens, text, reasons = asyncio.run(collect())
    sample = engine.generate(ids(7), GREEDY)[0].samples[0]
    assert (tokens, text) == (sample.token_ids, sample.text)
    assert reasons == [None] * 11 + ["length"]


def test_a_stream_whose_loop_is_gone_is_aborted_quietly(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    before = engine.stats().finished.get("abort", 0)
    loop = asyncio.new_event_loop()
    stream = engine.stream(ids(9), SamplingParams(max_tokens=400, ignore_eos=True))
    loop.run_until_complete(anext(stream))
    loop.close()
    engine.generate(ids(9), SamplingParams(max_tokens=400, ignore_eos=True))  # outlives it, unless nobody aborts
    assert engine.stats().finished.get("abort", 0) == before + 1
    assert caplog.text == ""


def test_leaving_a_stream_aborts_its_request(engine: Engine) -> None:
    async def leave() -> None:
        stream = engine.stream(ids(8), SamplingParams(max_tokens=400, ignore_eos=True), request_id="left")
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    before = engine.stats().finished.get("abort", 0)
    asyncio.run(leave())
    engine.generate(ids(9), GREEDY)
    assert engine.stats().finished.get("abort", 0) == before + 1
    assert engine.stats().running == 0


def test_abort_delivers_what_was_generated_and_is_idempotent(engine: Engine) -> None:
    deltas, started, ended = [], threading.Event(), threading.Event()

    def sink(delta) -> None:
        deltas.append(delta)
        started.set()
        if delta.finish_reason is not None:
            ended.set()

    request_id = engine.submit(ids(10), SamplingParams(max_tokens=400, ignore_eos=True), on_delta=sink)
    assert started.wait(60)
    for _ in range(3):
        engine.abort(request_id)
    assert ended.wait(60)
    engine.abort("never existed")
    assert [delta.finish_reason for delta in deltas].count("abort") == 1


def test_a_running_id_is_taken_and_a_finished_one_is_free(engine: Engine) -> None:
    ended = threading.Event()
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.submit(ids(11), long, request_id="same", on_delta=lambda d: d.finish_reason and ended.set())
    with pytest.raises(InvalidRequest, match="same"):
        engine.submit(ids(11), long, request_id="same", on_delta=lambda _: None)
    engine.abort("same")
    assert ended.wait(60)
    engine.generate(ids(9), GREEDY)
    engine.submit(ids(11), dataclasses.replace(long, max_tokens=1), request_id="same", on_delta=lambda _: None)


def test_a_failing_receiver_ends_its_own_request_only(engine: Engine) -> None:
    def broken(_: object) -> None:
        raise ValueError("the receiver is broken")

    engine.submit(ids(12), SamplingParams(max_tokens=400, ignore_eos=True), on_delta=broken)
    assert len(engine.generate(ids(13), GREEDY)[0].samples[0].token_ids) == 12
    assert engine.is_healthy


@pytest.mark.parametrize(
    ("prompt", "changes", "parameter"),
    [
        ([], {}, "prompt"),
        ([3, 512], {}, "prompt"),
        ([3, -1], {}, "prompt"),
        ([3, 4.5], {}, "prompt"),
        ([3] * 512, {}, "prompt"),
        ([3] * 500, {"max_tokens": 13}, "max_tokens"),
        ([3], {"stop_token_ids": [512]}, "stop_token_ids"),
        ([3], {"logit_bias": {512: 1.0}}, "logit_bias"),
    ],
)
def test_a_refused_request_names_the_parameter_and_submits_nothing(
    engine: Engine, prompt: list[int], changes: dict, parameter: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([ids(14), prompt], [GREEDY, dataclasses.replace(GREEDY, **changes)])
    assert caught.value.parameter == parameter
    assert parameter in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 10**6},
        {"kv_cache_memory_bytes": 1000},
        {"max_num_batched_tokens": 2},
        {"dtype": "int8"},
        {"attention_implementation": "mosaic", "kv_cache_memory_bytes": 16 << 20, "max_model_len": 512},
        {"prefix_granularity": 24},
    ],
)
def test_a_configuration_that_cannot_work_names_the_option(changes: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        Engine(EngineConfig(model=str(GOLDEN / "tiny" / "llama"), disable_progress_bars=True, **changes))
    assert caught.value.field in str(caught.value)


def test_a_default_context_that_does_not_fit_is_lowered_to_what_does(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / "llama"),
        dtype="float32",
        kv_cache_memory_bytes=1 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:
        assert 64 <= engine.max_model_len < 2048
        assert "max_model_len is lowered" in caplog.text
        prompt = ids(15, engine.max_model_len - 4)
        assert len(engine.generate(prompt, dataclasses.replace(GREEDY, max_tokens=4))[0].samples[0].token_ids) == 4


def test_a_closed_engine_ends_its_requests_and_refuses_new_ones() -> None:
    engine = Engine(
        EngineConfig(
            model=str(GOLDEN / "tiny" / "llama"),
            dtype="float32",
            max_model_len=512,
            kv_cache_memory_bytes=4 << 20,
            warmup=False,
            disable_progress_bars=True,
        )
    )
    reasons, ended = [], threading.Event()

    def sink(delta) -> None:
        if delta.finish_reason is not None:
            reasons.append(delta.finish_reason)
            ended.set()

    engine.submit(ids(16), SamplingParams(max_tokens=400, ignore_eos=True), on_delta=sink)
    planes = list(engine._assembly.programs.model.arena.planes.values())
    engine.close()
    engine.close()
    assert ended.wait(60)
    assert reasons == ["abort"]
    assert all(plane.is_deleted() for plane in planes)
    assert not engine.is_healthy
    with pytest.raises(EngineClosed):
        engine.generate(ids(16), GREEDY)
    with pytest.raises(EngineClosed):
        engine.score(ids(16))


def test_a_dying_step_loop_fails_its_requests_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / "llama"),
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=4 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:

        def broken(_: object) -> None:
            raise MemoryError("no room on the device")

        monkeypatch.setattr(engine._assembly.programs, "run", broken)
        with pytest.raises(EngineClosed) as caught:
            engine.generate([ids(1), ids(2)], GREEDY)
        assert isinstance(caught.value.__cause__, MemoryError)
        assert not engine.is_healthy
        with pytest.raises(EngineClosed):
            engine.submit(ids(3), GREEDY, on_delta=lambda _: None)


def test_an_engine_takes_a_model_that_already_exists(engine: Engine) -> None:
    assembly = engine._assembly
    model = assembly.programs.model.structure.module(assembly.programs.weights)
    config = dataclasses.replace(engine.config, model="mine", warmup=False)
    with Engine.from_model(model, config) as other:
        assert other.generate(ids(17), GREEDY)[0].samples[0].token_ids == (
            engine.generate(ids(17), GREEDY)[0].samples[0].token_ids
        )
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            other.generate("text", GREEDY)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(assembly.programs.weights))


def test_a_missing_checkpoint_is_an_error_of_its_own(tmp_path) -> None:
    with pytest.raises(CheckpointError):
        Engine(EngineConfig(model=str(tmp_path)))
