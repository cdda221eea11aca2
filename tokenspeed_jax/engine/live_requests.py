"""`LiveRequests`: the requests that the scheduler knows, and those that are held back from it."""

from collections.abc import Iterable, Iterator
from typing import Literal

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.inbox import Submission
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.requests import RequestState, SampleState
from tokenspeed_jax.engine.stats import StatsCollector


class LiveRequests:
    """Belongs to the step loop's thread.

    Attributes:
        queued: ids of those none of whose samples has started; shared with the inbox.
        samples: by their id towards the scheduler.
        requests: by id, in order of arrival.
        held: submissions that are given to the scheduler later; none of them is in `requests`.
    """

    def __init__(self, scheduler: scheduling.Scheduler, stats: StatsCollector, queued: set[str]) -> None:
        self._scheduler = scheduler
        self._stats = stats
        self.queued = queued
        self.samples: dict[str, SampleState] = {}
        self.requests: dict[str, RequestState] = {}
        self.held: dict[str, Submission] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def all(self) -> Iterator[RequestState]:
        """Those that the scheduler knows, then those that are held."""
        yield from self.requests.values()
        yield from (submission.request for submission in self.held.values())

    def take(self, submission: Submission, *, holds: bool) -> None:
        """Gives a request to the scheduler, or holds it back until `admit_held`."""
        if holds:
            self.held[submission.request.request_id] = submission
            return
        self._register(submission.request)
        self._scheduler.submit_requests(submission.specs)

    def admit_held(self) -> None:
        """Gives what was held back to the scheduler, in order of arrival."""
        held, self.held = self.held, {}
        for submission in held.values():
            self.take(submission, holds=False)

    def renew_queued(self) -> None:
        """Submits those of which nothing has started anew, as the scheduler takes requests now."""
        waiting = [request for request in self.requests.values() if request.request_id in self.queued]
        self._give_back(waiting)
        for request in waiting:
            for sample in request.samples:
                # The scheduler knows the old id for some time yet.
                del self.samples[sample.scheduler_id]
                sample.scheduler_id += "+"
                self.samples[sample.scheduler_id] = sample
            self._scheduler.submit_requests([sample.spec() for sample in request.samples])

    def abort(self, request_id: str) -> None:
        """Ends one with "abort"; an id that is unknown is ignored."""
        request = self.requests.get(request_id)
        if request is not None:
            self._give_back([request])
        elif request_id in self.held:
            request = self.held.pop(request_id).request
            self._register(request)
        if request is not None:
            self._deliver_end(request, "abort")

    def end_all(self, reason: Literal["abort", "error"]) -> None:
        """Ends all that the scheduler knows."""
        running = list(self.requests.values())
        self._give_back(running)
        for request in running:
            self._deliver_end(request, reason)

    def close(self, left: Iterable[RequestState], reason: Literal["abort", "error"]) -> None:
        """Ends all that there are, and those that nobody has looked at, without asking the scheduler."""
        # What never reached the scheduler ends like what runs.
        for request in (*(submission.request for submission in self.held.values()), *left):
            self._register(request)
        for request in list(self.requests.values()):
            self._deliver_end(request, reason)

    def _register(self, request: RequestState) -> None:
        self.requests[request.request_id] = request
        self.samples.update((sample.scheduler_id, sample) for sample in request.samples)
        self._stats.observe_arrival(len(request.prompt_token_ids) * len(request.samples))

    def _give_back(self, requests: Iterable[RequestState]) -> None:
        """The scheduler forgets these requests; nobody is told."""
        events = scheduling.ExecutionEvent()
        for request in requests:
            for sample in request.samples:
                if not sample.finished:
                    event = scheduling.ForwardEvent.Abort()
                    event.request_id = sample.scheduler_id
                    events.add_event(event)
        self._scheduler.advance(events)
        self._stats.observe_scheduler(self._scheduler)

    def deliver(self, sample: SampleState, delta: RequestDelta) -> None:
        """Gives a delta to the request's receiver, and forgets what has ended with it."""
        self._stats.observe_delta(delta)
        if sample.finished:
            self._forget(sample)
        sample.request.on_delta(delta)

    def _deliver_end(self, request: RequestState, reason: Literal["abort", "error"]) -> None:
        for sample in request.samples:
            # Not by `finished`: a failed landing may have found an end that it never delivered.
            if sample.scheduler_id in self.samples:
                sample.finished = True
                # After a failure the decoder may be what failed, and asking it again must not cost others their end.
                text = sample.stop.flush() if reason == "abort" else ""
                self.deliver(sample, sample.delta([], text, reason))

    def _forget(self, sample: SampleState) -> None:
        # Rows of the sample may still be in flight; they hold the object themselves.
        if self.samples.pop(sample.scheduler_id, None) is not None:
            self._stats.observe_end(len(sample.request.prompt_token_ids) + len(sample.token_ids))
        if sample.request.finished:
            self.requests.pop(sample.request.request_id, None)
            self.queued.discard(sample.request.request_id)
