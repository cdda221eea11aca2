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
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tokenspeed_jax import scheduler as scheduling
from tokenspeed_jax.engine.activity import Activity, take_activity
from tokenspeed_jax.engine.batch import BatchBuilder, BuiltBatch
from tokenspeed_jax.engine.device_memory import out_of_memory
from tokenspeed_jax.engine.inbox import Change, Inbox, LiveRequestMode, Submission
from tokenspeed_jax.engine.jump_forward import JumpForward
from tokenspeed_jax.engine.landing import RowResults, land
from tokenspeed_jax.engine.live_requests import LiveRequests
from tokenspeed_jax.engine.masks import MaskBuilder
from tokenspeed_jax.engine.programs import StepPrograms
from tokenspeed_jax.engine.prompt_scorer import PendingScores
from tokenspeed_jax.engine.redraw import Redraw
from tokenspeed_jax.engine.requests import SampleState
from tokenspeed_jax.engine.sampling_state import blocked_ids
from tokenspeed_jax.engine.stats import StatsCollector
from tokenspeed_jax.engine.step import DeviceOutputs, unpack_outputs
from tokenspeed_jax.errors import EngineStateError
from tokenspeed_jax.kv_events.feed import KVEventFeed
from tokenspeed_jax.weights.weight_conversion import PreparedWeights

_LOG = logging.getLogger(__name__)
_MAX_EMPTY_ROUNDS = 1000
"""Rounds in a row that may plan nothing while nothing is in flight; more means that scheduling is stuck."""


@dataclass(frozen=True)
class _InFlight:
    round_number: int
    built: BuiltBatch
    packed: jax.Array
    scores: PendingScores
    dispatched_at: float
    weight_version: int


