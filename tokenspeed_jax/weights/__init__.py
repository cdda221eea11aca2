"""Checkpoints: safetensors folders, GGUF files and hub ids, loaded into models."""

from tokenspeed_jax.weights.checkpoint import Checkpoint, CheckpointConfig, open_checkpoint, open_config, open_weights
from tokenspeed_jax.weights.loader import load_model, model_of

__all__ = ["Checkpoint", "CheckpointConfig", "load_model", "model_of", "open_checkpoint", "open_config", "open_weights"]
