"""For trainers that use the engine's models: what a sample's log-probabilities are in a forward pass with gradients."""

from tokenspeed_jax.models.log_probabilities import token_log_probabilities

__all__ = ["token_log_probabilities"]
