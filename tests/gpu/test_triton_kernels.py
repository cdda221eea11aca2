"""Triton kernels on a Hopper GPU against their references; jax-triton from a folder or wheel on PYTHONPATH will do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from tokenspeed_jax.pallas_kernels.implementations import hopper_refusal
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.recurrent_problems import ragged_rows, random_delta_rule
from tokenspeed_jax.pallas_kernels.scores import ScoreRule
from tokenspeed_jax.pallas_kernels.triton_calls import triton_missing

DECODE_LENS = (0, 1, 63, 64, 65, 1000, 2500, 4096)
# Heads, KV heads, head dim, rule, splits.
DECODES = {
    "qwen3": ((32, 8, 128), {}, 7),
    "smollm2_window": ((9, 3, 64), {"sliding_window": 130}, 1),
    "gemma_window_and_cap": ((16, 8, 256), {"sliding_window": 400, "soft_cap": 50.0}, 3),
    "gpt_oss_sinks": ((64, 8, 64), {"with_sinks": True}, 1),
    "one_kv_head_sinks": ((64, 1, 64), {"with_sinks": True}, 5),
}

LENGTHS, BODIES = (700, 0, 1, 64, 65, 1000, 128), (640, 0, 1, 64, 1, 960, 100)
TOKENS, HEADS = 2000, 32
LIVE = jnp.array([0, *range(2, len(LENGTHS))])  # rows with a body
# A decay a head or a channel, extreme gates, key heads.
DELTAS = {
    "gdn": (False, False, 16),
    "gdn_extreme": (False, True, 32),
    "kda": (True, False, 32),
    "kda_extreme": (True, True, 16),
}


@pytest.fixture(autouse=True)
def _triton():
    refusal = hopper_refusal() or triton_missing()
    if refusal:
        pytest.skip(refusal)


def assert_close(actual, expected, bound):
    """Relative error in the norm; no NaN passes."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.isfinite(actual).all()
    assert np.linalg.norm(actual - expected) <= bound * np.linalg.norm(expected)


def decode_problem(geometry, rule, unseen):
    heads, kv_heads, dim = geometry
    return PagedProblem.random(
        np.random.default_rng(0), query_lens=[1] * len(DECODE_LENS), kv_lens=DECODE_LENS, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, sliding_window=rule.get("sliding_window"), dtype=jnp.bfloat16, columns=70,
        unseen=unseen,
    ).decode_arguments()  # fmt: skip


@pytest.mark.parametrize(("geometry", "rule", "splits"), DECODES.values(), ids=DECODES.keys())
def test_decode_equals_the_reference_and_reads_no_unused_page(geometry, rule, splits):
    from tokenspeed_jax.pallas_kernels.decode_attention.triton import TritonDecodeTiling, decode_attention_triton

    rule = dict(rule)
    sinks = None
    if rule.pop("with_sinks", False):
        sinks = jnp.linspace(-4.0, 6.0, geometry[0], dtype=jnp.bfloat16).at[0].set(-jnp.inf)
    run = {
        way: jax.jit(functools.partial(decode_attention, scale=0.1, sinks=sinks, implementation=way, **rule))
        for way in ("triton", "reference")
    }
    expected = run["reference"](*decode_problem(geometry, rule, 0.0))
    dirty = decode_problem(geometry, rule, np.nan)
    tiling = TritonDecodeTiling(splits, 5 if geometry[2] < 256 else 3)
    outs = run["triton"](*dirty), decode_attention_triton(*dirty, ScoreRule(0.1, **rule), sinks, tiling=tiling)
    for out in outs:
        assert_close(out, expected, 6e-3)
        np.testing.assert_array_equal(np.asarray(out[0], np.float32), 0.0)
    np.testing.assert_array_equal(run["triton"](*dirty), outs[0])


def delta_problem(case, **options):
    decay_per_channel, extreme, key_heads = DELTAS[case]
    return random_delta_rule(
        np.random.default_rng(2), options.pop("tokens", TOKENS), key_heads=key_heads, heads=HEADS, key_dim=128,
        value_dim=128, decay_per_channel=decay_per_channel, extreme=extreme, dtype=jnp.bfloat16, **options,
    )  # fmt: skip