class StepLoop:
    """Runs requests to their end on a thread of its own.

    Thread-safe: `submit`, `abort`, `call`, `ask`, `change`, `activity`, `flush_cache`, `close`, and the read-only
    properties. The rest is for what `ask` and `change` run. Deltas are delivered on the loop's thread. After an
    internal error every request finishes with "error" and the loop ends: a step that failed half-way leaves donated
    buffers behind that nobody can vouch for.
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
        self._inbox = Inbox()
        self._live = LiveRequests(scheduler, stats, self._inbox.queued)
        self._is_paused = False
        self._change: Change | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._slot_owner: dict[int, SampleState] = {}
        self._empty_rounds = 0
        self._was_idle = True
        self._landed_at = 0.0
        self._thread = threading.Thread(target=self._run, name="tokenspeed-step-loop", daemon=True)
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are still served."""
        return self._thread.is_alive() and not self._inbox.is_closing

    @property
    def failure(self) -> BaseException | None:
        """What ended the loop, if it was not `close`."""
        return self._inbox.failure

    @property
    def num_queued_requests(self) -> int:
        """Requests none of whose samples has started yet, those in the inbox included."""
        return len(self._inbox.queued)

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self._is_paused

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Queues validated requests, which the next plan sees together."""
        self._inbox.post(*submissions)

    def abort(self, request_id: str) -> None:
        """Ends a request; its samples finish with "abort". Unknown and finished requests are ignored."""
        self._inbox.post(lambda: self._live.abort(request_id))

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` on the loop's thread between two steps."""
        self._inbox.post(function)

    def check_thread(self) -> None:
        """Raises `RuntimeError` on the loop's own thread, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a receiver of deltas must not wait for the step loop: it runs on the loop's thread")

    def ask[T](self, function: Callable[[], T]) -> T:
        """Runs `function` on the loop's thread between two steps, and waits for its value.

        Raises:
            EngineClosed: the loop ended before it came to this.
            RuntimeError: called on the loop's own thread.
        """
        self.check_thread()
        return self._inbox.ask(function).result()

    def change[T](self, function: Callable[[], T], mode: LiveRequestMode) -> T:
        """Runs `function` between two steps, with nothing in flight, once `mode` was done to the requests that run.

        Callers take turns; requests that are submitted while one waits are held back until then.

        Raises:
            EngineStateError: mode "drain" while the engine is paused with requests, which would never end.
            EngineClosed, RuntimeError: as `ask`.
        """
        self.check_thread()
        change = Change(function, mode=mode)
        self._inbox.post(change)
        return change.answer.result()

    def activity(self, max_requests: int) -> Future[Activity]:
        """What the engine does between the next two steps, as `take_activity` finds it; does not wait for that."""
        return self._inbox.ask(
            lambda: take_activity(self._scheduler, self._live.all(), self._live.queued, self._slot_owner, max_requests)
        )

    def flush_cache(self) -> bool:
        """Empties the prefix cache; False, with nothing dropped, while requests hold cached blocks."""
        return self.ask(self._clear_cache)

    def close(self, timeout: float | None = None) -> None:
        """Aborts what runs and ends the thread."""
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._take_commands():
                self._turn()
        except BaseException as error:
            if said := out_of_memory(error):
                _LOG.error("out of device memory in a step; lower --gpu-memory-utilization: %s", said)
            _LOG.exception("a step failed; the engine ends and every request with it")
            failure = error
        finally:
            left = self._inbox.end(failure)
            if self._change is not None:
                self._change.give_up()
            # What is still queued never reached the scheduler; it ends like what runs.
            self._live.close(left, "abort" if failure is None else "error")
            self._in_flight.clear()

    def _take_commands(self) -> bool:
        """Runs the inbox, waiting for it while idle. False when the loop has to end."""
        while self._inbox.wait(lambda: self._has_work() or self._change is not None, self._note_idle):
            self._obey_commands()
            if self._has_work():
                return True
        return False

    def _obey_commands(self) -> None:
        # A method of its own, so that what commands hold (new weights, say) is not kept while the loop waits.
        for command in self._inbox.arrived():
            if isinstance(command, Submission):
                self._live.take(command, holds=self._is_paused or self._change is not None)
            elif isinstance(command, Change):
                self._begin(command)
            else:
                command()
        if self._change is not None and not self._live:
            self._complete(self._change)

    def _has_work(self) -> bool:
        return bool(self._in_flight) or (len(self._live) > 0 and not self._is_paused)

    def _note_idle(self) -> None:
        self._was_idle = True

    def _begin(self, change: Change) -> None:
        if change.mode == "drain" and self._live and self._is_paused:
            change.refuse(EngineStateError(f"paused with {len(self._live)} requests, which do not end: resume first"))
            return
        self._change = change
        if change.mode == "abort":
            self._live.end_all("abort")
        if change.mode != "drain" or not self._live:
            self._complete(change)

    def _complete(self, change: Change) -> None:
        self._land_all()
        change()
        self._change = None
        if not self._is_paused:
            self._live.admit_held()

    def pause(self, *, is_paused: bool) -> None:
        """Lets the requests wait where they are, and new ones before the scheduler; or lets them go on."""
        self._is_paused = is_paused
        if not is_paused:
            self._live.admit_held()

    def adopt_weights(self, prepared: PreparedWeights, version: int) -> None:
        """New weights from the next step on. What was computed before is found by no request that starts later."""
        self._programs.store.adopt(prepared, version)
        self._programs.run_postponed()
        self._scheduler.set_weight_version(str(version))
        self._live.renew_queued()
        self._clear_cache()
        self._inbox.refuse_requests(None)

    def free_cache(self, refusal: str) -> None:
        """Empties the prefix cache, frees the arena, and refuses requests with these words.

        Raises:
            EngineStateError: there are requests; nothing was changed.
        """
        if self._live or not self._inbox.refuse_requests(refusal, unless_waiting=not self._is_paused):
            count = max(len(self._live), 1)
            raise EngineStateError(f"{count} requests run or wait: pause with mode drain or abort before sleep")
        if not self._clear_cache():
            raise RuntimeError("blocks of the cache are held, but no request is there to hold them")
        self._programs.model.arena.release()

    def restore_cache(self) -> None:
        """Allocates the arena again, zeroed, and takes requests if there are weights."""
        self._programs.model.arena.restore()
        self._inbox.refuse_requests(self._programs.store.missing())

    def _turn(self) -> None:
        if (reason := self._programs.store.missing()) is not None:
            self._lose_weights(reason)
            self._land_all()
            return
        plan = self._scheduler.next_execution_plan()
        batch = plan.forward[0]
        ids = batch.request_ids
        self._prepare_blocks(plan)
        self._builder.note_changes(plan)
        if ids:
            self._empty_rounds = 0
            self._dispatch(plan.round_number, batch, [self._live.samples[request_id] for request_id in ids])
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

    def _lose_weights(self, reason: str) -> None:
        """Ends what runs, and takes no requests before there are other weights."""
        _LOG.error("requests end with an error: %s", reason)
        self._inbox.refuse_requests(reason)
        self._live.end_all("error")

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
        version = self._programs.store.version
        try:
            outputs = self._programs.run(built)
        except EngineStateError as error:
            self._lose_weights(str(error))
            RowResults().apply(self._scheduler, round_number)
            return
        self._observe_overlap()
        dispatched_at = time.perf_counter()
        scores = self._programs.scorer.dispatch(built, outputs.hidden)
        packed = self._redrawn(round_number, built, outputs) if built.constrained else outputs.packed
        self._in_flight.append(_InFlight(round_number, built, packed, scores, dispatched_at, version))

    def _redrawn(self, round_number: int, built: BuiltBatch, outputs: DeviceOutputs) -> jax.Array:
        """Dispatches the draws of a step's constrained rows, once the tokens before them are known."""
        if self._masks is None or outputs.logits is None:
            raise RuntimeError("a sample has a grammar in an engine that serves none")
        # All of this while the device computes the step: what is left to do after the redraw, it would wait for.
        self._land_all()
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
            self._live.queued.discard(sample.request.request_id)
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

    def _land_all(self) -> None:
        while self._in_flight:
            self._land(self._in_flight.popleft())

    def _land(self, step: _InFlight) -> None:
        outputs = unpack_outputs(np.asarray(step.packed))
        step.scores.land()
        results, deltas = land(step.built, outputs, step.weight_version)
        results.apply(self._scheduler, step.round_number)
        begun, self._landed_at = max(step.dispatched_at, self._landed_at), time.perf_counter()
        self._stats.observe_step(self._landed_at - begun, step.built.num_tokens)
        # Before delivery: who has just been told that a request ended must not find it running.
        self._stats.observe_scheduler(self._scheduler)
        for sample, delta in deltas:
            self._live.deliver(sample, delta)

    def _count_empty_round(self) -> None:
        """Retraction may take a few rounds that run nothing; anything longer is a bug that must not spin forever."""
        self._empty_rounds += 1
        if self._empty_rounds > _MAX_EMPTY_ROUNDS:
            raise RuntimeError(f"{len(self._live.samples)} samples wait, but the scheduler planned nothing for long")
