"""DeepSeek-V3 and R1: latent attention with rotary channels, grouped experts. Hugging Face `DeepseekV3ForCausalLM`."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tokenspeed_jax.models.attention import AttentionStep, LatentAttentionSpec
from tokenspeed_jax.models.decoder import CausalDecoder
from tokenspeed_jax.models.experts import SparseMLP, expert_rules, routing_rule
from tokenspeed_jax.models.hf_config import HfConfig, positive_number
from tokenspeed_jax.models.latent_attention import LatentAttention, latent_dimensions, latent_rules
from tokenspeed_jax.models.mlp import GatedMLP
from tokenspeed_jax.models.norms import Residual, RMSNorm
from tokenspeed_jax.models.rope import Rope, Rotation, YarnScaling
from tokenspeed_jax.models.weight_map import WeightRule, gated_mlp_rules, same, vocabulary_rules
from tokenspeed_jax.pallas_kernels.experts import RoutingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedAndRouted:
    """The experts of one layer.

    Attributes:
        expert_size: inner channels of each routed expert.
        shared_size: inner channels of the experts that every token takes, which are one MLP.
    """

    num_experts: int
    expert_size: int
    shared_size: int
    routing: RoutingRule


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Config:
    """The fields of `config.json` that the model reads, under this project's names.

    Attributes:
        q_lora_rank: channels of the queries' latent; None projects queries directly.
        interleaved: positional channels turn in pairs (2i, 2i + 1), else in pairs (i, i + rope_dim / 2).
        dense_layers: how many leading layers have a dense MLP of `intermediate_size`.
        experts: of the layers behind those.
    """

    cache_family = "ordinary"

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    q_lora_rank: int | None
    attention: tuple[LatentAttentionSpec, ...]
    rope: Rope
    interleaved: bool
    dense_layers: int
    experts: SharedAndRouted

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding of each layer."""
        return (self.rope,) * self.num_layers

    def attention_layers(self) -> tuple[LatentAttentionSpec, ...]:
        """What each layer's attention computes."""
        return self.attention

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        for field, served in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("moe_layer_freq", 1),
            ("scoring_func", "sigmoid"),
            ("topk_method", "noaux_tc"),
        ):
            config.refuse_unless(field, served, served)
        num_layers = config.integer("num_hidden_layers")
        dimensions = latent_dimensions(config)
        rope = Rope.from_hf(config, dimensions["rope_dim"])
        scale = _score_scale(config, rope, dimensions["nope_dim"] + dimensions["rope_dim"])
        return cls(
            vocab_size=config.integer("vocab_size"),
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=num_layers,
            max_position_embeddings=config.integer("max_position_embeddings"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            q_lora_rank=config.optional_integer("q_lora_rank", 1536),
            attention=tuple(LatentAttentionSpec(i, **dimensions, scale=scale) for i in range(num_layers)),
            rope=rope,
            interleaved=config.flag("rope_interleave", True),
            dense_layers=config.count("first_k_dense_replace", 3),
            experts=_experts(config),
        )


def _experts(config: HfConfig) -> SharedAndRouted:
    num_experts, expert_size = config.integer("n_routed_experts", 256), config.integer("moe_intermediate_size", 2048)
    return SharedAndRouted(
        num_experts=num_experts,
        expert_size=expert_size,
        shared_size=expert_size * config.integer("n_shared_experts", 1),
        routing=routing_rule(
            num_experts,
            config.integer("num_experts_per_tok", 8),
            scores="sigmoid",
            renormalize=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 2.5),
            num_groups=config.integer("n_group", 8),
            top_groups=config.integer("topk_group", 4),
        ),
    )


def _score_scale(config: HfConfig, rope: Rope, query_dim: int) -> float:
    """1 / sqrt(query channels); under YaRN times the square of a magnitude that grows with the factor."""
    parameters = config.fields.get("rope_parameters") or config.fields.get("rope_scaling") or {}
    scale = query_dim**-0.5
    if not isinstance(rope.scaling, YarnScaling) or not parameters.get("mscale_all_dim") or rope.scaling.factor <= 1:
        return scale
    weight = positive_number(parameters["mscale_all_dim"], "rope_scaling.mscale_all_dim")
    return scale * (0.1 * weight * math.log(rope.scaling.factor) + 1.0) ** 2


