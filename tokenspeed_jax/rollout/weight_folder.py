"""Weights that another process wrote into a folder, as the engine takes them."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.source import compute_dtype
from tokenspeed_jax.weights import CheckpointConfig, load_model, open_config, open_weights


@dataclass(frozen=True)
class WeightFolderReader:
    """Reads folders of safetensors files as weights of one model.

    Attributes:
        checkpoint: the configuration of that model.
        dtype: what its parameters are cast to.
    """

    checkpoint: CheckpointConfig
    dtype: jnp.dtype

    @classmethod
    def of_served(cls, config: EngineConfig) -> Self:
        """For the model that an engine was started with.

        Raises:
            CheckpointError: its configuration is gone.
        """
        checkpoint = open_config(config.model, revision=config.revision, progress=False)
        return cls(checkpoint, compute_dtype(config, checkpoint, jax.default_backend()))

    def read(self, folder: str) -> nnx.State:
        """The parameters, on the default device. Names and shapes of all tensors are checked before one is read.

        Raises:
            CheckpointError: no such folder, or tensors that are missing, unknown or of the wrong shape.
        """
        weights = open_weights(folder, self.checkpoint)
        return nnx.state(load_model(weights, dtype=self.dtype, progress=False))
