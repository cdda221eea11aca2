"""`RequestIntake`: from a caller's prompt and parameters to a request that the step loop runs."""

import itertools
import logging
from collections.abc import Callable, Sequence

from tokenspeed_jax.engine.grammar import Grammar
from tokenspeed_jax.engine.grammar_compiler import Grammars
from tokenspeed_jax.engine.inbox import Submission
from tokenspeed_jax.engine.lifecycle import Lifecycle
from tokenspeed_jax.engine.limits import EngineLimits
from tokenspeed_jax.engine.loop import StepLoop
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.prompts import Prompt, as_batch, as_token_ids, options_per_prompt, params_per_prompt
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.requests import LiveRequestIds, RequestState, SampleState
from tokenspeed_jax.engine.sampler import sample_seed
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.source import ModelSource
from tokenspeed_jax.engine.stop import StopChecker
from tokenspeed_jax.engine.validation import check_sampling, check_tokens
from tokenspeed_jax.engine.weight_store import WeightStore
from tokenspeed_jax.errors import EngineClosed, EngineStateError, InvalidRequest

_LOG = logging.getLogger(__name__)


class RequestIntake:
    """Thread-safe.

    Args:
        seed: of requests that bring none.
    """

    def __init__(
        self,
        loop: StepLoop,
        lifecycle: Lifecycle,
        store: WeightStore,
        limits: EngineLimits,
        source: ModelSource,
        grammars: Grammars,
        *,
        seed: int,
    ) -> None:
        self._loop = loop
        self._lifecycle = lifecycle
        self._store = store
        self._limits = limits
        self._source = source
        self._grammars = grammars
        self._seed = seed
        self._serial = itertools.count()
        self._live_ids = LiveRequestIds()

    def batch(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
        cache_salt: str | None,
    ) -> list[tuple[list[int], SamplingParams, RequestOptions]]:
        """The prompts of a batch with what goes with each, for `submit_batch`. Raises `InvalidRequest`."""
        items = as_batch(prompts)
        each = params_per_prompt(params, len(items))
        options = options_per_prompt(priority, cache_salt, len(items))
        token_ids = [as_token_ids(prompt, self._source.tokenizer) for prompt in items]
        return list(zip(token_ids, each, options, strict=True))

    def check(self, token_ids: list[int], params: SamplingParams) -> tuple[int, Grammar | None]:
        """Validates a request as a whole; returns its resolved max_tokens and its grammar.

        Raises:
            InvalidRequest: naming the parameter.
        """
        check_tokens(token_ids, self._limits)
        max_tokens = check_sampling(token_ids, params, self._limits, self._source.eos_token_ids)
        constraint = params.structured_outputs
        return max_tokens, None if constraint is None else self._grammars.compile(constraint)

    def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
        on_delta: Callable[[RequestDelta], None],
    ) -> str:
        """Checks a request, hands it to the loop and returns its id; see `Engine.submit`."""
        checked = self.check(prompt, params)
        self._check_ready()
        request = self._request(prompt, params, options, request_id, on_delta, *checked)
        self._hand_over([request])
        return request.request_id

    def submit_batch(
        self,
        requests: Sequence[tuple[list[int], SamplingParams, RequestOptions]],
        receivers: Sequence[Callable[[RequestDelta], None]],
    ) -> None:
        """Checks requests as `batch` gives them, and hands them to the loop, all or none.

        The loop finds them together: were the first planned alone, its step would have room for tokens of the others.
        """
        checked = [self.check(prompt, params) for prompt, params, _ in requests]
        self._check_ready()
        states: list[RequestState] = []
        try:
            for request, on_delta, found in zip(requests, receivers, checked, strict=True):
                states.append(self._request(*request, None, on_delta, *found))
        except InvalidRequest:  # a caller's own id is the one that stood next
            self._release(states)
            raise
        self._hand_over(states)

    def _check_ready(self) -> None:
        self._lifecycle.check_awake()
        self._store.check_present()

    def _request(
        self,
        prompt: list[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
        on_delta: Callable[[RequestDelta], None],
        max_tokens: int,
        grammar: Grammar | None,
    ) -> RequestState:
        """A request with its samples, its id claimed."""
        serial = next(self._serial)
        request = RequestState(
            request_id=self._live_ids.claim(f"request-{serial}" if request_id is None else request_id),
            prompt_token_ids=prompt,
            params=params,
            options=options,
            max_tokens=max_tokens,
            on_delta=on_delta,
            grammar=grammar,
        )
        request.on_delta = self._releasing(request, on_delta)
        seed = params.seed if params.seed is not None else self._seed ^ (serial << 20)
        for index in range(params.n):
            request.samples.append(self._sample(request, serial, index, seed))
        return request

    def _hand_over(self, requests: Sequence[RequestState]) -> None:
        try:
            self._loop.submit(
                [Submission(request, [sample.spec() for sample in request.samples]) for request in requests]
            )
        except (EngineClosed, EngineStateError):
            self._release(requests)
            raise

    def _release(self, requests: Sequence[RequestState]) -> None:
        """Frees the ids of requests that the loop has not taken."""
        for request in requests:
            self._live_ids.release(request.request_id)

    def _sample(self, request: RequestState, serial: int, index: int, seed: int) -> SampleState:
        stop = StopChecker(
            request.params,
            eos_token_ids=self._source.eos_token_ids,
            max_tokens=request.max_tokens,
            detokenizer=self._source.detokenizer(skip_special_tokens=request.params.skip_special_tokens),
        )
        matcher = None if request.grammar is None else request.grammar.matcher()
        version = self._store.version
        name = f"{serial}-{index}"
        return SampleState(name, request, index, sample_seed(seed, index), stop, matcher, weight_version=version)

    def _releasing(
        self, request: RequestState, on_delta: Callable[[RequestDelta], None]
    ) -> Callable[[RequestDelta], None]:
        """`on_delta`, shielded: an error of the receiver ends that request and nothing else."""

        def deliver(delta: RequestDelta) -> None:
            if request.finished:
                self._live_ids.release(request.request_id)
            try:
                on_delta(delta)
            except Exception:
                _LOG.exception("the receiver of request %s failed; the request is aborted", request.request_id)
                if not request.finished and self._loop.is_healthy:
                    self._loop.abort(request.request_id)

        return deliver
