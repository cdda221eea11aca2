"""Scoring without a cache gives what transformers gives, for every family."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.weights import load_model, open_checkpoint

from ..families import ALL, DENSE

ROWS_AT_ONCE = 128  # of logits: a vocabulary of 262,144 takes a megabyte a row


@nnx.jit
def log_probabilities(model, token_ids):
    """[T, vocab] of one sequence."""
    positions = jnp.arange(token_ids.shape[0])
    hidden = model(token_ids, positions, PlainStep(jnp.zeros_like(positions), positions, num_segments=1))
    return jax.nn.log_softmax(model.logits(hidden))


@pytest.mark.parametrize("family", ALL)
def test_tiny_model_predicts_what_transformers_predicts(family, tiny_checkpoint, tiny_golden):
    model = load_model(open_checkpoint(str(tiny_checkpoint(family))), dtype=jnp.float32, progress=False)
    prompts = tiny_golden(family)["prompts"]
    assert len(prompts) == 3
    for prompt in prompts:
        fed = [*prompt["prompt_ids"], *prompt["output_ids"]]
        table = np.asarray(log_probabilities(model, jnp.asarray(np.pad(fed, (0, 256 - len(fed))))))
        # The prediction after the last prompt token is recorded as the prompt's and as the output's.
        argmax = prompt["prompt_argmax"] + prompt["output_ids"][1:]
        np.testing.assert_array_equal(table.argmax(-1)[: len(argmax)], argmax)
        top = prompt["prompt_top5"] + prompt["output_top5"][1:]
        for row, candidates in zip(table, top, strict=False):
            for token_id, expected in candidates:
                assert abs(row[token_id] - expected) < 2e-3


@nnx.jit
def score_packed(model, token_ids, positions, segment_ids):
    """(log-probability of the token that follows, most likely token) at each place, [T] each."""
    hidden = model(token_ids, positions, PlainStep(segment_ids, positions))
    following = jnp.roll(token_ids, -1)

    def block(rows):
        block_hidden, targets = rows
        table = jax.nn.log_softmax(model.logits(block_hidden))
        return jnp.take_along_axis(table, targets[:, None], axis=-1)[:, 0], table.argmax(-1)

    blocks = (hidden.reshape(-1, ROWS_AT_ONCE, hidden.shape[-1]), following.reshape(-1, ROWS_AT_ONCE))
    return jax.tree.map(lambda x: x.reshape(-1), jax.lax.map(block, blocks))


def packed(prompts, length):
    """Puts sequences into rows of `length` tokens, longest first; yields (row of sequences, arrays of score_packed)."""
    rows = []
    for prompt in sorted(prompts, key=lambda p: -len(p["prompt_ids"]) - len(p["output_ids"])):
        size = len(prompt["prompt_ids"]) + len(prompt["output_ids"])
        row = next((row for row in rows if row["used"] + size <= length), None)
        if row is None:
            rows.append(row := {"used": 0, "prompts": []})
        row["used"] += size
        row["prompts"].append(prompt)
    for row in rows:
        ids, positions, segments = (np.zeros(length, np.int32) for _ in range(3))
        segments[:] = -1
        start = 0
        for number, prompt in enumerate(row["prompts"]):
            fed = prompt["prompt_ids"] + prompt["output_ids"]
            place = slice(start, start + len(fed))
            ids[place], positions[place], segments[place] = fed, np.arange(len(fed)), number
            start += len(fed)
        yield row["prompts"], (jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segments))


@pytest.fixture
def optimised():
    """Compiles as every other folder does: a real model runs longer than it compiles."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("name", "length"), [("smollm2-135m", 1024), ("gemma3-270m", 1536)])
def test_real_model_scores_what_transformers_scores(name, length, real_golden, request):
    """All prompts and outputs, packed into few rows, so that this also shows that sequences do not see each other."""
    path = request.getfixturevalue({"smollm2-135m": "smollm2_path", "gemma3-270m": "gemma3_270m_path"}[name])
    model = load_model(open_checkpoint(str(path)), dtype=jnp.float32, progress=False)
    seen = 0
    for prompts, arrays in packed(real_golden(name)["prompts"], length):
        scores, argmax = map(np.asarray, score_packed(model, *arrays))
        start = 0
        for prompt in prompts:
            size = len(prompt["prompt_ids"])
            first_output = start + size - 1  # the place that predicts it
            outputs = slice(first_output, first_output + len(prompt["output_ids"]))
            np.testing.assert_array_equal(argmax[outputs], prompt["output_ids"], err_msg=prompt["id"])
            np.testing.assert_allclose(scores[outputs], prompt["output_logprobs"], atol=1e-3, rtol=0)
            np.testing.assert_allclose(scores[start:first_output], prompt["prompt_logprobs"][1:], atol=1e-3, rtol=0)
            start += size + len(prompt["output_ids"])
            seen += 1
    assert seen == 9


@pytest.mark.parametrize("family", DENSE)
def test_bfloat16_stays_near_float32(family, tiny_checkpoint, tiny_golden):
    """Bounds the median: single steps may differ where two tokens are close."""
    model = load_model(open_checkpoint(str(tiny_checkpoint(family))), dtype=jnp.bfloat16, progress=False)
    prompt = tiny_golden(family)["prompts"][1]
    table = np.asarray(log_probabilities(model, jnp.asarray(prompt["prompt_ids"])))
    assert table.dtype == np.float32
    differences = [
        abs(row[token_id] - expected)
        for row, candidates in zip(table, prompt["prompt_top5"], strict=True)
        for token_id, expected in candidates
    ]
    assert np.median(differences) < 0.1
