"""What callers may give as prompts, and what goes with each prompt of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.text import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages."""


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or from several."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int | Mapping) for item in items):
        return [cast("Prompt", items)]
    return cast("list[Prompt]", items)


def present(tokenizer: Tokenizer | None) -> Tokenizer:
    """The tokenizer of an engine. Raises `InvalidRequest` where it has none."""
    if tokenizer is None:
        raise InvalidRequest("this engine has no tokenizer: give prompts as token ids", parameter="prompt")
    return tokenizer


def as_token_ids(prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """A prompt's token ids; chat messages go through the tokenizer's template. Raises `InvalidRequest` without one.

    What is neither a message nor an id is in the list as it is, and refused with the rest of the request.
    """
    if isinstance(prompt, str):
        return present(tokenizer).encode(prompt)
    messages = [item for item in prompt if isinstance(item, Mapping)]
    if messages and len(messages) == len(prompt):
        text = present(tokenizer).apply_chat_template(messages, add_generation_prompt=True)
        return present(tokenizer).encode(text, add_special_tokens=False)
    return cast("list[int]", list(prompt))


def params_per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One set of parameters per prompt. Raises `InvalidRequest` for another number of them."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(f"params must be one, or one per prompt ({count}), got {len(params)}", parameter="params")
    return list(params)


def options_per_prompt(priority: int | Sequence[int], cache_salt: str | None, count: int) -> list[RequestOptions]:
    """The options of each prompt. Raises `InvalidRequest` for another number of priorities."""
    if not isinstance(priority, Sequence):
        return [RequestOptions(priority, cache_salt)] * count
    if len(priority) != count:
        raise InvalidRequest(
            f"priority must be one, or one per prompt ({count}), got {len(priority)}", parameter="priority"
        )
    return [RequestOptions(item, cache_salt) for item in priority]
