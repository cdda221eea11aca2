"""Structured outputs in a running engine: always what the constraint says, whatever else runs, and however it runs."""

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

from tokenspeed_jax import Engine, EngineConfig, InvalidRequest, SamplingParams, StructuredOutputsParams
from tokenspeed_jax.engine.buckets import BucketTable
from tokenspeed_jax.engine.grammar import Matcher
from tokenspeed_jax.engine.outputs import Sample

from .conftest import GOLDEN, EngineFactory

EOS = 1
BYTES_PER_TOKEN = 1024  # of the tiny model's cache
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


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine of few shapes for all tests, with a pool for one and a half of its longest requests."""
    config = EngineConfig(
        model=str(GOLDEN / "tiny" / "llama"),
        dtype="float32",
        max_model_len=232,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        prefix_granularity=16,
        kernel_page_size=16,
        kv_cache_memory_bytes=350 * BYTES_PER_TOKEN,
        disable_progress_bars=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketTable, "for_limits", lambda *_: BucketTable((4,), (64,), 4))
        engine = Engine(config)
    with engine:
        yield engine
        assert engine.stats().compilations_after_warmup == 0, "constrained batches compile nothing either"


def generate(engine: Engine, *params: SamplingParams, length: int = 20) -> list[Sample]:
    prompts = [prompt(index, length) for index in range(len(params))]
    return [output.samples[0] for output in engine.generate(prompts, list(params))]


def test_a_constrained_sample_has_its_prompt_scored_and_is_none_the_worse(engine: Engine) -> None:
    params = dataclasses.replace(constrained(json=SCHEMA), max_tokens=100)
    scored = dataclasses.replace(params, prompt_logprobs=2)
    plain = dataclasses.replace(scored, structured_outputs=None)
    ids = prompt(0, 100)
    alone = engine.generate(ids, params)[0].samples[0]
    for own, output in zip((scored, plain), engine.generate([ids, ids], [scored, plain]), strict=True):
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs.token_logprobs()[1:] == pytest.approx(engine.score(ids)[1:], abs=1e-4)
        assert (output.samples[0].token_ids == alone.token_ids) == (own is scored)
    silent = engine.generate(ids, dataclasses.replace(scored, max_tokens=0))[0]
    assert silent.prompt_logprobs is not None
    assert (silent.samples[0].token_ids, silent.samples[0].finish_reason) == ([], "length")


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
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logit_bias={4: -1.0}),
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


def test_constrained_rows_hold_their_constraint_and_leave_their_neighbours_alone(engine: Engine) -> None:
    batch = [CONSTRAINTS[0], FREE[0], *CONSTRAINTS[1:], FREE[1]]
    together = generate(engine, *batch)
    for index, (params, sample) in enumerate(zip(batch, together, strict=True)):
        if params.structured_outputs is not None:
            check(params, sample)
        alone = engine.generate(prompt(index), params)[0].samples[0]
        assert alone.token_ids == sample.token_ids, index


def test_neither_overlap_nor_retraction_changes_anything(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Undeclared output budgets and no overlap, as retraction needs.
    batch = [dataclasses.replace(params, max_tokens=None) for params in CONSTRAINTS]
    with_overlap = generate(engine, *batch, length=110)
    monkeypatch.setattr(engine._loop, "_overlap_depth", 0)
    before = engine.stats().retractions
    without = generate(engine, *batch, length=110)
    assert engine.stats().retractions > before
    for params, sample, other in zip(batch, with_overlap, without, strict=True):
        check(params, sample)
        assert sample == other


def test_samples_of_a_request_have_grammars_of_their_own(engine: Engine) -> None:
    params = dataclasses.replace(CONSTRAINTS[1], n=4)
    samples = engine.generate(prompt(3, 30), params)[0].samples
    for sample in samples:
        check(params, sample)
    assert len({sample.text for sample in samples}) == 4


def test_log_probabilities_are_the_models_and_those_of_what_was_allowed(engine: Engine) -> None:
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


def test_the_end_comes_when_nothing_else_is_left_whatever_holds_ends_back(engine: Engine) -> None:
    base = constrained(regex="a{1,6}")
    for change in ({"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}):
        sample = engine.generate(prompt(1), dataclasses.replace(base, **change))[0].samples[0]
        assert sample.text == "aaaaaa", change
        assert (sample.finish_reason, sample.stop_reason) == ("stop", None)
        assert sample.token_ids[-1] == EOS


def test_stop_strings_stop_ids_and_lengths_keep_their_meaning(engine: Engine) -> None:
    base = constrained(regex="[a-z]{4}![a-z]{4}")
    sample = engine.generate(prompt(1), dataclasses.replace(base, stop=["!"]))[0].samples[0]
    assert (len(sample.text), sample.stop_reason) == (4, "!")
    sample = engine.generate(prompt(1), dataclasses.replace(base, max_tokens=2))[0].samples[0]
    assert sample.finish_reason == "length"
    mark = engine.tokenizer.encode("!", add_special_tokens=False)[0]
    sample = engine.generate(prompt(1), dataclasses.replace(base, stop_token_ids=[mark]))[0].samples[0]
    assert (len(sample.text), sample.stop_reason) == (4, mark)


@pytest.mark.parametrize(("mark", "bias"), [("e", {}), ("<pad>", {2: 6.0})])
def test_the_constraint_begins_after_its_mark(engine: Engine, mark: str, bias: dict[int, float]) -> None:
    constraint = StructuredOutputsParams(choice=("yes", "no"), begins_after=mark)
    for seed in range(3):
        params = SamplingParams(
            max_tokens=200, seed=seed, structured_outputs=constraint, logit_bias=bias, skip_special_tokens=False
        )
        sample = engine.generate(prompt(seed), params)[0].samples[0]
        _, found, answer = sample.text.partition(mark)
        assert found, "nothing else may end the part in front"
        assert answer in ("yes", "no"), sample.text
        assert (sample.finish_reason, sample.token_ids[-1]) == ("stop", EOS)


def test_stop_ids_are_held_back_before_the_constraint_begins_too(engine: Engine) -> None:
    constraint = StructuredOutputsParams(choice=("yes",), begins_after="<pad>")
    params = SamplingParams(
        max_tokens=10, min_tokens=8, seed=1, stop_token_ids=[70], logit_bias={70: 50.0}, structured_outputs=constraint
    )
    sample = engine.generate(prompt(1), params)[0].samples[0]
    assert sample.token_ids.index(70) == 8
    assert sample.stop_reason == 70


def test_a_grammar_that_fails_on_the_way_ends_its_sample_and_nothing_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = dataclasses.replace(constrained(regex="ab+c"), max_tokens=150)
    count = []

    def fail(matcher: Matcher) -> None:
        count.append(matcher)
        if len(count) == 3:
            matcher.error = "grammar: too complex"

    monkeypatch.setattr(Matcher, "note_error", fail)
    samples = generate(engine, params, FREE[1])
    assert (samples[0].finish_reason, samples[0].stop_reason) == ("abort", "grammar: too complex")
    assert len(samples[0].token_ids) == 4, "two were forced, and two were drawn after a mask each"
    assert samples[0].text == engine.tokenizer.decode(samples[0].token_ids)
    monkeypatch.undo()
    assert samples[1].token_ids == engine.generate(prompt(1), FREE[1])[0].samples[0].token_ids
    check(params, engine.generate(prompt(0), dataclasses.replace(params, logit_bias={69: 9.0}))[0].samples[0])


def test_a_bad_constraint_submits_nothing(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="unclosed") as refused:
        engine.generate([prompt(1)] * 2, [FREE[1], constrained(regex="a(b")])
    assert refused.value.parameter == "structured_outputs.regex"
    assert engine.stats().waiting == engine.stats().running == 0


def test_an_engine_without_grammars_refuses_by_name(tiny_engine: EngineFactory) -> None:
    engine = tiny_engine("llama", grammar_backend="none", max_num_batched_tokens=64)
    with pytest.raises(InvalidRequest, match="grammar_backend none") as refused:
        engine.generate(prompt(1), CONSTRAINTS[0])
    assert refused.value.parameter == "structured_outputs"
    assert not engine._assembly.programs.model.returns_logits, "nor does it pay for them"


async def first_text(engine: Engine, params: SamplingParams) -> str:
    return "".join([delta.text async for delta in engine.stream(prompt(1), params)])


def test_streams_are_constrained_and_refused_alike(engine: Engine) -> None:
    assert asyncio.run(first_text(engine, CONSTRAINTS[5])) in ("yes", "no", "maybe not")
    with pytest.raises(InvalidRequest, match="regex"):
        asyncio.run(first_text(engine, constrained(regex="(")))


def test_jumping_over_forced_tokens_changes_nothing_but_the_number_of_steps(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced = constrained(regex="abcdefgh[0-9]ij")
    batch = [
        CONSTRAINTS[0],
        dataclasses.replace(CONSTRAINTS[2], repetition_penalty=1.5),
        FREE[0],
        dataclasses.replace(forced, stop=["de"]),
        dataclasses.replace(forced, stop=["de"], include_stop_str_in_output=True),
        dataclasses.replace(forced, stop_token_ids=[69]),
        dataclasses.replace(forced, stop_token_ids=[69], min_tokens=9),
        dataclasses.replace(forced, max_tokens=5),
    ]
    before = engine.stats()
    jumping = generate(engine, *batch)
    between = engine.stats()
    monkeypatch.setattr(engine._loop, "_jumps", None)
    assert jumping == generate(engine, *batch)
    after = engine.stats()
    assert [sample.text for sample in jumping[3:6]] == ["abc", "abcde", "ab"]
    assert [sample.finish_reason for sample in jumping[5:]] == ["stop", "stop", "length"]
    assert between.jump_forward_tokens - before.jump_forward_tokens > 70
    assert after.jump_forward_tokens == between.jump_forward_tokens
    assert between.generation_tokens - before.generation_tokens == after.generation_tokens - between.generation_tokens
    assert between.steps - before.steps < 0.6 * (after.steps - between.steps)


def test_a_sample_with_log_probabilities_has_them_of_every_token(engine: Engine) -> None:
    params = constrained(regex="abcdefgh[0-9]ij")
    before = engine.stats().jump_forward_tokens
    sample = engine.generate(prompt(1), dataclasses.replace(params, logprobs=True))[0].samples[0]
    assert engine.stats().jump_forward_tokens == before
    assert sample.logprobs is not None
    assert len(sample.logprobs) == len(sample.token_ids)
    assert sample.token_ids == engine.generate(prompt(1), params)[0].samples[0].token_ids
