"""Where an engine's model comes from: a checkpoint, or a model that already exists."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.memory import tree_bytes
from tokenspeed_jax.engine.stop import TextSource
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.experts import expert_layer_ids
from tokenspeed_jax.models.registry import ModelConfig
from tokenspeed_jax.text import Detokenizer, Tokenizer
from tokenspeed_jax.weights import CheckpointConfig, load_model, model_of, open_checkpoint


class _NoText:
    """The text source of an engine without a tokenizer."""

    def push(self, token_ids: list[int]) -> str:
        del token_ids
        return ""

    def flush(self) -> str:
        return ""


@dataclass(frozen=True)
class ModelSource:
    """A model before it is on the device, with what the engine must know to size itself.

    Attributes:
        weight_bytes: device bytes that `build` will add.
        build: puts the model on the device and returns it; may be called once.
        shares_weights: whether the model's arrays are somebody else's too.
        moe_layers: ids of the layers that have experts.
        dtype: compute dtype; keys and values are cached in it too.
    """

    name: str
    config: ModelConfig
    dtype: jnp.dtype
    weight_bytes: int
    build: Callable[[], nnx.Module]
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    moe_layers: tuple[int, ...]
    shares_weights: bool = False

    @classmethod
    def of_checkpoint(cls, config: EngineConfig) -> Self:
        """Opens a checkpoint and reads its configuration and tokenizer; no weights yet.

        Raises:
            CheckpointError: see `weights.open_checkpoint` and `weights.model_of`.
        """
        progress = not config.disable_progress_bars
        checkpoint = open_checkpoint(config.model, revision=config.revision, progress=progress)
        family, model_config = model_of(checkpoint)
        dtype = compute_dtype(config, checkpoint, jax.default_backend())
        shapes = nnx.eval_shape(lambda: family.build(model_config, dtype=dtype, rngs=nnx.Rngs(0)))
        tokenizer = checkpoint.tokenizer()
        return cls(
            name=checkpoint.name,
            config=model_config,
            dtype=dtype,
            weight_bytes=tree_bytes(nnx.state(shapes)),
            build=lambda: load_model(checkpoint, dtype=dtype, progress=progress),
            tokenizer=tokenizer,
            eos_token_ids=tokenizer.eos_token_ids,
            moe_layers=expert_layer_ids(shapes),
        )

    @classmethod
    def of_model(
        cls, model: Any, config: EngineConfig, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...]
    ) -> Self:
        """A model whose arrays are on the device already; they are used as they are.

        Raises:
            ConfigError: `dtype` asks for another dtype than the model has.
        """
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model)) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        # Some families keep a few parameters in float32, whatever the model computes in.
        dtypes = dtypes - {jnp.dtype("float32")} or dtypes
        if len(dtypes) != 1:
            raise ConfigError(f"the model's parameters must have one float dtype, got {sorted(map(str, dtypes))}")
        dtype = jnp.dtype(dtypes.pop())
        if config.dtype not in ("auto", dtype.name):
            raise ConfigError(f"dtype {config.dtype} differs from the model's own {dtype.name}", field="dtype")
        eos = eos_token_ids or (tokenizer.eos_token_ids if tokenizer else ())
        # Handed on rather than kept: once there are other weights, nothing here may keep these alive.
        handed_on, moe_layers = [model], expert_layer_ids(model)
        return cls(config.model, model.config, dtype, 0, handed_on.pop, tokenizer, eos, moe_layers, shares_weights=True)

    def detokenizer(self, *, skip_special_tokens: bool) -> TextSource:
        """A fresh incremental detokenizer for one sample."""
        if self.tokenizer is None:
            return _NoText()
        return Detokenizer(self.tokenizer, skip_special_tokens=skip_special_tokens)


def compute_dtype(config: EngineConfig, checkpoint: CheckpointConfig, platform: str) -> jnp.dtype:
    """The dtype that a checkpoint's model computes in on a platform ("gpu" or "cpu").

    Raises:
        CheckpointError: it was saved in a dtype that is not served, and none was asked for.
    """
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    if platform != "gpu":
        return jnp.dtype("float32")
    return checkpoint.dtype