class SharedAndRoutedMLP(nnx.Module):
    """The experts that the router picks for a token, plus those that every token takes."""

    def __init__(
        self, hidden_size: int, experts: SharedAndRouted, layer_id: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.routed = SparseMLP(
            hidden_size,
            experts.expert_size,
            experts.num_experts,
            experts.routing,
            layer_id=layer_id,
            dtype=dtype,
            rngs=rngs,
            selection_bias=True,
        )
        self.shared = GatedMLP(hidden_size, experts.shared_size, "silu", dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden"], step: AttentionStep | None = None
    ) -> Float[Array, "tokens hidden"]:
        return self.routed(x, step) + self.shared(x)


def shared_and_routed_rules(
    here: tuple[str | int, ...],
    there: str,
    hidden_size: int,
    experts: SharedAndRouted,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[WeightRule]:
    """Where a `SharedAndRoutedMLP` finds its tensors; `projections` are the names within a routed expert."""
    yield from gated_mlp_rules((*here, "shared"), f"{there}.shared_experts", experts.shared_size)
    yield from expert_rules(
        (*here, "routed"),
        router=f"{there}.gate",
        experts=f"{there}.experts",
        hidden_size=hidden_size,
        expert_size=experts.expert_size,
        num_experts=experts.num_experts,
        projections=projections,
        selection_bias=f"{there}.gate.e_score_correction_bias",
    )


class DeepseekV3Layer(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(
        self, config: DeepseekV3Config, spec: LatentAttentionSpec, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.interleaved = config.interleaved
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = LatentAttention(config.hidden_size, spec, config.q_lora_rank, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size, "silu", dtype=dtype, rngs=rngs)
            if spec.layer_id < config.dense_layers
            else SharedAndRoutedMLP(config.hidden_size, config.experts, spec.layer_id, dtype=dtype, rngs=rngs)
        )

    def __call__(self, stream: Residual, rotate: Rotation, step: AttentionStep) -> Residual:
        def turn(channels: Float[Array, "tokens heads rope_dim"]) -> Float[Array, "tokens heads rope_dim"]:
            return rotate(_pairs_apart(channels) if self.interleaved else channels)

        x, normed = self.attention_norm.after(stream)
        x, normed = self.mlp_norm.after(Residual(x, self.attention(normed, turn, step)))
        return Residual(x, self.mlp(normed, step))


def _pairs_apart(x: Float[Array, "tokens heads dim"]) -> Float[Array, "tokens heads dim"]:
    """Channels (0, 2, ..., 1, 3, ...): queries and keys move alike, so their products stay what they were."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    return pairs.swapaxes(-1, -2).reshape(x.shape)


class DeepseekV3(CausalDecoder):
    """The whole model; the layer behind the last, which only predicts further tokens ahead, is left out."""

    layer_type = DeepseekV3Layer
    norm_type = RMSNorm

    @staticmethod
    def ignored_tensors(config: DeepseekV3Config) -> tuple[str, ...]:
        """Beginnings of tensor names that the checkpoint may have and the model does not compute with."""
        return (f"model.layers.{config.num_layers}.",)

    @staticmethod
    def weight_map(config: DeepseekV3Config) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        rules = list(vocabulary_rules(config))
        for spec in config.attention_layers():
            here, there = ("layers", spec.layer_id), f"model.layers.{spec.layer_id}"
            rules.append(same((*here, "attention_norm", "weight"), f"{there}.input_layernorm.weight"))
            rules += latent_rules((*here, "attention"), f"{there}.self_attn", spec, config.q_lora_rank)
            rules.append(same((*here, "mlp_norm", "weight"), f"{there}.post_attention_layernorm.weight"))
            if spec.layer_id < config.dense_layers:
                rules += gated_mlp_rules((*here, "mlp"), f"{there}.mlp", config.intermediate_size)
            else:
                rules += shared_and_routed_rules((*here, "mlp"), f"{there}.mlp", config.hidden_size, config.experts)
        return tuple(rules)
