"""What /metrics says of requests: latencies and sizes, observed as their tokens arrive.

A request is a sample here, as in vLLM: one of the `n` continuations of one prompt. What only a prompt has is said once
for it: `n`, and the longest of its samples.
"""

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tokenspeed_jax.engine.histogram import Histogram
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.serve.metric_families import ENGINE, Definition, histogram_family
from tokenspeed_jax.serve.request_times import ChoiceTimes, RequestTimes
from tokenspeed_jax.serve.status_page.latencies import RecentLatencies

_FIRST_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_BETWEEN_TOKENS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
_WHOLE = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 900.0, 3600.0)
_N = (1, 2, 4, 8, 16, 32, 64, 128)
_ENDED = ("stop", "length")
"""Ends after which a sample's latencies count; what was aborted had none of its own."""


class RequestMetrics(Collector):
    """Histograms of all requests of a server. Observed on the event loop, scraped by another thread.

    Attributes:
        recent: the latencies once more, for the status page.
    """

    def __init__(self, model: str, max_model_len: int) -> None:
        self.recent = RecentLatencies()
        self._labels = [model, ENGINE]
        self._all: list[tuple[Definition, Histogram]] = []
        self._max_model_len = max_model_len
        tokens = _token_bounds(max_model_len)
        make = self._histogram
        self._first_token = make("time_to_first_token_seconds", "from submission to the first token", _FIRST_TOKEN)
        self._between = make("inter_token_latency_seconds", "between two tokens of a sample", _BETWEEN_TOKENS)
        self._per_token = make(
            "request_time_per_output_token_seconds", "mean time between two tokens of a sample", _BETWEEN_TOKENS
        )
        self._whole = make("e2e_request_latency_seconds", "from submission to the last token", _WHOLE)
        self._queue = make("request_queue_time_seconds", "from submission to the first step", _WHOLE)
        self._prefill = make("request_prefill_time_seconds", "from the first step to the first token", _WHOLE)
        self._decode = make("request_decode_time_seconds", "from the first token to the last", _WHOLE)
        self._inference = make("request_inference_time_seconds", "from the first step to the last token", _WHOLE)
        self._prompt_tokens = make("request_prompt_tokens", "tokens of a sample's prompt", tokens)
        self._generation_tokens = make("request_generation_tokens", "tokens generated for a sample", tokens)
        self._longest = make("request_max_num_generation_tokens", "tokens of the longest sample of a prompt", tokens)
        self._n = make("request_params_n", "the parameter n of a prompt", _N)
        self._max_tokens = make(
            "request_params_max_tokens", "the parameter max_tokens, or the room in the context without one", tokens
        )

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(bounds)
        self._all.append((Definition("vllm:" + name, text), histogram))
        return histogram

    def describe(self) -> list[Metric]:
        """No names in advance: `collect` has them all."""
        return []

    def collect(self) -> Iterator[Metric]:
        for definition, histogram in self._all:
            yield histogram_family(definition, self._labels, histogram.snapshot())

    def observe_tokens(self, before: float | None, delta: RequestDelta, submitted: float, arrived: float) -> None:
        """Tokens of a sample arrived; those that come together share the time since the last ones.

        Args:
            before: when the last ones had arrived; None for the first.
        """
        count = len(delta.token_ids)
        if before is not None:
            self._between.observe((arrived - before) / count, count)
            self.recent.between_tokens.add((arrived - before) / count, count)
            return
        self._first_token.observe(arrived - submitted)
        self.recent.first_token.add(arrived - submitted)
        if count > 1:
            self._between.observe(0.0, count - 1)

    def observe_sample(self, choice: ChoiceTimes, submitted: float, params: SamplingParams) -> None:
        """A sample has ended by itself."""
        first, last, scheduled = choice.first_token, choice.last_token, choice.scheduled
        self._prompt_tokens.observe(choice.prompt_tokens)
        self._generation_tokens.observe(choice.num_tokens)
        self._max_tokens.observe(params.max_tokens or self._max_model_len - choice.prompt_tokens)
        if first is None or last is None:
            return
        self._whole.observe(last - submitted)
        self._decode.observe(last - first)
        if choice.num_tokens > 1:
            self._per_token.observe((last - first) / (choice.num_tokens - 1))
        if scheduled is not None:
            self._queue.observe(scheduled - submitted)
            self._prefill.observe(first - scheduled)
            self._inference.observe(last - scheduled)

    def observe_prompt(self, samples: Sequence[ChoiceTimes]) -> None:
        """All samples of a prompt have ended by themselves."""
        self._n.observe(len(samples))
        self._longest.observe(max(sample.num_tokens for sample in samples))


def _token_bounds(most: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    bounds = (step * 10**exponent for exponent in range(len(str(most))) for step in (1, 2, 5))
    return [bound for bound in bounds if bound <= most]


class RequestWatch:
    """Observes one HTTP request. Belongs to the event loop.

    Attributes:
        times: what was seen of it so far.
    """

    def __init__(self, metrics: RequestMetrics, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        choices = [ChoiceTimes(len(prompt)) for prompt in prompts for _ in range(params.n)]
        self.times = RequestTimes(time.monotonic(), choices, sum(map(len, prompts)))

    def take(self, choice: int, delta: RequestDelta, arrived: float) -> None:
        """A delta of a choice arrived at monotonic time `arrived`."""
        times = self.times.choices[choice]
        before = times.last_token
        times.take(delta, arrived)
        if delta.token_ids:
            self._metrics.observe_tokens(before, delta, self.times.submitted, arrived)
        if delta.finish_reason is None:
            return
        if delta.finish_reason in _ENDED:
            self._metrics.observe_sample(times, self.times.submitted, self._params)
        first = choice - choice % self._params.n
        siblings = self.times.choices[first : first + self._params.n]
        if all(sibling.finish_reason in _ENDED for sibling in siblings):
            self._metrics.observe_prompt(siblings)
