"""`config.json` in its old and new spellings, and refusals that name the field."""

import json

import pytest

from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.registry import MODEL_FAMILIES, resolve_model
from tokenspeed_jax.models.rope import LinearScaling, YarnScaling
from tokenspeed_jax.recipes.setup import CACHE_FAMILIES

from ..families import ALL


@pytest.fixture
def tiny_config(tiny_checkpoint):
    return lambda family: json.loads((tiny_checkpoint(family) / "config.json").read_text())


def resolved(config, *absent, **changes):
    fields = {key: value for key, value in (config | changes).items() if key not in absent}
    return resolve_model(fields)[1]


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "hidden_act", "gelu"),
        ("llama", "mlp_bias", True),
        ("mistral", "hidden_act", "gelu"),
        ("qwen3", "hidden_act", "gelu"),
        ("olmo3", "hidden_act", "gelu"),
        ("gemma3", "hidden_activation", "silu"),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "layer_types", ["chunked_attention"] * 6),
        ("gemma3", "layer_types", ["full_attention"]),
        ("llama", "quantization_config", {"quant_method": "fp8"}),
        ("llama", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt_oss", "quantization_config", {"quant_method": "fp8"}),
        ("gpt_oss", "quantization_config", "mxfp4-ish"),
        ("gpt_oss", "hidden_act", "gelu"),
        ("gpt_oss", "num_experts_per_tok", 5),
        ("gpt_oss", "sliding_window", 0),
        ("gpt_oss", "swiglu_limit", -1.0),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 4),
        ("llama", "hidden_size", "64"),
        ("llama", "hidden_size", 0),
        ("llama", "num_hidden_layers", True),
        ("llama", "rms_norm_eps", float("nan")),
        ("llama", "tie_word_embeddings", 1),
        ("llama", "num_key_value_heads", 3),
        ("qwen3_moe", "hidden_act", "gelu"),
        ("qwen3_moe", "num_experts_per_tok", 9),
        ("qwen3_moe", "mlp_only_layers", [4]),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen3_moe", "partial_rotary_factor", 0.5),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "qk_norm_type", "per_head"),
        ("minimax_m2", "shared_intermediate_size", 64),
        ("minimax_m2", "attn_type_list", [1, 0, 1, 1]),
        ("minimax_m2", "num_experts_per_tok", 5),
    ],
)
def test_field_that_is_not_served_is_named(family, field, value, tiny_config):
    with pytest.raises(UnsupportedConfig, match=field):
        resolved(tiny_config(family), **{field: value})


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_field_that_is_missing_is_named(field, tiny_config):
    with pytest.raises(UnsupportedConfig, match=f"no {field}"):
        resolved(tiny_config("llama"), field)


def test_unknown_architecture_lists_the_supported_ones(tiny_config):
    with pytest.raises(UnsupportedConfig, match="'BertModel'") as error:
        resolved(tiny_config("llama"), architectures=["BertModel"])
    for name in MODEL_FAMILIES:
        assert name in str(error.value)
    with pytest.raises(UnsupportedConfig, match="no architectures"):
        resolved(tiny_config("llama"), "architectures")


def test_head_dim_defaults_as_each_family_does(tiny_config):
    assert resolved(tiny_config("llama"), "head_dim").head_dim == 64 // 4
    assert resolved(tiny_config("qwen3"), "head_dim").head_dim == 128
    assert resolved(tiny_config("gemma3"), "head_dim").head_dim == 256
    with pytest.raises(UnsupportedConfig, match="no head_dim"):
        resolved(tiny_config("llama"), "head_dim", num_attention_heads=5, num_key_value_heads=5)


def test_llama2_config_without_key_value_heads_has_one_for_each_head(tiny_config):
    assert resolved(tiny_config("llama"), "num_key_value_heads").num_kv_heads == 4


def test_mistral_window_is_on_every_layer_and_null_turns_it_off(tiny_config):
    assert resolved(tiny_config("mistral")).windows == (32,) * 4
    assert resolved(tiny_config("mistral"), sliding_window=None).windows == (None,) * 4
    assert resolved(tiny_config("mistral"), "sliding_window").windows == (4096,) * 4


def test_qwen3_windows_need_the_switch_and_start_at_a_layer(tiny_config):
    config = tiny_config("qwen3") | {"sliding_window": 16}
    assert resolved(config).windows == (None,) * 4
    on = resolved(config, "layer_types", use_sliding_window=True, max_window_layers=3)
    assert on.windows == (None, None, None, 16)


