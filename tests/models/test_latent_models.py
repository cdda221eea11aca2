"""DeepSeek-V3 and Kimi Linear beyond their goldens: what configurations mean, and what random models must do."""

import json
import shutil
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.attention import LatentAttentionSpec, RecurrentSpec
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.kimi_linear import KimiDeltaAttention
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.pallas_kernels.gated_delta_rule import DeltaRuleInputs, gated_delta_rule
from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows
from tokenspeed_jax.weights import load_model, open_checkpoint

FAMILIES = ("deepseek_v3", "kimi_linear")
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


@pytest.fixture
def tiny_config(tiny_checkpoint) -> Callable:
    return lambda family: json.loads((tiny_checkpoint(family) / "config.json").read_text())


def resolved(config, *absent, **changes):
    return resolve_model({key: value for key, value in (config | changes).items() if key not in absent})


def build(config, dtype=jnp.float32, **changes):
    family, config = resolved(config, **changes)
    return family.build(config, dtype=dtype, rngs=nnx.Rngs(3))


@nnx.jit
def forward(model, token_ids, segment_ids, positions):
    return model.logits(model(token_ids, positions, PlainStep(segment_ids, positions, num_segments=4)))


def tokens(count, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 512, count))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("deepseek_v3", "hidden_act", "gelu"),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "kv_lora_rank", 0),
        ("deepseek_v3", "first_k_dense_replace", -1),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("kimi_linear", "hidden_act", "situ"),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "mla_use_output_gate", True),
        ("kimi_linear", "attn_res_block_size", 12),
        ("kimi_linear", "routed_expert_hidden_size", 3584),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "linear_attn_config", None),
    ],
)
def test_field_that_is_not_served_is_named(family, field, value, tiny_config):
    with pytest.raises(UnsupportedConfig, match="num_experts_per_tok" if field == "n_group" else field):
        resolved(tiny_config(family), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_full_rank_gate", True),
        ("gate_lower_bound", 5.0),
        ("kda_layers", [1, 2]),
        ("full_attn_layers", [3, 4]),
        ("kda_layers", [0, 1, 2]),
    ],
)
def test_field_of_the_delta_layers_that_is_not_served_is_named(field, value, tiny_config):
    config = tiny_config("kimi_linear")
    with pytest.raises(UnsupportedConfig, match=field):
        resolved(config, linear_attn_config=config["linear_attn_config"] | {field: value})


def test_deepseek_v3_scores_are_scaled_by_yarn_as_published(tiny_config):
    """Vector F13."""
    published = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_parameters": None}
    scaling = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    _, config = resolved(tiny_config("deepseek_v3"), **published, rope_scaling=scaling)
    assert config.attention_layers()[0].scale == pytest.approx(0.135234, abs=1e-6)
    assert config.rope.scaling.attention_factor == 1.0
    _, plain = resolved(tiny_config("deepseek_v3"), **published)
    assert plain.attention_layers()[0].scale == 192**-0.5
    _, kept = resolved(tiny_config("deepseek_v3"), **published, rope_scaling=YARN)
    assert kept.attention_layers()[0].scale == 192**-0.5
    assert kept.rope.scaling.attention_factor == pytest.approx(1.368888, abs=1e-6)


def test_kimi_layers_are_counted_from_one(tiny_config):
    _, config = resolved(tiny_config("kimi_linear"))
    assert [type(spec) for spec in config.attention_layers()] == [RecurrentSpec] * 3 + [LatentAttentionSpec]
    lists = {"kda_layers": [2, 3, 4], "full_attn_layers": [1]}
    changed = tiny_config("kimi_linear")["linear_attn_config"] | lists
    _, other = resolved(tiny_config("kimi_linear"), linear_attn_config=changed)
    assert isinstance(other.attention_layers()[0], LatentAttentionSpec)
    assert other.attention_layers()[1] == RecurrentSpec(1, (3 * 64, 4), (4, 16, 16), channel_gates=True)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_configurations_are_hashable_and_list_their_layers(family, tiny_config):
    config = resolved(tiny_config(family))[1]
    assert hash(config) == hash(resolved(tiny_config(family))[1])
    assert [spec.layer_id for spec in config.attention_layers()] == list(range(config.num_layers))


