"""What the Mamba families share: the stack around their mixers, with no attention and no position."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionStep, RecurrentSpec
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.linear import Embedding, Linear, vocabulary_scores
from tokenspeed_jax.models.norms import RMSNorm
from tokenspeed_jax.models.rematerialisation import layer_call
from tokenspeed_jax.models.weight_map import WeightRule, linear_rules, reshaped, same

LONGEST_CONTEXT = 131_072
"""Tokens that a request may have. The recurrence has no limit of its own, but requests are checked against one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpaceConfig:
    """A stack of mixers.

    Attributes:
        inner_size: channels of a mixer.
        state_size: values that each channel, or each head's row, carries.
        convolution_width: tokens that a filter spans, the current one included.
        projection_bias, convolution_bias: which of them have biases.
        float32_residual: whether the stream between layers is float32 whatever the model's dtype.
    """

    vocab_size: int
    hidden_size: int
    inner_size: int
    state_size: int
    num_layers: int
    convolution_width: int
    projection_bias: bool
    convolution_bias: bool
    rms_norm_eps: float
    float32_residual: bool
    tie_word_embeddings: bool
    max_position_embeddings: int = LONGEST_CONTEXT

    @property
    def cache_family(self) -> str:
        """The recipe of the model's cache, see `recipes.setup.CACHE_FAMILIES`."""
        return "hybrid"

    @property
    def convolution_channels(self) -> int:
        """Channels that pass through the convolution."""
        return self.inner_size

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The recurrence's state of one layer."""
        return (self.inner_size, self.state_size)

    def attention_layers(self) -> tuple[RecurrentSpec, ...]:
        """What each layer carries."""
        convolution = (self.convolution_channels, self.convolution_width)
        return tuple(RecurrentSpec(index, convolution, self.state_shape) for index in range(self.num_layers))


def state_space_fields(config: HfConfig) -> dict[str, Any]:
    """The fields of `StateSpaceConfig` that both generations spell alike; `inner_size` is the caller's."""
    config.refuse_unless("hidden_act", "silu", "silu")
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": config.integer("hidden_size"),
        "state_size": config.integer("state_size"),
        "num_layers": config.integer("num_hidden_layers"),
        "convolution_width": config.integer("conv_kernel", 4),
        "projection_bias": config.flag("use_bias", False),
        "convolution_bias": config.flag("use_conv_bias", True),
        "rms_norm_eps": config.number("layer_norm_epsilon", 1e-5),
        "float32_residual": config.flag("residual_in_fp32", True),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
    }


class StateSpaceDecoder(nnx.Module):
    """Embedding, x += mixer(norm(x)) for every layer, final norm and output head; a family gives its mixer."""

    mixer_type: ClassVar[Callable[..., Any]]

    def __init__(self, config: Any, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        specs = config.attention_layers()
        self.norms = nnx.List([RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype) for _ in specs])
        self.mixers = nnx.List([type(self).mixer_type(config, spec, dtype=dtype, rngs=rngs) for spec in specs])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        step: AttentionStep,
        *,
        remat: bool = False,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states after the final norm, of sequences packed one after another; positions play no part."""
        del positions
        x = self.embed(token_ids)
        dtype = x.dtype
        x = x.astype(jnp.float32) if self.config.float32_residual else x

        def layer(modules: tuple[Any, Any], x: Array, step: AttentionStep) -> Array:
            norm, mixer = modules
            return x + mixer(norm(x.astype(dtype)), step)

        for modules in zip(self.norms, self.mixers, strict=True):
            x = layer_call(modules, step, remat=remat, call=layer)(x)
        return self.norm(x.astype(dtype))

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Scores of the next token, float32, for rows of what the model returned."""
        table = self.embed if self.head is None else self.head
        return vocabulary_scores(hidden, table.weight[...])


def state_space_rules(config: StateSpaceConfig) -> Iterator[WeightRule]:
    """The tensors around the mixers, and those parts of a mixer that both generations name alike."""
    yield same(("embed", "weight"), "backbone.embeddings.weight")
    yield same(("norm", "weight"), "backbone.norm_f.weight")
    if not config.tie_word_embeddings:
        yield same(("head", "weight"), "lm_head.weight")
    channels, width = config.convolution_channels, config.convolution_width
    for index in range(config.num_layers):
        here, there = ("mixers", index), f"backbone.layers.{index}.mixer"
        yield same(("norms", index, "weight"), f"backbone.layers.{index}.norm.weight")
        yield from linear_rules((*here, "proj"), f"{there}.in_proj", bias=config.projection_bias)
        yield from linear_rules((*here, "out"), f"{there}.out_proj", bias=config.projection_bias)
        yield reshaped((*here, "filters"), f"{there}.conv1d.weight", (channels, 1, width), (channels, width))
        if config.convolution_bias:
            yield same((*here, "filter_bias"), f"{there}.conv1d.bias")
        yield same((*here, "log_rate"), f"{there}.A_log")
        yield same((*here, "skip"), f"{there}.D")
