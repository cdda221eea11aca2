"""The step loop: one thread, the only owner of scheduler, arena and device state.

Each turn plans a step, builds and dispatches its batch without waiting, and lands the step before it. Everything that
decides (admission, stop rules) happens here between steps; other threads only put commands into the inbox.

Where grammars constrain rows of a batch, the step before it lands while the batch runs, and what these rows may draw
is found out before a second dispatch lets them draw.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.activity import Activity, take_activity
from tokenspeed_jax.engine.batch import BatchBuilder, BuiltBatch
from tokenspeed_jax.engine.device_memory import out_of_memory
from tokenspeed_jax.engine.jump_forward import JumpForward
from tokenspeed_jax.engine.landing import land
from tokenspeed_jax.engine.masks import MaskBuilder
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.prompt_scorer import PendingScores
from tokenspeed_jax.engine.redraw import Redraw
from tokenspeed_jax.engine.requests import RequestState, SampleState
from tokenspeed_jax.engine.sampling_state import blocked_ids
from tokenspeed_jax.engine.stats import StatsCollector
from tokenspeed_jax.engine.step import DeviceOutputs, unpack_outputs
from tokenspeed_jax.errors import EngineClosed
from tokenspeed_jax.kv_events.feed import KVEventFeed

_LOG = logging.getLogger(__name__)
_MAX_EMPTY_ROUNDS = 1000
"""Rounds in a row that may plan nothing while nothing is in flight; more means that scheduling is stuck."""


@dataclass(frozen=True)
class _Submission:
    request: RequestState
    specs: list[scheduling.RequestSpec]


@dataclass(frozen=True)
class _Question:
    """A command whose value, or error, another thread waits for."""

    function: Callable[[], Any]
    answer: Future[Any] = field(default_factory=Future)

    def __call__(self) -> None:
        if not self.answer.set_running_or_notify_cancel():
            return
        try:
            self.answer.set_result(self.function())
        except Exception as error:
            self.answer.set_exception(error)


@dataclass(frozen=True)
class _InFlight:
    round_number: int
    built: BuiltBatch
    packed: jax.Array
    scores: PendingScores
    dispatched_at: float


class StepLoop:
    """Runs requests to their end on a thread of its own.

    Thread-safe: `submit`, `abort`, `call`, `ask`, `activity`, `flush_cache`, `close`, and the read-only properties.
    Deltas are delivered on the loop's thread. After an internal error every request finishes with "error" and the loop
    ends: a step that failed half-way leaves donated buffers behind that nobody can vouch for.
    """

    def __init__(
        self,
        scheduler: scheduling.Scheduler,
        programs: StepPrograms,
        builder: BatchBuilder,
        stats: StatsCollector,
        *,
        overlap_depth: int,
        eos_token_ids: Collection[int],
        kv_events: KVEventFeed | None = None,
        masks: MaskBuilder | None = None,
        jumps: JumpForward | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._programs = programs
        self._builder = builder
        self._stats = stats
        self._overlap_depth = overlap_depth
        self._eos_token_ids = eos_token_ids
        self._kv_events = kv_events
        self._masks = masks
        self._jumps = jumps
        self._inbox: deque[_Submission | Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._samples: dict[str, SampleState] = {}
        self._requests: dict[str, RequestState] = {}
        self._queued: set[str] = set()
        self._slot_owner: dict[int, SampleState] = {}
        self._empty_rounds = 0
        self._was_idle = True
        self._landed_at = 0.0
        self._thread = threading.Thread(target=self._run, name="tokenspeed-step-loop", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are still served."""
        return self._thread.is_alive() and not self._closing and self._failure is None

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it was not `close`."""
        return self._failure

    @property
    def num_queued_requests(self) -> int:
        """Requests none of whose samples has started yet, those in the inbox included."""
        return len(self._queued)

    def submit(self, request: RequestState, specs: list[scheduling.RequestSpec]) -> None:
        """Queues a validated request; `specs[i]` is the scheduler's view of `request.samples[i]`."""
        self._post(_Submission(request, specs))

    def abort(self, request_id: str) -> None:
        """Ends a request; its samples finish with "abort". Unknown and finished requests are ignored."""
        self._post(lambda: self._abort(request_id))

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` on the loop's thread between two steps."""
        self._post(function)

    def ask[T](self, function: Callable[[], T]) -> T:
        """Runs `function` on the loop's thread between two steps, and waits for its value.

        Raises:
            EngineClosed: the loop ended before it came to this.
            RuntimeError: called on the loop's own thread, which cannot wait for itself.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a receiver of deltas must not wait for the step loop: it runs on the loop's thread")
        return self._request(function).result()

    def _request[T](self, function: Callable[[], T]) -> Future[T]:
        question = _Question(function)
        self._post(question)
        return question.answer

    def activity(self, max_requests: int) -> Future[Activity]:
        """What the engine does between the next two steps, as `take_activity` finds it; does not wait for that."""
        return self._request(
            lambda: take_activity(
                self._scheduler, self._requests.values(), self._queued, self._slot_owner, max_requests
            )
        )

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, with nothing dropped, while requests hold cached blocks."""
        return self.ask(self._clear_cache)

    def close(self, timeout: float | None = None) -> None:
        """Aborts what runs and ends the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _post(self, command: _Submission | Callable[[], None]) -> None:
        with self._wake:
            if self._failure is not None:
                raise EngineClosed("the engine has failed") from self._failure
            if self._closing:
                raise EngineClosed("the engine is closed")
            if isinstance(command, _Submission):
                self._queued.add(command.request.request_id)
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._turn()
        except BaseException as error:
            if said := out_of_memory(error):
                _LOG.error("out of device memory in a step; lower --gpu-memory-utilization: %s", said)
            _LOG.exception("a step failed; the engine ends and every request with it")
            self._failure = error
        finally:
            with self._wake:
                self._closing = True
                left = [item.request for item in self._inbox if isinstance(item, _Submission)]
                questions = [item for item in self._inbox if isinstance(item, _Question)]
                self._inbox.clear()
            for question in questions:
                if question.answer.set_running_or_notify_cancel():
                    question.answer.set_exception(EngineClosed("the engine is closed"))
            # What is still queued never reached the scheduler; it ends like what runs.
            for request in left:
                self._register(request)
            for request in list(self._requests.values()):
                self._deliver_end(request, "abort" if self._failure is None else "error")
            self._in_flight.clear()

    def _take_commands(self) -> bool:
        """Runs the inbox, waiting for it while idle. False when the loop has to end."""
        while True:
            with self._wake:
                while not (self._closing or self._inbox or self._requests or self._in_flight):
                    self._was_idle = True
                    self._wake.wait()
                if self._closing:
                    return False
            # One by one: if a command fails, those behind it are still there to be answered.
            for _ in range(len(self._inbox)):
                command = self._inbox.popleft()
                if isinstance(command, _Submission):
                    self._admit(command)
                else:
                    command()
            if self._requests or self._in_flight:
                return True

    def _admit(self, submission: _Submission) -> None:
        self._register(submission.request)
        self._scheduler.submit_requests(submission.specs)

    def _register(self, request: RequestState) -> None:
        self._requests[request.request_id] = request
        self._samples.update((sample.scheduler_id, sample) for sample in request.samples)
        self._stats.observe_arrival(len(request.prompt_token_ids) * len(request.samples))

    def _turn(self) -> None:
        plan = self._scheduler.next_execution_plan()
        batch = plan.forward[0]
        ids = batch.request_ids
        self._prepare_blocks(plan)
        self._builder.note_changes(plan)
        if ids:
            self._empty_rounds = 0
            self._dispatch(plan.round_number, batch, [self._samples[request_id] for request_id in ids])
        elif not self._in_flight:
            self._count_empty_round()
        # A round that dispatched nothing has nothing to overlap with: land one step, then plan again.
        keep = self._overlap_depth if ids else len(self._in_flight) - 1
        while len(self._in_flight) > max(keep, 0):
            self._land(self._in_flight.popleft())
        self._stats.observe_scheduler(self._scheduler)
        # Last, while the device is at work on the step that was dispatched.
        if self._kv_events is not None:
            self._kv_events.forward()
            self._stats.observe_kv_events(self._kv_events.dropped)

    def _clear_cache(self) -> bool:
        cleared = self._scheduler.clear_cache()
        if cleared and self._kv_events is not None:
            self._kv_events.clear()
        return cleared

    def _prepare_blocks(self, plan: scheduling.ExecutionPlan) -> None:
        """Fresh blocks are cleared where that is needed, and blocks of forks are copied, before the batch runs."""
        arena = self._programs.model.arena
        if arena.requires_block_zeroing:
            arena.zero_blocks({group: ids for group, ids in plan.pages_to_zero_arrays().items() if len(ids)})
        arena.copy_blocks(plan.pages_to_copy)

    def _dispatch(self, round_number: int, batch: scheduling.Forward.Batch, samples: list[SampleState]) -> None:
        self._note_admissions(batch, samples)
        built = self._builder.build(batch, samples, self._scheduler.block_table_views())
        for sample, draws in zip(samples, built.draws, strict=True):
            sample.num_dispatched += draws
        outputs = self._programs.run(built)
        self._observe_overlap()
        dispatched_at = time.perf_counter()
        scores = self._programs.scorer.dispatch(built, outputs.hidden)
        packed = self._redrawn(round_number, built, outputs) if built.constrained else outputs.packed
        self._in_flight.append(_InFlight(round_number, built, packed, scores, dispatched_at))

    def _redrawn(self, round_number: int, built: BuiltBatch, outputs: DeviceOutputs) -> jax.Array:
        """Dispatches the draws of a step's constrained rows, once the tokens before them are known."""
        if self._masks is None or outputs.logits is None:
            raise RuntimeError("a sample has a grammar in an engine that serves none")
        # All of this while the device computes the step: what is left to do after the redraw, it would wait for.
        while self._in_flight:
            self._land(self._in_flight.popleft())
        rows = built.constrained if self._jumps is None else self._jumps.take(built, round_number)
        if not rows:
            outputs.packed.copy_to_host_async()
            return outputs.packed
        redraw = Redraw.of(built, rows, self._masks.vocab_size)
        self._masks.fill(redraw.masks, rows, built.samples)
        return self._programs.redraw(redraw, outputs.packed, outputs.logits)

    def _observe_overlap(self) -> None:
        """Notes whether the device still had work when the next step reached it; asked once that step is there, so
        that a step that counts as overlapped was in time for certain."""
        if not self._was_idle:
            before: Any = self._in_flight[-1].packed if self._in_flight else None  # jax's types do not have is_ready
            self._stats.observe_dispatch(overlapped=before is not None and not before.is_ready())
        self._was_idle = False

    def _note_admissions(self, batch: scheduling.Forward.Batch, samples: list[SampleState]) -> None:
        """Prepares the slots of rows that were admitted by this plan, freshly or after a retraction."""
        starts = batch.extend_prefix_lens
        if not starts:
            return
        slots = batch.request_pool_indices
        now, has_admitted = time.monotonic(), False
        for index, sample in enumerate(samples[: len(starts)]):
            if self._slot_owner.get(slots[index]) is sample:
                continue
            self._slot_owner[slots[index]] = sample
            self._queued.discard(sample.request.request_id)
            has_admitted = True
            if sample.scheduled_at is None:
                sample.scheduled_at = now
            if sample.request.cached_tokens is None:
                sample.request.cached_tokens = starts[index]
                looked_up = sample.request.prompt_scores is None
                self._stats.observe_prompt(len(sample.request.prompt_token_ids), starts[index], looked_up=looked_up)
            if sample.params.uses_history:
                blocked = blocked_ids(sample.params, self._eos_token_ids)
                self._programs.begin_request(slots[index], sample, blocked)
        if has_admitted:
            self._stats.observe_hits(self._scheduler)

    def _land(self, step: _InFlight) -> None:
        outputs = unpack_outputs(np.asarray(step.packed))
        step.scores.land()
        results, deltas = land(step.built, outputs)
        results.apply(self._scheduler, step.round_number)
        begun, self._landed_at = max(step.dispatched_at, self._landed_at), time.perf_counter()
        self._stats.observe_step(self._landed_at - begun, step.built.num_tokens)
        # Before delivery: who has just been told that a request ended must not find it running.
        self._stats.observe_scheduler(self._scheduler)
        for sample, delta in deltas:
            self._deliver(sample, delta)

    def _deliver(self, sample: SampleState, delta: RequestDelta) -> None:
        self._stats.observe_delta(delta)
        if sample.finished:
            self._forget(sample)
        sample.request.on_delta(delta)

    def _forget(self, sample: SampleState) -> None:
        # Rows of the sample may still be in flight; they hold the object themselves.
        if self._samples.pop(sample.scheduler_id, None) is not None:
            self._stats.observe_end(len(sample.request.prompt_token_ids) + len(sample.token_ids))
        if sample.request.finished:
            self._requests.pop(sample.request.request_id, None)
            self._queued.discard(sample.request.request_id)

    def _abort(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is None:
            return
        events = scheduling.ExecutionEvent()
        for sample in request.samples:
            if not sample.finished:
                event = scheduling.ForwardEvent.Abort()
                event.request_id = sample.scheduler_id
                events.add_event(event)
        self._scheduler.advance(events)
        self._stats.observe_scheduler(self._scheduler)
        self._deliver_end(request, "abort")

    def _deliver_end(self, request: RequestState, reason: Literal["abort", "error"]) -> None:
        for sample in request.samples:
            # Not by `finished`: a failed landing may have found an end that it never delivered.
            if sample.scheduler_id in self._samples:
                sample.finished = True
                # After a failure the decoder may be what failed, and asking it again must not cost others their end.
                self._deliver(sample, sample.last_delta() if reason == "abort" else sample.delta([], "", reason))

    def _count_empty_round(self) -> None:
        """Retraction may take a few rounds that run nothing; anything longer is a bug that must not spin forever."""
        self._empty_rounds += 1
        if self._empty_rounds > _MAX_EMPTY_ROUNDS:
            raise RuntimeError(f"{len(self._samples)} requests wait, but the scheduler planned nothing for long")
