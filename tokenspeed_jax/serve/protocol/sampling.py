"""The fields that completions and chat share, and how they become `SamplingParams`."""

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.bodies import Neutral
from tokenspeed_jax.serve.errors import ApiError, refusal
from tokenspeed_jax.serve.protocol.structured_outputs import STRUCTURED_NEUTRAL_FIELDS, StructuredOutputFields


def equals(*allowed: Any) -> Neutral:
    """Neutral when the value is one of `allowed`, of the same JSON type."""
    return lambda value, _body: any(type(value) is type(item) and value == item for item in allowed)


def empty(value: Any, _body: Mapping[str, Any]) -> bool:
    """Neutral when the value is an empty list, object or string."""
    return isinstance(value, list | dict | str) and not value


COMMON_NEUTRAL_FIELDS: Mapping[str, Neutral] = {
    "service_tier": equals("auto", "default"),
    "store": equals(False),
    "metadata": empty,
    "use_beam_search": equals(False),
    "length_penalty": equals(1, 1.0),
    "spaces_between_special_tokens": equals(True),
    **STRUCTURED_NEUTRAL_FIELDS,
}
"""Fields that clients send although they ask for nothing; null is neutral for each."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`stream_options`: `include_usage` adds a last chunk with the usage."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ApiError(
                "stream_options.include_obfuscation is not supported",
                param="stream_options.include_obfuscation",
                code="unsupported_parameter",
            )


class SamplingFields(StructuredOutputFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of both endpoints; null means the default. `return_token_ids`, `prompt_logprobs`, `priority` and
    `cache_salt` are vLLM's extensions."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = COMMON_NEUTRAL_FIELDS

    model: str
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk. Raises `ApiError` for stream options without a stream."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream = true", param="stream_options", code="invalid_value")
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling_params(self, *, renamed: dict[str, str], **extra: Any) -> SamplingParams:
        """These fields as `SamplingParams`.

        Args:
            renamed: `SamplingParams` names that the client knows by another name, for error messages.
            extra: parameters whose field differs between the endpoints.

        Raises:
            ApiError: 400 naming the first value outside its range.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError(
                "prompt_logprobs are not available in a stream", param="prompt_logprobs", code="invalid_value"
            )
        same = (
            "min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
            "stop_token_ids ignore_eos n skip_special_tokens include_stop_str_in_output"
        )
        given = {name: value for name in same.split() if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            given["logit_bias"] = bias_by_id(self.logit_bias)
        try:
            return SamplingParams(**given, **extra, structured_outputs=self.content_constraint())
        except InvalidRequest as error:
            raise refusal(error, renamed) from None


def bias_by_id(bias: Mapping[str, float], name: str = "logit_bias") -> dict[int, float]:
    """A bias whose keys are JSON strings, by token id. Raises `ApiError` 400 that names the field `name`."""
    by_id: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20) or int(key) in by_id:
            raise ApiError(
                f"the keys of {name} must be distinct token ids, got {key!r}",
                param=name,
                code="invalid_value",
            )
        by_id[int(key)] = value
    return by_id
