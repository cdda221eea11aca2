"""What the dense decoder families share: the fields of their configuration, and the stack around their layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionSpec, AttentionStep
from tokenspeed_jax.models.hf_config import REQUIRED, HfConfig, Required, UnsupportedConfig
from tokenspeed_jax.models.linear import Embedding, Linear, vocabulary_scores
from tokenspeed_jax.models.norms import Residual
from tokenspeed_jax.models.rematerialisation import layer_call
from tokenspeed_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense decoder.

    Attributes:
        windows: per layer, how many tokens a query sees, itself included; None sees all before it.
        ropes: per layer, its rotary embedding.
        max_position_embeddings: longest context in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedConfig(
                f"config.json: num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    @property
    def cache_family(self) -> str:
        """The recipe of the model's cache, see `recipes.setup.CACHE_FAMILIES`."""
        return "ordinary"

    @property
    def attention_scale(self) -> float:
        """Factor on q.k."""
        return self.head_dim**-0.5

    @property
    def attention_soft_cap(self) -> float | None:
        """Bound of the scores, see `AttentionSpec.soft_cap`."""
        return None

    def attention_layers(self) -> tuple[AttentionSpec, ...]:
        """What each layer's attention computes."""
        return tuple(
            AttentionSpec(
                layer_id=layer_id,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.attention_scale,
                sliding_window=window,
                soft_cap=self.attention_soft_cap,
            )
            for layer_id, window in enumerate(self.windows)
        )


def decoder_fields(
    config: HfConfig,
    *,
    kv_heads: int | Required | None = REQUIRED,
    head_dim: int | None = None,
    intermediate_size: int | Required = REQUIRED,
    rms_norm_eps: float = 1e-6,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """The fields of `DecoderConfig` that all families spell alike; the layers' windows and ropes are the caller's.

    Args:
        kv_heads: num_key_value_heads when it is absent; None for one per query head.
        head_dim: head_dim when it is absent; None for hidden_size / num_attention_heads.
        intermediate_size, rms_norm_eps, tie_word_embeddings: the Hugging Face class's defaults.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if head_dim is None and config.fields.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedConfig(
            f"config.json has no head_dim, and hidden_size {hidden_size} is not a multiple of "
            f"num_attention_heads {num_heads}"
        )
    return {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": config.integer("intermediate_size", intermediate_size),
        "num_layers": config.integer("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": config.integer("num_key_value_heads", num_heads if kv_heads is None else kv_heads),
        "head_dim": config.integer("head_dim", hidden_size // num_heads if head_dim is None else head_dim),
        "max_position_embeddings": config.integer("max_position_embeddings"),
        "rms_norm_eps": config.number("rms_norm_eps", rms_norm_eps),
        "tie_word_embeddings": config.flag("tie_word_embeddings", tie_word_embeddings),
    }


class CausalDecoder(nnx.Module):
    """Embedding, layers, final norm and output head; a family gives its layer and its norm.

    Parameters are created in `dtype`, and activations have it too.
    """

    layer_type: ClassVar[Callable[..., Any]]
    norm_type: ClassVar[Callable[..., Any]]

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [type(self).layer_type(config, spec, dtype=dtype, rngs=rngs) for spec in config.attention_layers()]
        )
        self.norm = type(self).norm_type(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, config.vocab_size, dtype=dtype, rngs=rngs)
        )

    def embeddings(self, token_ids: Int[Array, " tokens"]) -> Float[Array, "tokens hidden"]:
        """What the first layer reads."""
        return self.embed(token_ids)

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        step: AttentionStep,
        *,
        remat: bool = False,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states after the final norm, of sequences packed one after another.

        Args:
            positions: each token's place in its own sequence.
            step: what the tokens attend to, see `attend`.
            remat: for gradients, keep what goes from layer to layer alone; needs a `PlainStep`.
        """
        stream = Residual(self.embeddings(token_ids))
        rotations = {rope: rope.at(positions) for rope in dict.fromkeys(self.config.ropes)}
        for layer, rope in zip(self.layers, self.config.ropes, strict=True):
            stream = layer_call(layer, step, remat=remat)(stream, rotations[rope])
        return self.norm.after(stream)[1]

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Scores of the next token, float32, for rows of what the model returned."""
        table = self.embed if self.head is None else self.head
        return self.capped(vocabulary_scores(hidden, table.weight[...]))

    def capped(self, scores: Float[Array, "rows vocab"]) -> Float[Array, "rows vocab"]:
        """Scores after the family's soft cap; most have none."""
        return scores


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return jax.nn.silu(x)


def soft_cap(x: Array, bound: float | None) -> Array:
    """Squeezes x into (-bound, bound); None leaves it."""
    return x if bound is None else bound * jnp.tanh(x / bound)
