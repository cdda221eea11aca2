"""Puts a request's deltas together into one `RequestOutput`."""

import threading
from collections.abc import Callable

from tokenspeed_jax.engine.outputs import RequestDelta, RequestOutput, Sample
from tokenspeed_jax.engine.sampling_params import SamplingParams


class RequestCollector:
    """Receives deltas on the engine's thread; `wait` returns the whole on another."""

    def __init__(self, params: SamplingParams, *, on_finish: Callable[[], object] = lambda: None) -> None:
        self._params = params
        self._deltas: list[list[RequestDelta]] = [[] for _ in range(params.n)]
        self._running = params.n
        self._done = threading.Event()
        self._on_finish = on_finish

    def push(self, delta: RequestDelta) -> None:
        """Takes one delta."""
        self._deltas[delta.sample_index].append(delta)
        if delta.finish_reason is not None:
            self._running -= 1
            if self._running == 0:
                self._on_finish()
                self._done.set()

    def wait(self) -> RequestOutput:
        """The complete output; blocks until every sample has finished."""
        self._done.wait()
        first = self._deltas[0][0]
        return RequestOutput(
            request_id=first.request_id,
            prompt_token_ids=first.prompt_token_ids,
            cached_tokens=first.cached_tokens,
            samples=[self._sample(deltas) for deltas in self._deltas],
            prompt_logprobs=first.prompt_logprobs,
            weight_version=max(deltas[-1].weight_version for deltas in self._deltas),
        )

    def _sample(self, deltas: list[RequestDelta]) -> Sample:
        last = deltas[-1]
        if last.finish_reason is None:
            raise RuntimeError(f"sample of {last.request_id} has no final delta")
        want, want_top = self._params.logprobs, self._params.top_logprobs > 0
        return Sample(
            token_ids=[token for delta in deltas for token in delta.token_ids],
            text="".join(delta.text for delta in deltas),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            logprobs=[x for delta in deltas for x in delta.logprobs or ()] if want else None,
            sampling_logprobs=[x for delta in deltas for x in delta.sampling_logprobs or ()] if want else None,
            top_logprobs=[x for delta in deltas for x in delta.top_logprobs or ()] if want_top else None,
            weight_versions=[delta.weight_version for delta in deltas for _ in delta.token_ids],
        )