def delta_rule(implementation):
    return jax.jit(functools.partial(gated_delta_rule, implementation=implementation))


@pytest.mark.parametrize("case", DELTAS)
def test_the_delta_rule_equals_the_reference_on_ragged_rows_with_checkpoints(case):
    """Tokens of no row hold NaN; the second run and the default have the bits of the first."""
    inputs, used = delta_problem(case), sum(LENGTHS)
    dirty = DeltaRuleInputs(*(x.at[used:].set(jnp.nan) for x in inputs))
    initial = jax.random.normal(jax.random.key(3), (len(LENGTHS), HEADS, 128, 128))
    rows = ragged_rows(LENGTHS, BODIES)
    result = delta_rule("triton")(dirty, initial, rows)
    expected = delta_rule("reference")(inputs, initial, rows)
    assert_close(result.output[:used], expected.output[:used], 5e-3)
    np.testing.assert_array_equal(np.asarray(result.output[used:], np.float32), 0.0)
    assert_close(result.body_states[LIVE], expected.body_states[LIVE], 5e-3)
    assert_close(result.final_states, expected.final_states, 5e-3)
    np.testing.assert_array_equal(result.final_states[1], initial[1])
    for way in ("triton",) if case == "gdn" else ("triton", None):  # with a gate a head Mosaic is the default
        again = delta_rule(way)(dirty, initial, rows)
        np.testing.assert_array_equal(again.output, result.output)
        np.testing.assert_array_equal(again.body_states[LIVE], result.body_states[LIVE])
        np.testing.assert_array_equal(again.final_states, result.final_states)


@pytest.mark.parametrize("case", ["gdn", "kda"])
def test_queries_and_keys_of_float32_as_models_pass_them(case):
    inputs = delta_problem(case)
    rng = np.random.default_rng(4)
    wide = (jnp.asarray(x + rng.normal(size=x.shape) * 1e-4, jnp.float32) for x in inputs[:2])
    inputs = DeltaRuleInputs(*wide, *inputs[2:])
    initial, rows = jnp.zeros((1, HEADS, 128, 128)), ragged_rows([TOKENS])
    result = delta_rule("triton")(inputs, initial, rows)
    expected = delta_rule("reference")(inputs, initial, rows)
    assert_close(result.output, expected.output, 8e-3)  # rounding queries and keys adds to the rounding of products
    assert_close(result.final_states, expected.final_states, 8e-3)


@pytest.mark.parametrize("case", ["gdn", "kda"])
def test_a_row_gets_the_same_bits_beside_other_rows(case):
    run, inputs = delta_rule("triton"), delta_problem(case)
    initial = jax.random.normal(jax.random.key(5), (3, HEADS, 128, 128))
    one = run(inputs, initial, ragged_rows([700, 500, 300], [1, 448, 300]))
    other = run(inputs, initial.at[0].set(7.0), ragged_rows([700, 500, 0], [640, 448, 0]))
    np.testing.assert_array_equal(one.output[700:1200], other.output[700:1200])
    np.testing.assert_array_equal(one.final_states[1], other.final_states[1])
    np.testing.assert_array_equal(one.body_states[1], other.body_states[1])


@pytest.mark.parametrize("tokens", [1, 16, 63])
@pytest.mark.parametrize("case", ["gdn", "kda"])
def test_a_step_of_fewer_tokens_than_a_chunk(case, tokens):
    """The copied tiles are larger than the matrices that they are cut from."""
    inputs, initial = delta_problem(case, tokens=tokens), jnp.ones((1, HEADS, 128, 128))
    result, expected = (delta_rule(way)(inputs, initial, ragged_rows([tokens])) for way in ("triton", "reference"))
    assert_close(result.output, expected.output, 5e-3)
    assert_close(result.final_states, expected.final_states, 5e-3)


def test_gradients_are_those_of_the_chunked_form():
    inputs, initial = delta_problem("gdn", tokens=100), jnp.zeros((1, HEADS, 128, 128))

    def gradient(way):
        return jax.jit(jax.grad(lambda v: jnp.sum(delta_rule(way)(inputs._replace(v=v), initial, rows).output[:90])))

    rows = ragged_rows([90])
    assert_close(gradient("triton")(inputs.v), gradient("xla")(inputs.v), 1e-5)
