"""What a request returns: whole (`RequestOutput`) or as it is produced (`RequestDelta`)."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]
TopLogprobs = dict[int, float]
"""Token id to log-probability, most probable first."""


@dataclass(frozen=True)
class Sample:
    """One continuation of a prompt.

    Attributes:
        token_ids: generated ids, the stop token included when one ended the sample.
        text: `token_ids` decoded, without special tokens and without the stop string that ended it.
        finish_reason: "stop" (stop string, stop id or end of sequence), "length", "abort", or "error" when the engine
            failed under it.
        stop_reason: the stop string or stop id that matched, or of "abort" why a grammar could not go on; None for
            end of sequence and other reasons.
        logprobs: natural log-probability of each token under the model, before temperature, penalties,
            bias and truncation; None unless asked for.
        sampling_logprobs: log-probability of each token under the distribution it was drawn from, after
            all of these (0.0 at temperature 0); None unless asked for.
        top_logprobs: per token the most probable ids under the same distribution as `logprobs`.
        weight_versions: per token the version of the weights that it was drawn with.
        routed_experts: int32[tokens, moe_layers, top_k], the experts of every token that the model was fed: of all the
            prompt and the sample but its newest token, of which nothing was computed. The layers are
            `Engine.moe_layers`. A sample that was aborted has those of the tokens that were computed until then. None
            unless asked for, or if there are none.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[float] | None = None
    sampling_logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    weight_versions: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RequestOutput:
    """Everything one prompt produced.

    Attributes:
        cached_tokens: prompt tokens taken from the prefix cache (of the first sample).
        samples: `SamplingParams.n` of them, in order.
        prompt_logprobs: of the prompt's tokens, one entry each; None unless asked for, or if the request was aborted
            before its prompt was complete.
        weight_version: of the newest token; without tokens, of the weights that were there when it was submitted.
    """

    request_id: str
    prompt_token_ids: list[int]
    cached_tokens: int
    samples: list[Sample]
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: int = 0


@dataclass(frozen=True)
class RequestDelta:
    """What one sample gained since its previous delta. The last one carries `finish_reason`.

    Attributes:
        scheduled_at: when the sample left the queue for its first step, in seconds of `time.monotonic`; None if it
            ended before that.
        prompt_logprobs: as in `RequestOutput`; a sample's first delta carries them and no other.
        weight_version: of the weights that its tokens were drawn with; without tokens, that of those before.
        routed_experts: as in `Sample`; a sample's last delta carries them and no other.
    """

    request_id: str
    sample_index: int
    prompt_token_ids: list[int]
    cached_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] | None = None
    sampling_logprobs: list[float] | None = None
    top_logprobs: list[TopLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scheduled_at: float | None = None
    prompt_logprobs: PromptLogprobs | None = None
    weight_version: int = 0
    routed_experts: np.ndarray | None = field(default=None, compare=False)
