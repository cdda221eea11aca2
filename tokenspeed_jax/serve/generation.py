"""From the engine's thread to the event loop: deltas of running requests, with abort and failure.

engine thread                       event loop
on_delta -> DeltaBridge.deliver     DeltaBridge._drain -> Generation._take -> Generation.batches()
            (one deque, one wake-up for all that a step brought)
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from types import MappingProxyType

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import EngineClosed, EngineStateError, InvalidRequest
from tokenspeed_jax.serve.admission import Admission
from tokenspeed_jax.serve.errors import (
    ApiError,
    constraint_failed,
    engine_failed,
    engine_not_serving,
    engine_unavailable,
    refusal,
    request_aborted,
    request_timed_out,
)
from tokenspeed_jax.serve.metrics import ServerMetrics
from tokenspeed_jax.serve.protocol.reply import Choice
from tokenspeed_jax.serve.request_times import RequestTimes
from tokenspeed_jax.serve.served_engine import ServedEngine
from tokenspeed_jax.serve.tracing import CLIENT_GONE, OnEnd, RequestTracer

_HEALTH_CHECK_SECONDS = 0.5


class DeltaBridge:
    """Hands deltas from the engine's thread to the generations that wait for them on one event loop."""

    def __init__(
        self,
        engine: ServedEngine,
        metrics: ServerMetrics,
        admission: Admission,
        request_timeout: float | None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._admission = admission
        self._request_timeout = request_timeout
        self._tracer = tracer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[tuple[Generation, int, RequestDelta, float]] = deque()
        self._is_scheduled = False
        self._open: dict[str, Generation] = {}

    @contextlib.asynccontextmanager
    async def attached(self) -> AsyncIterator[None]:
        """Delivers to the running loop while the context lasts, and fails what is open when the engine dies."""
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._watch_health())
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            if self._tracer is not None:
                await self._tracer.close()

    async def _watch_health(self) -> None:
        # A failing engine ends its requests, but one that hangs in the attempt must not leave clients waiting.
        while True:
            await asyncio.sleep(_HEALTH_CHECK_SECONDS)
            if self._admission.engine_has_failed:
                self._admission.fail_all(engine_failed())

    def deliver(self, generation: "Generation", prompt_index: int, delta: RequestDelta) -> None:
        """Takes one delta; called on the engine's thread, never blocks, never raises."""
        self._pending.append((generation, prompt_index, delta, time.monotonic()))
        if not self._is_scheduled and self._loop is not None:
            self._is_scheduled = True
            # The loop may have been closed under an engine that still runs; nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # Cleared first: a delta appended from here on either is still seen below or schedules another drain.
        self._is_scheduled = False
        while self._pending:
            generation, prompt_index, delta, arrived = self._pending.popleft()
            generation.take(prompt_index, delta, arrived)

    def open(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        keeps_output: bool,
        shows_aborts: bool = False,
        renamed: dict[str, str],
        priority: int = 0,
        cache_salt: str | None = None,
        trace_headers: Mapping[str, str] = MappingProxyType({}),
    ) -> "Generation":
        """Submits every prompt of one HTTP request, or none.

        Args:
            keeps_output: whether the choices keep text and tokens, as a reply in one piece needs.
            shows_aborts: whether an abort ends a choice with what it has, as any other reason does, or fails the
                request.
            renamed: engine parameters that the client knows by another name.
            priority, cache_salt: as in `Engine.submit`.
            trace_headers: the HTTP request's, which may say what trace it belongs to.

        Raises:
            ApiError: 400 for what the engine refuses, 429 when the queue is full, 503 when the engine is not running
                or the server is stopping.
        """
        if request_id in self._open:
            # Not left to the engine: giving this one up again would abort the prompts of the one that runs.
            name = renamed.get("request_id", "request_id")
            raise ApiError(f"{name} {request_id!r} is in use by a running request", param=name, code="invalid_value")
        self._admission.check_room()
        generation = Generation(
            self._engine,
            self._metrics,
            prompts,
            params,
            request_id=request_id,
            keeps_output=keeps_output,
            shows_aborts=shows_aborts,
            constraint_name=renamed.get("structured_outputs", "structured_outputs"),
        )
        self._track(request_id, generation)
        try:
            for index, prompt in enumerate(prompts):
                self._engine.submit(
                    prompt,
                    params,
                    request_id=generation.engine_id(index),
                    priority=priority,
                    cache_salt=cache_salt,
                    on_delta=partial(self.deliver, generation, index),
                )
        except InvalidRequest as error:
            generation.close()
            raise refusal(error, renamed) from None
        except EngineClosed:
            generation.close()
            raise engine_unavailable() from None
        except EngineStateError as error:
            generation.close()
            raise engine_not_serving(str(error)) from None
        except BaseException:
            generation.close()
            raise
        if self._tracer is not None:
            generation.on_end = self._tracer.follow(request_id, generation.times, params, trace_headers)
        return generation

    def abort(self, request_id: str) -> int:
        """Aborts a request, or one prompt of it, by the id that its client was told; returns how many were found."""
        return sum(generation.abort(request_id) for generation in list(self._open.values()))

    def abort_all(self) -> int:
        """Aborts every request; returns how many there were."""
        return sum(generation.abort() for generation in list(self._open.values()))

    def _track(self, request_id: str, generation: "Generation") -> None:
        """Keeps the generation where it can be failed, and fails it when its time is over, until it is closed."""
        deadline: asyncio.TimerHandle | None = None
        if self._request_timeout is not None:
            error = request_timed_out(self._request_timeout)
            deadline = asyncio.get_running_loop().call_later(self._request_timeout, generation.fail, error)

        def forget() -> None:
            self._open.pop(request_id, None)
            self._admission.open_requests.discard(generation)
            if deadline is not None:
                deadline.cancel()

        generation.on_close = forget
        self._open[request_id] = generation
        self._admission.open_requests.add(generation)