@pytest.mark.parametrize("family", FAMILIES, scope="module")
@pytest.mark.parametrize("q_lora_rank", [None, 24])
@pytest.mark.parametrize("dense_layers", [0, 4])
def test_weight_map_names_each_parameter_once(family, q_lora_rank, dense_layers, tiny_config):
    changes = {"q_lora_rank": q_lora_rank, "first_k_dense_replace": dense_layers}
    chosen, config = resolved(tiny_config(family), **changes)
    model = nnx.eval_shape(lambda: chosen.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    parameters = dict(nnx.to_flat_state(nnx.state(model)))
    rules = chosen.weight_map(config)
    assert sorted(map(str, (rule.parameter for rule in rules))) == sorted(map(str, parameters))
    wide = {path[-1] for path, value in parameters.items() if value.dtype == jnp.float32}
    expected = set() if dense_layers == 4 else {"selection_bias"}
    assert wide == expected | ({"decay_rate", "decay_bias"} if family == "kimi_linear" else set())


def test_rotary_pairs_are_as_the_config_says(tiny_config):
    """Invariant 2: interleaved pairs are halves after the channels were moved apart."""
    config = tiny_config("deepseek_v3")
    interleaved, halves = build(config), build(config, rope_interleave=False)
    nope, rope = 16, 16
    order = np.concatenate([np.arange(0, rope, 2), np.arange(1, rope, 2)])
    for layer in halves.layers:
        q_up, down = layer.attention.q_up.weight, layer.attention.down.weight
        heads = q_up[...].reshape(4, nope + rope, -1)
        q_up[...] = jnp.concatenate([heads[:, :nope], heads[:, nope:][:, order]], axis=1).reshape(q_up[...].shape)
        down[...] = jnp.concatenate([down[...][:-rope], down[...][-rope:][order]])
    ids, zeros, positions = tokens(24), jnp.zeros(24, int), jnp.arange(24)
    expected = forward(interleaved, ids, zeros, positions)
    np.testing.assert_allclose(forward(halves, ids, zeros, positions), expected, atol=1e-5)
    assert np.abs(forward(build(config, rope_interleave=False), ids, zeros, positions) - expected).max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_packed_sequences_do_not_see_each_other(family, tiny_config):
    model = build(tiny_config(family))
    a, b = tokens(20, 1), tokens(44, 2)
    segments = jnp.repeat(jnp.array([0, 1]), jnp.array([20, 44]), total_repeat_length=64)
    positions = jnp.concatenate([jnp.arange(20), jnp.arange(44)])
    both = forward(model, jnp.concatenate([a, b]), segments, positions)
    np.testing.assert_allclose(both[20:], forward(model, b, jnp.zeros(44, int), jnp.arange(44)), atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_bfloat16_stays_near_float32(family, tiny_checkpoint, tiny_golden):
    model = load_model(open_checkpoint(str(tiny_checkpoint(family))), dtype=jnp.bfloat16, progress=False)
    prompt = tiny_golden(family)["prompts"][1]
    count = len(prompt["prompt_ids"])
    table = forward(model, jnp.asarray(prompt["prompt_ids"]), jnp.zeros(count, int), jnp.arange(count))
    assert table.dtype == jnp.float32
    table = np.asarray(jax.nn.log_softmax(table))
    differences = [
        abs(row[token_id] - expected)
        for row, candidates in zip(table, prompt["prompt_top5"], strict=True)
        for token_id, expected in candidates
    ]
    assert np.median(differences) < 0.1


@pytest.mark.parametrize("family", FAMILIES, scope="module")
def test_the_layer_behind_the_last_is_left_out_and_anything_else_refused(family, tiny_checkpoint, tmp_path):
    folder = shutil.copytree(tiny_checkpoint(family), tmp_path / family)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.layers.4.eh_proj.weight": np.zeros((64, 128), np.float32)}
    save_file(tensors, folder / "model.safetensors")
    load_model(open_checkpoint(str(folder)), dtype=jnp.float32, progress=False)
    tensors |= {"model.layers.40.enorm.weight": np.zeros(64, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 unknown: model\.layers\.40\.enorm\.weight"):
        load_model(open_checkpoint(str(folder)), dtype=jnp.float32, progress=False)


@pytest.mark.parametrize(
    ("floor", "log_decay", "output", "state"),
    [
        (-5.0, (-2.575793, -2.424207), (0.164423, -0.281819), [[0.298023, 0.110965], [-0.534143, -0.178523]]),
        (None, (-0.451499, -0.390846), (0.178763, 0.004583), [[0.600986, -0.017844], [-0.669237, 0.341865]]),
    ],
)
def test_delta_attention_decays_as_published(floor, log_decay, output, state, tiny_config):
    """Vector F2, with and without a floor of the decay."""
    linear = {"num_heads": 1, "head_dim": 2, "kda_layers": [1, 2, 3], "full_attn_layers": [4]}
    _, config = resolved(tiny_config("kimi_linear"), linear_attn_config=linear | {"gate_lower_bound": floor})
    layer = KimiDeltaAttention(config, config.attention_layers()[0], dtype=jnp.float32, rngs=nnx.Rngs(0))
    layer.decay_rate[...] = jnp.array([-0.5])
    layer.decay_bias[...] = jnp.array([[0.0, 0.1]])
    decay = layer.log_decay(jnp.array([[0.1, -0.2]]))
    np.testing.assert_allclose(decay[0, 0], log_decay, atol=1e-6)
    q, k = jnp.array([[[1.0, 2.0]]]) / 10**0.5, jnp.array([[[2.0, 1.0]]]) / 5**0.5  # unit vectors, q / sqrt(2) too
    inputs = DeltaRuleInputs(q, k, jnp.array([[[0.5, -1.0]]]), decay, jax.nn.sigmoid(jnp.array([[0.3]])))
    rows = RecurrentRows.without_checkpoints(jnp.array([0, 1]))
    result = gated_delta_rule(inputs, jnp.eye(2)[None, None], rows)
    np.testing.assert_allclose(result.output[0, 0], output, atol=1e-5)
    np.testing.assert_allclose(result.final_states[0, 0], state, atol=1e-5)
