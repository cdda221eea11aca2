"""Qwen3.5, dense: three Gated DeltaNet layers to one of gated attention. Hugging Face `Qwen3_5ForCausalLM`.

Released checkpoints are `Qwen3_5ForConditionalGeneration`, which also sees images: their text model is served, and
what only images pass through is left out. For text the three position streams of such a model are one.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from flax import nnx
from jax.typing import DTypeLike

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep, LayerSpec, RecurrentSpec
from tokenspeed_jax.models.decoder import CausalDecoder, DecoderConfig, decoder_fields
from tokenspeed_jax.models.gated_attention import GatedAttention, gated_attention_rules
from tokenspeed_jax.models.gated_delta_net import DeltaNetShape, GatedDeltaNet, delta_net_rules
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, LINEAR_ATTENTION, HfConfig, UnsupportedConfig
from tokenspeed_jax.models.llama import dense_mlp
from tokenspeed_jax.models.norms import GemmaRMSNorm, Residual
from tokenspeed_jax.models.rope import Rope, Rotation
from tokenspeed_jax.models.weight_map import WeightRule, fused_rules, gated_mlp_rules, same, vocabulary_rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3_5Config(DecoderConfig):
    """A decoder whose layers are attention where `kinds` says so, and Gated DeltaNet elsewhere.

    Attributes:
        kinds: per layer, "full_attention" or "linear_attention".
        multimodal: the checkpoint holds the text model as one part of a model that also sees images.
    """

    kinds: tuple[str, ...]
    delta_net: DeltaNetShape
    multimodal: bool = False

    @property
    def cache_family(self) -> str:
        return "hybrid"

    def attention_layers(self) -> tuple[LayerSpec, ...]:
        return tuple(
            spec if kind == FULL_ATTENTION else self.delta_net.spec(spec.layer_id)
            for spec, kind in zip(super().attention_layers(), self.kinds, strict=True)
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config, multimodal = text_config(hf)
        return cls(**delta_net_hybrid_fields(config, kv_heads=4), multimodal=multimodal)


def text_config(hf: Mapping[str, Any]) -> tuple[HfConfig, bool]:
    """The fields of the text model, and whether it is part of a model that also sees images."""
    text = hf.get("text_config")
    if text is None:
        return HfConfig(hf), False
    if not isinstance(text, Mapping):
        raise UnsupportedConfig(f"config.json: text_config must be an object, got {text!r}")
    tied = hf.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    if tied != text.get("tie_word_embeddings", tied):
        raise UnsupportedConfig(f"config.json: tie_word_embeddings is {tied!r}, and not so in text_config")
    return HfConfig({**text, "tie_word_embeddings": tied}), True


def delta_net_hybrid_fields(config: HfConfig, **defaults: Any) -> dict[str, Any]:
    """The fields of `Qwen3_5Config` that its relatives spell alike; `defaults` go to `decoder_fields`."""
    config.refuse_unless("hidden_act", "silu", "silu")
    config.refuse_unless("attention_bias", False, False)
    config.refuse_unless("attn_output_gate", True, True)
    config.refuse_unless("output_gate_type", "swish", "swish", "silu")
    config.refuse_unless("mamba_ssm_dtype", "float32", "float32")
    fields = decoder_fields(config, head_dim=256, **defaults)
    layers = fields["num_layers"]
    period = config.integer("full_attention_interval", 4)
    pattern = tuple(FULL_ATTENTION if (i + 1) % period == 0 else LINEAR_ATTENTION for i in range(layers))
    return {
        **fields,
        "attention_bias": False,
        "windows": (None,) * layers,
        "ropes": (Rope.from_hf(config, fields["head_dim"], partial_rotary_factor=0.25),) * layers,
        "kinds": config.layer_types(layers, pattern, served=(FULL_ATTENTION, LINEAR_ATTENTION)),
        "delta_net": DeltaNetShape.from_hf(config),
    }


class Qwen3_5Layer(nnx.Module):
    """x += mixer(norm(x)); x += mlp(norm(x)); a relative gives its own feed-forward block."""

    mlp_type: ClassVar[Callable[..., Any]] = dense_mlp

    def __init__(self, config: Qwen3_5Config, spec: LayerSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        dim, epsilon = config.hidden_size, config.rms_norm_eps
        self.mixer_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)
        if isinstance(spec, RecurrentSpec):
            self.mixer = GatedDeltaNet(dim, config.delta_net, spec, epsilon, dtype=dtype, rngs=rngs)
        else:
            assert isinstance(spec, AttentionSpec)
            self.mixer = GatedAttention(dim, spec, epsilon, dtype=dtype, rngs=rngs)
        self.mlp_norm = GemmaRMSNorm(dim, epsilon, dtype=dtype)
        self.mlp = type(self).mlp_type(config, spec, dtype=dtype, rngs=rngs)

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        x, normed = self.mixer_norm.after(stream)
        x, normed = self.mlp_norm.after(Residual(x, self.mixer(normed, rotate, step)))
        return Residual(x, self.mlp(normed, step))


def ignored_qwen_tensors(config: Qwen3_5Config) -> tuple[str, ...]:
    """What only predicts further tokens ahead, or only images pass through."""
    return ("mtp.", "model.visual.") if config.multimodal else ("mtp.",)


class Qwen3_5(CausalDecoder):
    """The whole model."""

    layer_type = Qwen3_5Layer
    norm_type = GemmaRMSNorm
    ignored_tensors = staticmethod(ignored_qwen_tensors)

    @staticmethod
    def weight_map(config: Qwen3_5Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""

        def mlp_rules(layer_id: int) -> Iterator[WeightRule]:
            return gated_mlp_rules(
                ("layers", layer_id, "mlp"), f"model.layers.{layer_id}.mlp", config.intermediate_size
            )

        return delta_net_hybrid_rules(config, split_projection_rules, mlp_rules)


def split_projection_rules(
    here: tuple[str | int, ...], there: str, hidden_size: int, shape: DeltaNetShape
) -> Iterator[WeightRule]:
    """`GatedDeltaNet.proj` of four tensors."""
    del hidden_size
    tensors = tuple(f"{there}.in_proj_{name}" for name in ("qkv", "z", "b", "a"))
    rows = (shape.convolution[0], shape.value_rows, shape.value_heads, shape.value_heads)
    return fused_rules((*here, "proj"), tensors, rows)


def delta_net_hybrid_rules(
    config: Qwen3_5Config,
    projection_rules: Callable[[tuple[str | int, ...], str, int, DeltaNetShape], Iterable[WeightRule]],
    mlp_rules: Callable[[int], Iterable[WeightRule]],
) -> tuple[WeightRule, ...]:
    """The rules of Qwen3.5 and its relatives.

    Args:
        projection_rules: those of `GatedDeltaNet.proj`.
        mlp_rules: those of a layer's feed-forward block, by layer id, named as in a checkpoint of text alone.
    """
    rules = list(vocabulary_rules(config))
    for spec in config.attention_layers():
        here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
        if isinstance(spec, RecurrentSpec):
            mixer, tensors = (*here, "mixer"), f"{there}.linear_attn"
            rules += delta_net_rules(mixer, tensors, config.delta_net)
            rules += projection_rules(mixer, tensors, config.hidden_size, config.delta_net)
        elif isinstance(spec, AttentionSpec):
            rules += gated_attention_rules((*here, "mixer"), f"{there}.self_attn", config.hidden_size, spec)
        rules += mlp_rules(spec.layer_id)
        rules.append(same((*here, "mixer_norm", "weight"), f"{there}.input_layernorm.weight"))
        rules.append(same((*here, "mlp_norm", "weight"), f"{there}.post_attention_layernorm.weight"))
    return tuple(map(_within_multimodal, rules)) if config.multimodal else tuple(rules)


def _within_multimodal(rule: WeightRule) -> WeightRule:
    """The text model's tensors stand under `model.language_model.`, its head where it always stands."""
    names = tuple(
        name if name.startswith("lm_head.") else name.replace("model.", "model.language_model.", 1)
        for name in rule.tensors
    )
    return dataclasses.replace(rule, tensors=names)
