"""Log-probabilities of prompts: what `Engine.score` says, whatever is cached, runs beside them or comes in between."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax import Engine, InvalidRequest, RequestOutput, SamplingParams
from tokenspeed_jax.engine.prompt_logprobs import Logprob, PromptScores
from tokenspeed_jax.engine.prompt_scorer import score_rows

from ..tiny_sizes import MAX_NUM_SEQS
from .conftest import EngineFactory
from .test_tiny_goldens import in_chunks

SCORED = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
PLAIN = dataclasses.replace(SCORED, prompt_logprobs=None)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, length).tolist()


def assert_is_score(engine: Engine, output: RequestOutput) -> None:
    assert output.prompt_logprobs is not None
    told = output.prompt_logprobs.token_logprobs()
    assert told[0] is None
    assert told[1:] == pytest.approx(engine.score(output.prompt_token_ids)[1:], abs=1e-4)


@pytest.fixture
def engine(tiny_engine: EngineFactory) -> Engine:
    return tiny_engine("llama", max_num_batched_tokens=64)


def test_chunked_prompts_beside_others_score_as_alone_and_read_no_cache(engine: Engine) -> None:
    lengths = (1, 2, 64, 65, 130, 200)
    prompts = [ids(length, length) for length in lengths]
    plain = [output.samples for output in engine.generate(prompts, PLAIN)]
    queried = engine.stats().prefix_query_tokens
    mixed = engine.generate([*prompts, ids(7, 150)], [SCORED] * len(prompts) + [PLAIN])
    assert engine.stats().prefix_query_tokens - queried == 150
    for output, samples in zip(mixed, plain, strict=False):
        assert_is_score(engine, output)
        assert (output.cached_tokens, output.samples) == (0, samples)
    assert mixed[-1].prompt_logprobs is None
    # What they computed is there for those who may read it.
    assert engine.generate(prompts[-1], PLAIN)[0].cached_tokens == 192


def test_samples_of_one_request_share_one_score_and_every_first_delta_has_it(engine: Engine) -> None:
    async def first_and_later() -> tuple[list[object], list[object]]:
        first, later = {}, []
        async for delta in engine.stream(ids(3, 100), dataclasses.replace(SCORED, n=3, max_tokens=2)):
            if delta.sample_index in first:
                later.append(delta.prompt_logprobs)
            first.setdefault(delta.sample_index, delta.prompt_logprobs)
        return list(first.values()), later

    first, later = asyncio.run(first_and_later())
    assert len(first) == 3
    assert first[0] is not None
    assert all(scores is first[0] for scores in first)
    assert later == [None] * 3


def test_a_retracted_prompt_is_scored_all_the_same(tiny_engine: EngineFactory) -> None:
    engine = in_chunks(tiny_engine, "llama")
    before = engine.stats().retractions
    params = dataclasses.replace(SCORED, max_tokens=None)
    for output in engine.generate(
        [ids(seed, length) for seed, length in enumerate((97, 80, 120, 40) * (MAX_NUM_SEQS // 4))], params
    ):
        assert_is_score(engine, output)
    assert engine.stats().retractions > before


def test_no_token_is_generated_where_only_the_prompt_is_asked_for(engine: Engine) -> None:
    output = engine.generate(ids(4, 70), dataclasses.replace(SCORED, max_tokens=0, n=2, logprobs=True))[0]
    assert_is_score(engine, output)
    assert [(s.token_ids, s.text, s.finish_reason, s.logprobs) for s in output.samples] == [([], "", "length", [])] * 2
    assert engine.stats().running == 0
    with pytest.raises(InvalidRequest, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)
    for wrong in (-1, 21, True, 1.5):
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            SamplingParams(prompt_logprobs=wrong)  # type: ignore[arg-type]


compiled_score_rows = jax.jit(score_rows)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([5, 300]), st.booleans())
def test_packed_rows_hold_what_numpy_computes(seed: int, vocab: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(3, vocab)).astype(np.float32) * 4
    if ties:
        logits = np.round(logits) + 0.0  # top_k may put 0 before -0
    prompt = rng.integers(0, vocab, 4).tolist()
    packed = np.asarray(compiled_score_rows(jnp.asarray(logits), jnp.asarray(prompt[1:], jnp.int32)))
    scores = PromptScores(prompt, 2)
    scores.put(1, packed[:2])
    assert scores.whole() is None
    scores.put(3, packed[2:])
    whole = scores.whole()
    assert whole is not None
    logprobs = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for place in (1, 2, 3):
        token, row = prompt[place], logprobs[place - 1]
        order = sorted(range(vocab), key=lambda other: (-logits[place - 1, other], other))[:2]
        assert whole[place][token] == (pytest.approx(row[token], abs=1e-4), 1 + (row > row[token]).sum())
        assert [*whole[place]] == [token, *(other for other in order if other != token)]
        assert list(whole.top_logprobs()[place].items()) == [
            (other, pytest.approx(row[other], abs=1e-4)) for other in order
        ]
    assert whole[0] is None
    assert whole[-1] == whole[3]
    assert whole[1:] == [whole[1], whole[2], whole[3]]
    assert all(len(entry) <= 2 for entry in whole.limited(1)[1:])
    assert whole.limited(0)[2] == {prompt[2]: whole[2][prompt[2]]}
    assert isinstance(whole[1][prompt[1]], Logprob)
