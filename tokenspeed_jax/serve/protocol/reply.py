"""What both endpoints' replies share: identity, the state of each choice, usage."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokenspeed_jax.engine.outputs import RequestDelta, TopLogprobs
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs


@dataclass
class Choice:
    """One continuation, gathered from its deltas.

    Attributes:
        index: `prompt index * n + sample index`, OpenAI's order.
        keeps_output: False in a stream, where only counts are needed after a delta was sent.
        weight_version: of the weights that the last token was drawn with; `weight_versions` has each token's.
        routed_experts: as `Sample` has them, once the choice has ended.
    """

    index: int
    sample_index: int
    prompt_token_ids: list[int]
    keeps_output: bool
    cached_tokens: int = 0
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text_parts: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampling_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    weight_version: int = 0
    weight_versions: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None

    @property
    def text(self) -> str:
        """All of the choice's text."""
        return "".join(self.text_parts)

    def push(self, delta: RequestDelta) -> None:
        """Takes one delta of this choice."""
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.num_tokens += len(delta.token_ids)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.weight_version = delta.weight_version
        self.routed_experts = delta.routed_experts
        if self.keeps_output:
            self.weight_versions += [delta.weight_version] * len(delta.token_ids)
            self.token_ids += delta.token_ids
            self.text_parts.append(delta.text)
            self.logprobs += delta.logprobs or []
            self.sampling_logprobs += delta.sampling_logprobs or []
            self.top_logprobs += delta.top_logprobs or []
            self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs


@dataclass(frozen=True)
class ReplyHead:
    """Identity of one reply.

    Attributes:
        created: seconds since 1970.
        includes_usage: every chunk carries `usage: null` and one more chunk carries the counts.
    """

    reply_id: str
    model: str
    created: int
    includes_usage: bool

    def envelope(self, kind: str) -> dict[str, Any]:
        """The fields that open a body or a chunk of type `kind`."""
        return {"id": self.reply_id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One chunk of a stream."""
        chunk = self.envelope(kind)
        chunk["choices"] = choices
        if self.includes_usage:
            chunk["usage"] = None
        return chunk

    def usage_chunk(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        """The chunk without choices that carries the usage."""
        return self.envelope(kind) | {"choices": [], **self.totals(choices)}

    def totals(self, choices: list[Choice]) -> dict[str, Any]:
        """What closes a body: the usage, and the version of the weights that drew the newest token."""
        return {"usage": self.usage(choices), "weight_version": max(choice.weight_version for choice in choices)}

    def usage(self, choices: list[Choice]) -> dict[str, Any]:
        """Token counts; a prompt counts once, however many samples continue it."""
        first_samples = [choice for choice in choices if choice.sample_index == 0]
        prompt_tokens = sum(len(choice.prompt_token_ids) for choice in first_samples)
        completion_tokens = sum(choice.num_tokens for choice in choices)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in first_samples)},
        }