def test_gemma3_old_config_says_the_same_as_the_new_one(tiny_config):
    new = tiny_config("gemma3")
    old_fields = {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window_pattern": 3}
    assert resolved(new, "rope_parameters", "layer_types", **old_fields) == resolved(new)


def test_gemma3_scaling_is_for_full_layers_alone(tiny_config):
    config = resolved(tiny_config("gemma3"), "rope_parameters", rope_scaling={"rope_type": "linear", "factor": 8.0})
    scalings = [rope.scaling for rope in config.ropes]
    assert scalings == [None, None, LinearScaling(8.0)] * 2
    assert [rope.theta for rope in config.ropes] == [10000.0, 10000.0, 1000000.0] * 2


def test_gemma3_pattern_defaults_to_five_sliding_to_one_full(tiny_config):
    windows = resolved(tiny_config("gemma3"), "layer_types").windows
    assert windows == (32,) * 5 + (None,)


def test_gemma3_scores_are_scaled_by_the_query_scalar_and_capped(tiny_config):
    spec = resolved(tiny_config("gemma3"), query_pre_attn_scalar=64, attn_logit_softcapping=50.0).attention_layers()[0]
    assert (spec.scale, spec.soft_cap) == (1 / 8, 50.0)


def test_olmo3_yarn_is_for_full_layers_alone_in_both_spellings(tiny_config):
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 1.2}
    old = resolved(tiny_config("olmo3"), "rope_parameters", rope_theta=500000.0, rope_scaling=yarn)
    kinds = {
        "full_attention": {"rope_theta": 500000.0, **yarn},
        "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
    }
    assert resolved(tiny_config("olmo3"), rope_parameters=kinds) == old
    assert [isinstance(rope.scaling, YarnScaling) for rope in old.ropes] == [False, False, False, True]


def test_gpt_oss_config_as_it_was_released_says_the_same_as_the_new_one(tiny_config):
    new = tiny_config("gpt_oss")
    old = {"rope_theta": 150000.0, "rope_scaling": new["rope_scaling"], "initial_context_length": 4096}
    assert resolved(new, "rope_parameters", "layer_types", "swiglu_alpha", "swiglu_limit", **old) == resolved(new)
    assert resolved(new).windows == (32, None, 32, None)
    assert resolved(new, "sliding_window").windows[0] == 128
    with pytest.raises(UnsupportedConfig, match="rope_scaling"):
        resolved(new, "rope_parameters", "rope_scaling")


def test_gpt_oss_rotation_is_stretched_by_a_tenth_of_the_factors_logarithm(tiny_config):
    """F13 of the model facts; the blend's bounds are not rounded to channels."""
    parameters = tiny_config("gpt_oss")["rope_parameters"] | {"factor": 32.0, "original_max_position_embeddings": 4096}
    config = resolved(tiny_config("gpt_oss"), rope_parameters=parameters, head_dim=64)
    scaling = config.ropes[0].scaling
    assert scaling.attention_factor == pytest.approx(1.346574, abs=1e-6)
    assert not scaling.whole_channels


@pytest.mark.parametrize("family", ALL)
def test_configurations_are_hashable_and_list_their_layers(family, tiny_config):
    config = resolved(tiny_config(family))
    assert hash(config) == hash(resolved(tiny_config(family)))
    layers = config.attention_layers()
    assert [spec.layer_id for spec in layers] == list(range(config.num_layers))
    attention = [spec for spec in layers if isinstance(spec, AttentionSpec)]
    assert all((spec.num_heads, spec.num_kv_heads) == (4, 2) for spec in attention)
    assert config.cache_family in CACHE_FAMILIES


def test_qwen3_moe_counts_experts_in_both_spellings(tiny_config):
    config = tiny_config("qwen3_moe")
    new = resolved(config)
    assert new.num_experts == 8
    assert resolved(config, "num_local_experts", num_experts=8) == new
    assert resolved(config, "num_local_experts").num_experts == 128


def test_qwen3_moe_layers_without_experts_are_named_or_between_steps(tiny_config):
    config = tiny_config("qwen3_moe")
    assert resolved(config).sparse == (False, True, True, True)
    assert resolved(config, mlp_only_layers=None, decoder_sparse_step=2).sparse == (False, True, False, True)
    assert resolved(config, mlp_only_layers=[1], decoder_sparse_step=2).sparse == (False, False, False, True)


def test_qwen3_moe_windows_need_the_switch_and_are_on_every_layer(tiny_config):
    config = tiny_config("qwen3_moe") | {"sliding_window": 16}
    assert resolved(config).windows == (None,) * 4
    assert resolved(config, use_sliding_window=True).windows == (16,) * 4


def test_minimax_m2_turns_the_channels_that_rotary_dim_counts(tiny_config):
    config = tiny_config("minimax_m2")
    assert {rope.dim for rope in resolved(config).ropes} == {16}
    assert {rope.dim for rope in resolved(config, rotary_dim=8).ropes} == {8}
    assert resolved(config, "rope_parameters", "rope_theta", rotary_dim=8).ropes[0].theta == 5_000_000.0
