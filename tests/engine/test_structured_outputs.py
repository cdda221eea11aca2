"""Structured outputs in a running engine: always what the constraint says, whatever else runs, and however it runs."""

import dataclasses
import json
import re

import numpy as np
import pytest

from tokenspeed_jax import Engine, InvalidRequest, SamplingParams, StructuredOutputsParams
from tokenspeed_jax.engine.outputs import Sample

from .conftest import EngineFactory

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def constrained(seed: int | None = None, **constraint: object) -> SamplingParams:
    """Greedy without a seed."""
    return SamplingParams(
        max_tokens=200,
        temperature=0.0 if seed is None else 1.0,
        seed=seed,
        structured_outputs=StructuredOutputsParams(**constraint),  # type: ignore[arg-type]
    )


def prompt(seed: int, length: int = 20) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def generate(engine: Engine, *params: SamplingParams, length: int = 20) -> list[Sample]:
    prompts = [prompt(index, length) for index in range(len(params))]
    return [output.samples[0] for output in engine.generate(prompts, list(params))]


CONSTRAINTS = [
    constrained(json=SCHEMA),
    constrained(1, json=SCHEMA),
    constrained(2, json=SCHEMA),
    constrained(regex=r"[a-c]{3,5}-\d+!"),
    constrained(3, regex=r"[a-c]{3,5}-\d{1,20}!"),
    constrained(choice=("yes", "no", "maybe not")),
    constrained(4, choice=("yes", "no", "maybe not")),
    dataclasses.replace(constrained(5, grammar='start: "<" /[xy]{2,9}/ ">"'), presence_penalty=1.0, top_k=5, top_p=0.9),
]
FREE = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=30, seed=9, ignore_eos=True, repetition_penalty=1.3),
]


def check(params: SamplingParams, sample: Sample) -> None:
    """The text is what the constraint says, and the end-of-sequence id ended it."""
    constraint = params.structured_outputs
    assert constraint is not None
    assert sample.finish_reason == "stop", sample
    assert sample.token_ids[-1] == EOS
    if constraint.json is not None:
        value = json.loads(sample.text)
        assert list(value) == ["name", "kind", "sizes"]
        assert len(value["name"]) <= 8
        assert value["kind"] in ("cat", "dog")
        assert len(value["sizes"]) <= 3
        assert all(0 <= size <= 99 for size in value["sizes"])
    elif constraint.regex is not None:
        assert re.fullmatch(constraint.regex, sample.text)
    elif constraint.choice is not None:
        assert sample.text in constraint.choice
    else:
        assert re.fullmatch("<[xy]{2,9}>", sample.text)


