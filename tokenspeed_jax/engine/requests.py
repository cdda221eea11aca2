"""What the step loop remembers about a request while it runs."""

import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.expert_record import ExpertRecord
from tokenspeed_jax.engine.outputs import FinishReason, RequestDelta, TopLogprobs
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs, PromptScores
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampler import seed_words
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.stop import StopChecker, StopUpdate
from tokenspeed_jax.errors import InvalidRequest

if TYPE_CHECKING:
    from tokenspeed_jax.engine.grammar import Grammar, Matcher

DeltaSink = Callable[[RequestDelta], None]

INT_CONSTANTS = ("top_k", "seed_high", "seed_low", "min_tokens", "uses_history")
FLOAT_CONSTANTS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_CONSTANTS = struct.Struct(f"=iIIii{len(FLOAT_CONSTANTS)}f")


@dataclass(frozen=True)
class Jump:
    """Output that a grammar forced at one place.

    Attributes:
        token_ids: at least one.
        update: what all of them brought together.
    """

    token_ids: list[int]
    update: StopUpdate


@dataclass(eq=False)
class SampleState:
    """One continuation of a request; the scheduler knows it as a request of its own.

    Attributes:
        scheduler_id: id towards the scheduler, unique for the engine's life.
        seed: 63-bit seed of this sample's noise.
        matcher: where the sample is in the grammar that constrains it; None without one.
        experts: where the experts of its tokens are gathered; None when nobody asks for them.
        constants: what each of its steps uploads for sampling, packed once, since the step loop does it for hundreds
            of rows at a time: `INT_CONSTANTS` as 32-bit integers, then `FLOAT_CONSTANTS` as float32.
        token_ids: landed tokens, those of `jump` included.
        jump: what the sample's row in flight brings without drawing it; the scheduler knows, the client does not yet.
        num_dispatched: tokens that dispatched steps will have sampled once they land; runs ahead of `token_ids`
            by the steps in flight.
        finished: nothing more is delivered; rows still in flight are wasted.
        has_told_prompt: a delta has carried the prompt's log-probabilities.
        scheduled_at: when it was first given a place in a step; None before that.
        weight_version: of the weights that its newest landed token was drawn with; before that, of its submission.
    """

    scheduler_id: str
    request: "RequestState"
    index: int
    seed: int
    stop: StopChecker
    matcher: "Matcher | None" = None
    token_ids: list[int] = field(default_factory=list)
    num_dispatched: int = 0
    jump: Jump | None = None
    finished: bool = False
    has_told_prompt: bool = False
    scheduled_at: float | None = None
    weight_version: int = 0

    def __post_init__(self) -> None:
        params = self.params = self.request.params
        self.experts: ExpertRecord | None = None
        if params.return_routed_experts:
            self.experts = ExpertRecord(self.request.samples[0].experts if self.index > 0 else None)
        self.prompt_length = len(self.request.prompt_token_ids)
        self.is_plain_greedy = params.is_plain_greedy and self.matcher is None
        self.constants = _CONSTANTS.pack(
            params.top_k,
            *seed_words(self.seed),
            params.min_tokens,
            params.uses_history,
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )

    def spec(self) -> scheduling.RequestSpec:
        """The scheduler's view of the sample."""
        spec = scheduling.RequestSpec()
        spec.request_id = self.scheduler_id
        spec.tokens = self.request.prompt_token_ids
        options = self.request.options
        spec.priority = options.priority
        spec.cache_salt = options.cache_salt or ""
        # An undeclared budget reserves nothing ahead: most replies end long before the context does.
        spec.max_new_tokens = self.params.max_tokens or 0
        # The prompt is computed for the first sample alone.
        spec.fork_of = self.request.samples[0].scheduler_id if self.index > 0 else ""
        spec.reads_prefix_cache = not self.request.computes_whole_prompt or self.index > 0
        return spec

    def delta(
        self,
        token_ids: list[int],
        text: str,
        finish_reason: FinishReason | None,
        stop_reason: str | int | None = None,
        logprobs: list[float] | None = None,
        sampling_logprobs: list[float] | None = None,
        top_logprobs: list[TopLogprobs] | None = None,
    ) -> RequestDelta:
        """A delta of this sample."""
        request = self.request
        return RequestDelta(
            request_id=request.request_id,
            sample_index=self.index,
            prompt_token_ids=request.prompt_token_ids,
            cached_tokens=request.cached_tokens or 0,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            sampling_logprobs=sampling_logprobs,
            top_logprobs=top_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            scheduled_at=self.scheduled_at,
            prompt_logprobs=self._untold_prompt_logprobs(),
            weight_version=self.weight_version,
            routed_experts=None if self.experts is None or finish_reason is None else self.experts.whole(),
        )

    def last_delta(self) -> RequestDelta:
        """The delta of an abort: what was certain, but not delivered yet."""
        tokens, text = ([], "") if self.jump is None else (self.jump.token_ids, self.jump.update.text_delta)
        return self.delta(tokens, text + self.stop.flush(), "abort")

    def _untold_prompt_logprobs(self) -> PromptLogprobs | None:
        scores = self.request.prompt_scores
        if scores is None or self.has_told_prompt:
            return None
        whole = scores.whole()
        self.has_told_prompt = whole is not None
        return whole


@dataclass(eq=False)
class RequestState:
    """One request: a prompt and its `n` samples.

    Attributes:
        grammar: what constrains each of the samples; None where nothing does.
        cached_tokens: prompt tokens that the first sample's first admission took from the prefix cache; None
            before that.
        prompt_scores: where the prompt's log-probabilities are gathered; None when nobody asks for them.
        submitted_at: monotonic seconds.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    options: RequestOptions
    max_tokens: int
    on_delta: DeltaSink
    grammar: "Grammar | None" = None
    samples: list[SampleState] = field(default_factory=list)
    cached_tokens: int | None = None
    submitted_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        count = self.params.prompt_logprobs
        self.prompt_scores = None if count is None else PromptScores(self.prompt_token_ids, count)

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether something is asked of every token of the prompt, so that none may come from the prefix cache."""
        return self.prompt_scores is not None or self.params.return_routed_experts

    @property
    def finished(self) -> bool:
        return all(sample.finished for sample in self.samples)


class LiveRequestIds:
    """Ids of the requests that run, each at most once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[str] = set()

    def claim(self, request_id: str) -> str:
        """Takes an id until it is released, and returns it.

        Raises:
            InvalidRequest: it is taken.
        """
        with self._lock:
            if request_id in self._ids:
                raise InvalidRequest(f"request_id {request_id!r} is already running", parameter="request_id")
            self._ids.add(request_id)
        return request_id

    def release(self, request_id: str) -> None:
        """Gives an id back; one that nobody has is ignored."""
        with self._lock:
            self._ids.discard(request_id)
