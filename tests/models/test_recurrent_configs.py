"""`config.json` of families with recurrent layers: options, defaults, and refusals that name the field."""

import json

import pytest

from tokenspeed_jax.models.attention import RecurrentSpec
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.registry import resolve_model

from ..families import RECURRENT

INFINITY = {"__float__": "Infinity"}


@pytest.fixture
def tiny_config(tiny_checkpoint):
    return lambda family: json.loads((tiny_checkpoint(family) / "config.json").read_text())


def resolved(config, *absent, **changes):
    fields = {key: value for key, value in (config | changes).items() if key not in absent}
    return resolve_model(fields)[1]


def attending(config):
    """Layers that are not recurrent."""
    return [spec.layer_id for spec in config.attention_layers() if not isinstance(spec, RecurrentSpec)]


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_5", "hidden_act", "gelu"),
        ("qwen3_5", "attention_bias", True),
        ("qwen3_5", "attn_output_gate", False),
        ("qwen3_5", "output_gate_type", "sigmoid"),
        ("qwen3_5", "mamba_ssm_dtype", "bfloat16"),
        ("qwen3_5", "layer_types", ["sliding_attention"] * 8),
        ("qwen3_5", "layer_types", ["full_attention"]),
        ("qwen3_5", "linear_num_value_heads", 3),
        ("qwen3_5", "text_config", "qwen3_5_text"),
        ("qwen3_5_moe", "norm_topk_prob", False),
        ("qwen3_5_moe", "mlp_only_layers", [0]),
        ("qwen3_5_moe", "decoder_sparse_step", 2),
        ("qwen3_5_moe", "num_experts_per_tok", 9),
        ("qwen3_next", "mlp_only_layers", [4]),
        ("qwen3_next", "shared_expert_intermediate_size", 0),
        ("minimax", "hidden_act", "gelu"),
        ("minimax", "sliding_window", 64),
        ("minimax", "layer_types", ["sliding_attention"] * 4),
        ("minimax", "linear_attn_alpha_factor", 0),
        ("minimax", "num_experts_per_tok", 5),
        ("mamba2", "hidden_act", "gelu"),
        ("mamba2", "expand", 3),
        ("mamba2", "n_groups", 3),
        ("mamba2", "time_step_limit", [-1.0, INFINITY]),
        ("mamba2", "time_step_limit", [0.5, 0.1]),
        ("mamba2", "time_step_limit", [0.1, "much"]),
        ("mamba2", "time_step_limit", [0.1]),
        ("mamba2", "time_step_limit", 0.1),
        ("falcon_mamba", "hidden_act", "gelu"),
        ("falcon_mamba", "time_step_rank", 0),
        ("lfm2", "layer_types", ["conv"]),
        ("lfm2", "layer_types", ["conv", "conv", "sliding_attention", "conv", "conv"]),
        ("lfm2", "conv_L_cache", 0),
        ("kimi_linear", "mla_use_nope", False),
    ],
)
def test_field_that_is_not_served_is_named(family, field, value, tiny_config):
    with pytest.raises(UnsupportedConfig, match=field):
        resolved(tiny_config(family), **{field: value})


@pytest.mark.parametrize("family", RECURRENT)
def test_configurations_are_hashable_list_their_layers_and_name_a_recipe_with_states(family, tiny_config):
    config = resolved(tiny_config(family))
    assert hash(config) == hash(resolved(tiny_config(family)))
    assert [spec.layer_id for spec in config.attention_layers()] == list(range(config.num_layers))
    assert config.cache_family == ("kda_hybrid" if family == "kimi_linear" else "hybrid")


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_every_fourth_layer_attends_unless_the_config_says_otherwise(family, tiny_config):
    config = tiny_config(family) | {"num_hidden_layers": 8}
    assert attending(resolved(config, "layer_types", "full_attention_interval")) == [3, 7]
    assert attending(resolved(config, "layer_types", full_attention_interval=2)) == [1, 3, 5, 7]
    kinds = ["full_attention"] + ["linear_attention"] * 7
    assert attending(resolved(config, layer_types=kinds)) == [0]


def test_qwen3_5_carries_queries_keys_and_values_in_windows_and_a_matrix_per_value_head(tiny_config):
    changes = {"linear_key_head_dim": 8, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}
    spec = resolved(tiny_config("qwen3_5"), **changes).attention_layers()[0]
    assert spec == RecurrentSpec(0, (2 * 2 * 8 + 4 * 24, 3), (4, 24, 8))