class Generation:
    """The running prompts of one HTTP request. Lives on the event loop; `close` ends it at any time.

    Attributes:
        choices: prompts x n continuations, in OpenAI's order.
    """

    def __init__(
        self,
        engine: ServedEngine,
        metrics: ServerMetrics,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        request_id: str,
        keeps_output: bool,
        shows_aborts: bool,
        constraint_name: str,
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._constraint_name = constraint_name
        self._num_prompts = len(prompts)
        self._n = params.n
        self._shows_aborts = shows_aborts
        self.choices = [
            Choice(prompt_index * params.n + sample, sample, prompt, keeps_output)
            for prompt_index, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]
        self._unfinished = len(self.choices)
        self._watch = metrics.watch(prompts, params)
        self._arrived: list[tuple[int, RequestDelta]] = []
        self._failure: ApiError | None = None
        self._wake = asyncio.Event()
        self._is_closed = False
        self.on_close = lambda: None
        self.on_end: OnEnd = lambda _failure: None

    @property
    def times(self) -> RequestTimes:
        """When what happened so far."""
        return self._watch.times

    def engine_id(self, prompt_index: int) -> str:
        """The engine's name of one prompt of this request."""
        return f"{self._request_id}-{prompt_index}"

    def take(self, prompt_index: int, delta: RequestDelta, arrived: float) -> None:
        """Takes one delta that reached the server at monotonic time `arrived`."""
        if self._is_closed or self._failure is not None:
            return
        if delta.finish_reason == "error":
            self.fail(engine_failed())
            return
        if delta.finish_reason == "abort" and not self._shows_aborts:
            reason = delta.stop_reason
            self.fail(request_aborted() if reason is None else constraint_failed(str(reason), self._constraint_name))
            return
        index = prompt_index * self._n + delta.sample_index
        self.choices[index].push(delta)
        self._watch.take(index, delta, arrived)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if self._unfinished == 0:
                self.on_end(None)
        self._arrived.append((index, delta))
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends `batches` with `error`, after what has arrived so far; does nothing once every choice has finished.

        The engine is told at once: who reads the batches may be waiting for a client that does not read.
        """
        if self._failure is not None or self._unfinished == 0:
            return
        self._failure = error
        self._abort()
        self.on_end(error.code or error.kind)
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[tuple[int, RequestDelta]]]:
        """All (choice index, delta) that have arrived, again and again until every choice has finished.

        Raises:
            ApiError: the engine died or gave the request up.
        """
        is_done = False
        while not is_done:
            await self._wake.wait()
            self._wake.clear()
            batch, self._arrived = self._arrived, []
            is_done = self._unfinished == 0
            if batch:
                yield batch
            if self._failure is not None and not is_done:
                raise self._failure

    async def finish(self, take: Callable[[int, RequestDelta], None] = lambda _index, _delta: None) -> list[Choice]:
        """Gives `take` every (choice index, delta) and returns the finished choices. Raises as `batches` does."""
        async for batch in self.batches():
            for index, delta in batch:
                take(index, delta)
        return self.choices

    def abort(self, name: str | None = None) -> bool:
        """Tells the engine to end the prompt or the whole request of this name, or whatever its name is; `batches`
        tells of the end. False if nothing here has that name."""
        prompts = [self.engine_id(index) for index in range(self._num_prompts)]
        chosen = prompts if name in (None, self._request_id) else [prompt for prompt in prompts if prompt == name]
        for prompt in chosen:
            with contextlib.suppress(EngineClosed):
                self._engine.abort(prompt)
        return bool(chosen)

    def close(self) -> None:
        """Aborts what still runs in the engine; does nothing the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        self.on_close()
        if self._unfinished and self._failure is None:
            self._abort()
            self.on_end(CLIENT_GONE)

    def _abort(self) -> None:
        for index in range(self._num_prompts):
            # An engine that is closed or has failed has ended everything already.
            with contextlib.suppress(EngineClosed):
                self._engine.abort(self.engine_id(index))
