"""What trainers use: log-probabilities with gradients here, and each adapter in a module of its own.

The engine imports none of it.
"""

from tokenspeed_jax.models.log_probabilities import token_log_probabilities

__all__ = ["token_log_probabilities"]
