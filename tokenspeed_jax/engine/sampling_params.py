"""`SamplingParams`: how one request is sampled and when it stops."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import InvalidRequest

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP = 16
MAX_STOP_LENGTH = 1024
"""Characters of a stop string: every token of a sample is compared with its beginning."""
MAX_STOP_IDS = 1024


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, got {value!r}", parameter=name)
    if value < low or value > high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must lie in {bracket}{low}, {high}], got {value!r}", parameter=name)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}", parameter=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must lie in [{low}, {high}], got {value!r}", parameter=name)


@dataclass(frozen=True)
class SamplingParams:
    """Order of application: logit bias and penalties, temperature, top-k, top-p, min-p, draw.

    Attributes:
        n: continuations of the prompt.
        max_tokens: most tokens to generate; None means up to the engine's `max_model_len`. 0, which needs
            `prompt_logprobs`, ends with "length" once the prompt is computed.
        min_tokens: end of sequence and stop ids cannot be drawn before this many tokens, and stop strings do
            not match in them.
        temperature: 0 is greedy (the lowest id among equal maxima).
        top_k: keep the k most probable tokens (all that tie with the k-th); 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches p (after top-k).
        min_p: drop tokens less probable than this share of the most probable one (after temperature).
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, once and per occurrence.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt or output.
        logit_bias: token id to bias, added to the logits.
        seed: fixes the noise of this request whatever else runs; sample i of n uses its own stream.
        stop: strings that end the sample; the match is not part of the text.
        stop_token_ids: ids that end the sample; the id is part of `token_ids`, not of the text.
        ignore_eos: keep generating past the model's end-of-sequence ids.
        logprobs: return log-probabilities of the generated tokens.
        top_logprobs: also return this many most probable tokens per position.
        prompt_logprobs: return log-probabilities of the prompt's tokens, with this many most probable tokens per
            position. All of the prompt is then computed: none of it is taken from the prefix cache.
        return_routed_experts: return which experts the tokens of prompt and output went to, from an engine with
            `enable_return_routed_experts`. All of the prompt is then computed, as for `prompt_logprobs`.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string, or the text of the id, that ended the sample.
        structured_outputs: what the text has to look like.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, 2**31 - 1)
            if self.max_tokens == 0 and self.prompt_logprobs is None:
                raise InvalidRequest("max_tokens must be at least 1, or 0 with prompt_logprobs", parameter="max_tokens")
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must not exceed max_tokens ({self.max_tokens}), got {self.min_tokens}",
                parameter="min_tokens",
            )
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        _integer("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=True", parameter="top_logprobs")
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_TOP_LOGPROBS)
        for name in (
            "ignore_eos",
            "logprobs",
            "return_routed_experts",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}", parameter=name)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequest(
                f"structured_outputs must be StructuredOutputsParams, got {self.structured_outputs!r}",
                parameter="structured_outputs",
            )
        self._check_stop()
        self._check_bias()

    def _check_stop(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Sequence) or not all(isinstance(s, str) and s for s in self.stop):
            raise InvalidRequest(f"stop must be non-empty strings, got {self.stop!r}", parameter="stop")
        if len(self.stop) > MAX_STOP:
            raise InvalidRequest(f"stop takes at most {MAX_STOP} strings, got {len(self.stop)}", parameter="stop")
        if any(len(stop) > MAX_STOP_LENGTH for stop in self.stop):
            raise InvalidRequest(f"stop strings have at most {MAX_STOP_LENGTH} characters", parameter="stop")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise InvalidRequest(
                f"stop_token_ids must be a list of token ids, got {self.stop_token_ids!r}", parameter="stop_token_ids"
            )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_IDS} ids, got {len(self.stop_token_ids)}",
                parameter="stop_token_ids",
            )
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 2**31 - 1)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map ids to numbers, got {self.logit_bias!r}", parameter="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(self.logit_bias)}", parameter="logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def uses_history(self) -> bool:
        """Whether a step needs this request's token counts, bias or stop mask on the device."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or bool(self.logit_bias)
            or self.min_tokens > 0
        )

    @property
    def is_plain_greedy(self) -> bool:
        """Whether argmax of the raw logits is the whole of sampling."""
        return self.temperature == 0.0 and not self.uses_history and self.top_logprobs == 0
