"""`POST /generate`: SGLang's token-level endpoint. Ids or text in, ids, text and log-probabilities out."""

import base64
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import InvalidRequest
from tokenspeed_jax.serve.bodies import Neutral, convert_object
from tokenspeed_jax.serve.errors import ApiError, refusal
from tokenspeed_jax.serve.protocol.logprobs import TokenNames, finite
from tokenspeed_jax.serve.protocol.reply import Choice, ReplyHead
from tokenspeed_jax.serve.protocol.sampling import bias_by_id, empty, equals
from tokenspeed_jax.serve.protocol.structured_outputs import check_one_constraint, engine_names, sglang_constraint
from tokenspeed_jax.serve.served_engine import ServedTokenizer
from tokenspeed_jax.serve.streaming import ChunkedReply

_DEFAULT_MAX_NEW_TOKENS = 128
_REQUEST_ID = re.compile(r"[!-~]{1,256}")
"""What may stand in an HTTP header, where the id goes too."""

_ENGINE_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Names of sampling parameters where SGLang's differ from the engine's."""

_CONSTRAINTS = ("json_schema", "regex", "ebnf")


def never(_value: Any, _body: Mapping[str, Any]) -> bool:
    """Neutral only as null."""
    return False


class GenerateSampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`sampling_params`. `top_k` = -1 keeps all tokens; `max_new_tokens` = null fills the context."""

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        "structural_tag": never,
        "stop_regex": empty,
        "spaces_between_special_tokens": equals(True),
        "custom_params": empty,
        "stream_interval": equals(1),
    }

    max_new_tokens: int | None = _DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: int | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def engine_arguments(self) -> dict[str, Any]:
        """The given fields as arguments of `SamplingParams`. Raises `ApiError`, or `InvalidRequest` by engine names."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        constraints = {name: given.pop(name, None) for name in _CONSTRAINTS}
        check_one_constraint([f"sampling_params.{name}" for name in _CONSTRAINTS if constraints[name] is not None])
        if any(value is not None for value in constraints.values()):
            given["structured_outputs"] = sglang_constraint(**constraints, prefix="sampling_params.")
        if self.top_k == -1:
            given["top_k"] = 0
        if self.logit_bias:
            given["logit_bias"] = bias_by_id(self.logit_bias, "sampling_params.logit_bias")
        arguments = {_ENGINE_NAMES.get(name, name): value for name, value in given.items()}
        return {"max_tokens": None} | arguments


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body: one prompt or a list of them, with one set of sampling parameters for all.

    `logprob_start_len` is the first token of the prompt that log-probabilities are told of; -1 tells of none.
    """

    neutral_fields: ClassVar[Mapping[str, Neutral]] = {
        **dict.fromkeys(("input_embeds", "lora_path", "custom_logit_processor", "session_id"), never),
        **dict.fromkeys(("image_data", "video_data", "audio_data", "modalities", "session_params"), empty),
        **dict.fromkeys(("return_hidden_states", "background"), equals(False)),
        **dict.fromkeys(("bootstrap_host", "bootstrap_port", "bootstrap_room", "extra_key"), never),
        "token_ids_logprob": empty,
        "log_metrics": equals(True),
    }
    includes_usage: ClassVar[bool] = False

    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: dict[str, Any] | None = None
    rid: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    model: str | None = None

    @property
    def names(self) -> dict[str, str]:
        """Engine parameters by the names this request used for them."""
        prompt = "text" if self.input_ids is None else "input_ids"
        names = {name: f"sampling_params.{name}" for name in GenerateSampling.__struct_fields__}
        names |= {engine: f"sampling_params.{name}" for name, engine in _ENGINE_NAMES.items()}
        names |= {"top_logprobs": "top_logprobs_num", "prompt_logprobs": "top_logprobs_num", "request_id": "rid"}
        names |= {"prompt": prompt, "prompt_token_ids": prompt}
        given = [name for name in _CONSTRAINTS if (self.sampling_params or {}).get(name) is not None]
        return names | engine_names(f"sampling_params.{given[0]}") if given else names

    @property
    def has_many_prompts(self) -> bool:
        """Whether the prompt is a list of prompts, be it of one."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance(self.input_ids[0], list))

    @property
    def scores_input(self) -> bool:
        """Whether log-probabilities of the prompt are asked for."""
        return self.logprob_start_len not in (None, -1)

    def params(self) -> SamplingParams:
        """Sampling parameters; 128 tokens unless said otherwise, as SGLang has it.

        Raises:
            ApiError: 400 naming the first value that is wrong.
        """
        if self.rid is not None and not _REQUEST_ID.fullmatch(self.rid):
            raise ApiError(
                "rid must be 1 to 256 visible ASCII characters without spaces", param="rid", code="invalid_value"
            )
        for name, is_used in (
            ("return_text_in_logprobs", self.return_text_in_logprobs),
            ("logprob_start_len", self.scores_input),
        ):
            if is_used and not self.return_logprob:
                raise ApiError(f"{name} needs return_logprob = true", param=name, code="invalid_value")
        sampling = convert_object(self.sampling_params or {}, GenerateSampling, "sampling_params.")
        try:
            return SamplingParams(
                **sampling.engine_arguments(),
                logprobs=bool(self.return_logprob),
                top_logprobs=self.top_logprobs_num or 0,
                prompt_logprobs=(self.top_logprobs_num or 0) if self.scores_input else None,
                return_routed_experts=bool(self.return_routed_experts),
            )
        except InvalidRequest as error:
            raise refusal(error, self.names) from None

    def prompt_token_ids(self, tokenizer: ServedTokenizer) -> list[list[int]]:
        """The prompts as token ids. Raises `ApiError` for none, an empty one, or text and ids together."""
        if (self.text is None) == (self.input_ids is None):
            raise ApiError("send either text or input_ids", param="input_ids", code="invalid_value")
        name, prompts = ("text", self._texts()) if self.input_ids is None else ("input_ids", self._id_lists())
        if not prompts or not all(prompts):
            raise ApiError(f"{name} must not be empty", param=name, code="invalid_value")
        token_ids = [tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        shortest = min(map(len, token_ids))
        if self.scores_input and not 0 <= (self.logprob_start_len or 0) < shortest:
            raise ApiError(
                f"logprob_start_len must be -1 or lie in [0, {shortest}), the tokens of the shortest prompt, got "
                f"{self.logprob_start_len}",
                param="logprob_start_len",
                code="invalid_value",
            )
        return token_ids

    def _texts(self) -> Sequence[str]:
        return self.text if isinstance(self.text, list) else [self.text or ""]

    def _id_lists(self) -> Sequence[list[int]]:
        ids = self.input_ids or []
        kinds = {type(item) for item in ids}
        if len(kinds) > 1:
            raise ApiError(
                "input_ids must be a list of token ids or a list of such lists, and not a mixture",
                param="input_ids",
                code="invalid_type",
            )
        return ids if kinds == {list} else [ids]  # pyright: ignore[reportReturnType]


@dataclass
class _Part:
    """What one object shows of a choice, in the form in which it is sent: a stream repeats it with every token, and
    must not build it anew each time."""

    text: str = ""
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    sampling_logprobs: list[list[Any]] = field(default_factory=list)
    top_logprobs: list[list[list[Any]]] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)


class GenerateReply(ChunkedReply):
    """Turns the deltas of one request into its body or its chunks.

    Args:
        incremental: whether a chunk has what is new only. SGLang's chunks have everything so far.
    """

    def __init__(
        self,
        head: ReplyHead,
        request: GenerateRequest,
        params: SamplingParams,
        names: TokenNames,
        *,
        incremental: bool,
    ) -> None:
        self._head = head
        self._params = params
        self._names = names if request.return_text_in_logprobs else None
        self._input_start = request.logprob_start_len or 0
        self._has_many_prompts = request.has_many_prompts
        self._is_list = request.has_many_prompts or params.n > 1
        self._incremental = incremental
        self._open: dict[int, tuple[Choice, _Part]] = {}
        self._start = time.monotonic()

    def body(self, choices: list[Choice]) -> bytes:
        """The whole reply as JSON: an object, or a list of them for several prompts or samples."""
        replies = [self._reply(choice, self._extended(_Part(), choice), choice.prompt_logprobs) for choice in choices]
        return msgspec.json.encode(replies if self._is_list else replies[0])

    def chunks(self, index: int, delta: RequestDelta) -> list[dict[str, Any]]:
        """The chunk that one delta of choice `index` becomes; good until the next one."""
        if index not in self._open:
            choice = Choice(index, delta.sample_index, delta.prompt_token_ids, keeps_output=False)
            self._open[index] = (choice, _Part())
        choice, part = self._open[index]
        choice.push(delta)
        part = self._extended(_Part() if self._incremental else part, delta)
        chunk = self._reply(choice, part, delta.prompt_logprobs)
        return [chunk | {"index": index} if self._is_list else chunk]

    def _extended(self, part: _Part, source: Choice | RequestDelta) -> _Part:
        """`part`, with what `source` has behind it."""
        part.text += source.text
        part.output_ids += source.token_ids
        if self._params.logprobs:
            part.weight_versions += _weight_versions(source)
            part.logprobs += self._entries(zip(source.token_ids, source.logprobs or [], strict=True))
            part.sampling_logprobs += self._entries(zip(source.token_ids, source.sampling_logprobs or [], strict=True))
        if self._params.top_logprobs:
            part.top_logprobs += [self._entries(top.items()) for top in source.top_logprobs or []]
        return part

    def _entries(self, pairs: Iterable[tuple[int, float | None]]) -> list[list[Any]]:
        names = self._names
        return [
            [finite(logprob), token_id, None if names is None else names.of(token_id)[0]] for token_id, logprob in pairs
        ]

    def _input_entries(self, choice: Choice, prompt: PromptLogprobs) -> dict[str, Any]:
        """What SGLang tells of a prompt: no number for the first of the tokens, whatever stands before it."""
        start = self._input_start
        own = [None, *prompt.token_logprobs()[start + 1 :]]
        told: dict[str, Any] = {
            "input_token_logprobs": self._entries(zip(choice.prompt_token_ids[start:], own, strict=True))
        }
        if self._params.top_logprobs:
            tops = prompt.top_logprobs()[start + 1 :]
            told["input_top_logprobs"] = [None, *(self._entries((top or {}).items()) for top in tops)]
        return told

    def _reply(self, choice: Choice, part: _Part, prompt: PromptLogprobs | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._prompt_id(choice),
            "finish_reason": _finish_reason(choice, part.output_ids),
            "prompt_tokens": len(choice.prompt_token_ids),
            "completion_tokens": choice.num_tokens,
            "cached_tokens": choice.cached_tokens,
            "weight_version": choice.weight_version,
        }
        if choice.finish_reason is not None:
            meta["e2e_latency"] = time.monotonic() - self._start
        if choice.routed_experts is not None:
            meta |= _encoded_experts(choice.routed_experts)
        if prompt is not None:
            meta |= self._input_entries(choice, prompt)
        if self._params.logprobs:
            meta["output_token_logprobs"] = part.logprobs
            meta["output_token_sampling_logprobs"] = part.sampling_logprobs
            meta["output_weight_versions"] = part.weight_versions
        if self._params.top_logprobs:
            meta["output_top_logprobs"] = part.top_logprobs
        return {"text": part.text, "output_ids": part.output_ids, "meta_info": meta}

    def _prompt_id(self, choice: Choice) -> str:
        """The id of the choice's prompt, by which `/abort_request` finds it."""
        prompt_index = choice.index // self._params.n
        return f"{self._head.reply_id}-{prompt_index}" if self._has_many_prompts else self._head.reply_id


def _encoded_experts(routed_experts: np.ndarray) -> dict[str, Any]:
    """As SGLang has them, little-endian int32 in base64, and how many there are."""
    return {
        "routed_experts": base64.b64encode(routed_experts.astype("<i4").tobytes()).decode(),
        "routed_experts_shape": routed_experts.shape,
    }


def _weight_versions(source: Choice | RequestDelta) -> list[int]:
    """The version of each token's weights."""
    return source.weight_versions if isinstance(source, Choice) else [source.weight_version] * len(source.token_ids)


def _finish_reason(choice: Choice, token_ids: Sequence[int]) -> dict[str, Any] | None:
    """Why the choice ended, with what ended it: an id, a string, a number of tokens."""
    match choice.finish_reason:
        case None:
            return None
        case "stop":
            # Without a stop of the request's own it was an end-of-sequence id, which is the last token.
            return {"type": "stop", "matched": token_ids[-1] if choice.stop_reason is None else choice.stop_reason}
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case reason:
            return {"type": reason, "message": choice.stop_reason or "the request was aborted"}
