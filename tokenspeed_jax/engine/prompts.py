"""What callers may give as prompts, and what goes with each prompt of a batch."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import InvalidRequest

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