def test_constrained_rows_hold_their_constraint_and_leave_their_neighbours_alone(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    batch = [CONSTRAINTS[0], FREE[0], *CONSTRAINTS[1:], FREE[1]]
    together = generate(engine, *batch)
    for index, (params, sample) in enumerate(zip(batch, together, strict=True)):
        if params.structured_outputs is not None:
            check(params, sample)
        alone = engine.generate(prompt(index), params)[0].samples[0]
        assert alone.token_ids == sample.token_ids, index


def test_overlap_changes_nothing(tiny_engine: EngineFactory) -> None:
    batch = [*CONSTRAINTS, *FREE]
    with_overlap = generate(tiny_engine("llama"), *batch)
    without = generate(tiny_engine("llama", overlap_schedule=False), *batch)
    assert [sample.token_ids for sample in with_overlap] == [sample.token_ids for sample in without]
    assert [sample.text for sample in with_overlap] == [sample.text for sample in without]


def test_a_retracted_sample_goes_on_where_its_grammar_was(tiny_engine: EngineFactory) -> None:
    # Undeclared output budgets, no overlap and a pool for one and a half requests, as retraction needs.
    small = {"prefix_granularity": 16, "kernel_page_size": 16, "max_model_len": 232, "overlap_schedule": False}
    batch = [dataclasses.replace(CONSTRAINTS[index % 3], seed=index, max_tokens=None) for index in range(6)]
    engine = tiny_engine("llama", **small)
    roomy = generate(engine, *batch, length=100)
    per_token = engine.memory_report.groups[0].bytes_per_token
    assert per_token is not None
    engine = tiny_engine("llama", **small, kv_cache_memory_bytes=int(1.5 * 232 * per_token))
    tight = generate(engine, *batch, length=100)
    assert engine.stats().retractions > 0
    for params, sample, other in zip(batch, tight, roomy, strict=True):
        check(params, sample)
        assert sample.token_ids == other.token_ids


def test_samples_of_a_request_have_grammars_of_their_own(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    params = dataclasses.replace(CONSTRAINTS[1], n=4)
    samples = engine.generate(prompt(3, 130), params)[0].samples
    for sample in samples:
        check(params, sample)
    assert len({sample.text for sample in samples}) == 4


def test_log_probabilities_are_the_models_and_those_of_what_was_allowed(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    ids = prompt(5)
    params = dataclasses.replace(constrained(7, choice=("a", "b", "c")), logprobs=True, top_logprobs=5)
    sample = engine.generate(ids, params)[0].samples[0]
    assert sample.logprobs is not None
    assert sample.sampling_logprobs is not None
    assert sample.top_logprobs is not None
    scored = engine.score([*ids, *sample.token_ids])[len(ids) :]
    np.testing.assert_allclose(sample.logprobs, np.array(scored, float), atol=2e-3)
    letters = [engine.tokenizer.encode(text, add_special_tokens=False)[0] for text in "abc"]
    others = [engine.score([*ids, letter])[-1] for letter in letters]
    share = sample.logprobs[0] - np.logaddexp.reduce(np.array(others, float))
    assert sample.sampling_logprobs[0] == pytest.approx(share, abs=2e-3)
    assert sample.sampling_logprobs[-1] == pytest.approx(0.0, abs=1e-5), "nothing but the end was allowed"
    free = engine.generate(ids, SamplingParams(max_tokens=1, logprobs=True, top_logprobs=5, seed=7))[0].samples[0]
    assert free.top_logprobs is not None
    assert list(sample.top_logprobs[0]) == list(free.top_logprobs[0])


def test_the_end_comes_when_nothing_else_is_left_whatever_holds_ends_back(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    base = constrained(regex="a{1,6}")
    for change in ({"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}):
        sample = engine.generate(prompt(1), dataclasses.replace(base, **change))[0].samples[0]
        assert sample.text == "aaaaaa", change
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
        assert sample.token_ids[-1] == EOS


def test_stop_strings_stop_ids_and_lengths_keep_their_meaning(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    base = constrained(regex="[a-z]{4}![a-z]{4}")
    sample = engine.generate(prompt(1), dataclasses.replace(base, stop=["!"]))[0].samples[0]
    assert (len(sample.text), sample.stop_reason) == (4, "!")
    sample = engine.generate(prompt(1), dataclasses.replace(base, max_tokens=2))[0].samples[0]
    assert sample.finish_reason == "length"
    mark = engine.tokenizer.encode("!", add_special_tokens=False)[0]
    sample = engine.generate(prompt(1), dataclasses.replace(base, stop_token_ids=[mark]))[0].samples[0]
    assert (len(sample.text), sample.stop_reason) == (4, mark)


@pytest.mark.parametrize(("mark", "bias"), [("</t>", {}), ("<pad>", {2: 6.0})])
def test_the_constraint_begins_after_its_mark(tiny_engine: EngineFactory, mark: str, bias: dict[int, float]) -> None:
    engine = tiny_engine("llama")
    constraint = StructuredOutputsParams(choice=("yes", "no"), begins_after=mark)
    ends = 0
    for seed in range(4):
        params = SamplingParams(
            max_tokens=400, seed=seed, structured_outputs=constraint, logit_bias=bias, skip_special_tokens=False
        )
        sample = engine.generate(prompt(seed), params)[0].samples[0]
        front, found, answer = sample.text.partition(mark)
        ends += bool(found)
        if found:
            assert answer in ("yes", "no"), sample.text
        else:
            assert (sample.finish_reason, len(sample.token_ids)) == ("length", 400), "no end without an answer"
        assert front
    assert ends or not bias


def test_a_grammar_that_fails_on_the_way_ends_its_sample_and_nothing_else(
    tiny_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("llama")
    # At each "a" as many ways to go on as letters so far, and more: beyond what one mask may cost.
    costly = constrained(grammar='start: "b" a "c"\na: /a{1,3}/ | a a | a a a | "" ')
    samples = generate(engine, costly, FREE[0])
    assert samples[0].finish_reason in ("stop", "length", "abort")
    if samples[0].finish_reason == "abort":
        assert str(samples[0].stop_reason).startswith("grammar: ")
    alone = engine.generate(prompt(1), FREE[0])[0].samples[0]
    assert samples[1].token_ids == alone.token_ids
    assert engine.is_healthy


def test_a_grammar_that_no_token_can_follow_ends_with_its_reason(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama")
    params = constrained(grammar="start: <[600]>")
    with pytest.raises(InvalidRequest, match="grammar"):
        engine.generate(prompt(1), params)


def test_no_program_is_compiled_for_a_constrained_batch_of_a_warm_engine(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama", warmup=True, max_num_seqs=4, max_num_batched_tokens=32)
    check(CONSTRAINTS[0], generate(engine, CONSTRAINTS[0])[0])
    assert engine.stats().compilations_after_warmup == 0


def test_an_engine_without_grammars_refuses_by_name(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama", grammar_backend="none")
    with pytest.raises(InvalidRequest, match="grammar_backend none") as refused:
        engine.generate(prompt(1), CONSTRAINTS[0])
    assert refused.value.parameter == "structured_outputs"
    assert generate(engine, FREE[0])[0].finish_reason == "length"


async def first_text(engine: Engine, params: SamplingParams) -> str:
    return "".join([delta.text async for delta in engine.stream(prompt(1), params)])


def test_streams_are_constrained_and_refused_alike(tiny_engine: EngineFactory) -> None:
    import asyncio

    engine = tiny_engine("llama")
    assert asyncio.run(first_text(engine, CONSTRAINTS[5])) in ("yes", "no", "maybe not")
    with pytest.raises(InvalidRequest, match="regex"):
        asyncio.run(first_text(engine, constrained(regex="(")))
