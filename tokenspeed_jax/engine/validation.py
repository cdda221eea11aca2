"""What the engine refuses, before anything is changed."""

from collections.abc import Sequence

from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.sampling_state import blocked_ids
from tokenspeed_jax.errors import InvalidRequest


def check_tokens(token_ids: Sequence[int], limits: EngineLimits) -> None:
    """Checks that a prompt is a non-empty list of ids of the vocabulary, no longer than the context.

    Raises:
        InvalidRequest: naming the parameter, the value and the limit.
    """
    if not token_ids:
        raise InvalidRequest("prompt must not be empty", parameter="prompt")
    for token in token_ids:
        _check_token_id("prompt", token, limits.vocab_size)
    if len(token_ids) > limits.max_model_len:
        raise InvalidRequest(
            f"prompt has {len(token_ids)} tokens; the limit is max_model_len {limits.max_model_len}", parameter="prompt"
        )


def check_sampling(
    token_ids: Sequence[int], params: SamplingParams, limits: EngineLimits, eos_token_ids: Sequence[int]
) -> int:
    """Checks sampling parameters against the vocabulary and, with a checked prompt, against the context length.

    Args:
        eos_token_ids: end-of-sequence ids of the model.

    Returns:
        The most tokens to generate: `params.max_tokens`, or all that fit.

    Raises:
        InvalidRequest: naming the parameter, the value and the limit.
    """
    room = limits.max_model_len - len(token_ids)
    if room < 1:
        raise InvalidRequest(
            f"prompt has {len(token_ids)} tokens; with one token of output the limit is max_model_len "
            f"{limits.max_model_len}",
            parameter="prompt",
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt ({len(token_ids)} tokens) plus max_tokens ({max_tokens}) is {len(token_ids) + max_tokens}; "
            f"the limit is max_model_len {limits.max_model_len}",
            parameter="max_tokens",
        )
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens must not exceed the {max_tokens} tokens that can be generated, got {params.min_tokens}",
            parameter="min_tokens",
        )
    if params.return_routed_experts and not limits.returns_routed_experts:
        raise InvalidRequest(
            "return_routed_experts needs an engine that was started with enable_return_routed_experts",
            parameter="return_routed_experts",
        )
    for token in params.stop_token_ids:
        _check_token_id("stop_token_ids", token, limits.vocab_size)
    for token in params.logit_bias:
        _check_token_id("logit_bias", token, limits.vocab_size)
    blocked_ids(params, eos_token_ids)
    return max_tokens


def _check_token_id(parameter: str, token: object, vocab_size: int) -> None:
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidRequest(f"{parameter} must hold token ids, got {token!r}", parameter=parameter)
    if not 0 <= token < vocab_size:
        raise InvalidRequest(
            f"{parameter} holds token id {token}, outside the vocabulary [0, {vocab_size})", parameter=parameter
        )