def test_qwen3_5_turns_a_quarter_of_a_head_in_every_spelling(tiny_config):
    config = tiny_config("qwen3_5")
    streams = {"mrope_interleaved": True, "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "rope_type": "default"}
    assert resolved(config, rope_parameters=streams).ropes[0].dim == 32 // 4
    assert resolved(config, "rope_parameters", "partial_rotary_factor").ropes == resolved(config).ropes
    halves = resolved(config, rope_parameters=streams | {"partial_rotary_factor": 0.5})
    assert halves.ropes[0].dim == 16
    with pytest.raises(UnsupportedConfig, match="partial_rotary_factor"):
        resolved(config, head_dim=20)  # 5 channels make no pairs


def test_qwen3_5_is_read_from_the_text_part_of_a_multimodal_config(tiny_config):
    for family, architecture in (
        ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    ):
        text = tiny_config(family)
        parts = {"architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 1}}
        config = resolved(parts)
        assert config.multimodal
        assert config.attention_layers() == resolved(text).attention_layers()
        assert resolved(parts, tie_word_embeddings=False) == config
        with pytest.raises(UnsupportedConfig, match="tie_word_embeddings"):
            resolved(parts, tie_word_embeddings=True)
        untold = {key: value for key, value in text.items() if key != "tie_word_embeddings"}
        assert resolved(parts, text_config=untold, tie_word_embeddings=True).tie_word_embeddings


def test_qwen3_5_with_experts_needs_no_size_of_dense_layers(tiny_config):
    config = tiny_config("qwen3_5_moe")
    assert resolved(config, "intermediate_size").sparse == resolved(config).sparse == (True,) * 4
    assert resolved(tiny_config("qwen3_next"), mlp_only_layers=[2]).sparse == (True, True, False, True)


def test_minimax_layers_alternate_by_default_and_factors_follow_their_kind(tiny_config):
    config = tiny_config("minimax")
    assert attending(resolved(config, "layer_types")) == [0, 2]
    blocks = ("full_attn", "linear_attn", "mlp")
    factors = {f"{block}_{name}_factor": 2.0 + i for i, (block, name) in enumerate(
        (block, name) for block in blocks for name in ("alpha", "beta")
    )}  # fmt: skip
    changed = resolved(config, **factors)
    pairs = [(pair.alpha, pair.beta) for pair in (*changed.mixer_factors, changed.mlp_factors)]
    assert pairs == [(4, 5), (4, 5), (2, 3), (4, 5), (6, 7)]


def test_minimax_turns_as_many_channels_as_rotary_dim_says(tiny_config):
    assert resolved(tiny_config("minimax")).ropes[0].dim == 16
    assert resolved(tiny_config("minimax"), rotary_dim=8).ropes[0].dim == 8


def test_mamba2_step_limits_in_every_spelling(tiny_config):
    config = tiny_config("mamba2")
    unlimited = (0.0, float("inf"))
    assert resolved(config).step_limits == resolved(config, "time_step_limit").step_limits == unlimited
    assert resolved(config, time_step_limit=[0.0, float("inf")]).step_limits == unlimited
    assert resolved(config, time_step_limit=[0.001, 0.1]).step_limits == (0.001, 0.1)


def test_mamba2_heads_fill_the_inner_size(tiny_config):
    config = resolved(tiny_config("mamba2"), expand=4, head_dim=32)
    assert (config.inner_size, config.head_dim) == (256, 32)
    assert config.attention_layers()[0] == RecurrentSpec(0, (256 + 2 * 2 * 16, 4), (8, 32, 16))


def test_falcon_mamba_rank_is_a_sixteenth_of_the_hidden_size_when_automatic(tiny_config):
    config = tiny_config("falcon_mamba")
    assert resolved(config).step_rank == 4
    assert resolved(config, hidden_size=72, time_step_rank="auto").step_rank == 5
    assert resolved(config, "time_step_rank", hidden_size=80).step_rank == 5
    assert resolved(config, "intermediate_size", hidden_size=72).inner_size == 144


def test_lfm2_feed_forward_size_is_adjusted_when_the_config_says_so(tiny_config):
    config = tiny_config("lfm2")
    assert resolved(config).intermediate_size == 128
    assert resolved(config, block_auto_adjust_ff_dim=True).intermediate_size == 256
    adjusted = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32}
    assert resolved(config, **adjusted).intermediate_size == 96
    assert resolved(config, **adjusted, block_ffn_dim_multiplier=1.5).intermediate_size == 128
    assert resolved(config, "block_auto_adjust_ff_dim", intermediate_size=12288).intermediate_size == 8192


def test_lfm2_first_releases_say_the_same_in_their_own_fields(tiny_config):
    new = tiny_config("lfm2")
    old = {"block_ff_dim": 128, "tie_embedding": True, "theta": 1000000.0, "full_attn_idxs": [2, 4]}
    absent = ("layer_types", "intermediate_size", "tie_word_embeddings", "rope_parameters", "rope_theta")
    assert resolved(new, *absent, **old) == resolved(new)
    assert resolved(new, *absent, **old | {"theta": 500.0}).ropes[0].theta == 500.0
    assert not resolved(new, *absent, **old | {"tie_embedding": False}).tie_word_embeddings


def test_lfm2_layers_attend_where_listed_and_everywhere_without_a_list(tiny_config):
    config = tiny_config("lfm2")
    assert attending(resolved(config)) == [2, 4]
    assert attending(resolved(config, "layer_types", full_attn_idxs=[1, 3])) == [1, 3]
    assert attending(resolved(config, "layer_types")) == [0, 1, 2, 3, 4]
