"""Sizes of one engine, resolved from its options, its model and its platform before anything is allocated."""

from dataclasses import dataclass
from typing import Self

from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.errors import ConfigError

DEFAULT_PREFIX_GRANULARITY = 64


@dataclass(frozen=True)
class EngineLimits:
    """Resolved limits.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        max_num_seqs: rows of a step, and request slots.
        max_num_batched_tokens: tokens of a step.
        prefix_granularity: tokens per prefix page.
        returns_routed_experts: whether requests may ask for the experts of their tokens.
        overlap_depth: steps that may be planned ahead of the landed one, 0 or 1.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefix_granularity: int
    overlap_depth: int
    vocab_size: int
    returns_routed_experts: bool = False

    @classmethod
    def resolve(cls, config: EngineConfig, *, model_limit: int, vocab_size: int, platform: str) -> Self:
        """Fills the defaults of a platform ("gpu" or "cpu").

        Args:
            model_limit: longest context that the model was made for, in tokens.

        Raises:
            ConfigError: an option exceeds what the model or another option allows.
        """
        if config.max_model_len is not None and config.max_model_len > model_limit:
            raise ConfigError(
                f"max_model_len {config.max_model_len} exceeds the model's context length {model_limit}",
                field="max_model_len",
            )
        on_gpu = platform == "gpu"
        max_num_seqs = config.max_num_seqs or (256 if on_gpu else 16)
        max_num_batched_tokens = config.max_num_batched_tokens or max(8192 if on_gpu else 512, max_num_seqs)
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {max_num_batched_tokens} is below max_num_seqs {max_num_seqs}: a step could "
                "not feed one token of every running request",
                field="max_num_batched_tokens",
            )
        return cls(
            max_model_len=config.max_model_len or model_limit,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_granularity=config.prefix_granularity or DEFAULT_PREFIX_GRANULARITY,
            overlap_depth=int(config.overlap_schedule),
            vocab_size=vocab_size,
            returns_routed_experts=config.enable_return_routed_experts,
        )
