"""From the engine's thread to the event loop: deltas of running requests, with abort and failure.

engine thread                       event loop
on_delta -> DeltaBridge.deliver     DeltaBridge._drain -> Generation._take -> Generation.batches()
            (one deque, one wake-up for all that a step brought)
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.errors import EngineClosed, InvalidRequest
from tokenspeed_jax.serve.errors import ApiError, engine_unavailable, refusal, request_aborted
from tokenspeed_jax.serve.metrics import ServerMetrics
from tokenspeed_jax.serve.protocol.reply import Choice
from tokenspeed_jax.serve.served_engine import ServedEngine

_HEALTH_CHECK_SECONDS = 0.5


class DeltaBridge:
    """Hands deltas from the engine's thread to the generations that wait for them on one event loop."""

    def __init__(self, engine: ServedEngine, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: deque[tuple[Generation, int, RequestDelta, float]] = deque()
        self._is_scheduled = False
        self._open: dict[str, Generation] = {}

    @property
    def num_open(self) -> int:
        """Requests whose replies are not complete."""
        return len(self._open)

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

    async def _watch_health(self) -> None:
        # A dying engine aborts its requests, but one that hangs in the attempt must not leave clients waiting.
        while True:
            await asyncio.sleep(_HEALTH_CHECK_SECONDS)
            if not self._engine.is_healthy:
                for generation in list(self._open.values()):
                    generation.fail(engine_unavailable())

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
    ) -> "Generation":
        """Submits every prompt of one HTTP request, or none.

        Args:
            keeps_output: whether the choices keep text and tokens, as a reply in one piece needs.
            shows_aborts: whether an abort ends a choice with what it has, as any other reason does, or fails the
                request.
            renamed: engine parameters that the client knows by another name.

        Raises:
            ApiError: 400 for what the engine refuses, 503 when it is not running.
        """
        if request_id in self._open:
            # Not left to the engine: giving this one up again would abort the prompts of the one that runs.
            name = renamed.get("request_id", "request_id")
            raise ApiError(f"{name} {request_id!r} is in use by a running request", param=name, code="invalid_value")
        generation = Generation(
            self._engine,
            self._metrics,
            prompts,
            params,
            request_id=request_id,
            keeps_output=keeps_output,
            shows_aborts=shows_aborts,
        )
        generation.on_close = partial(self._open.pop, request_id, None)
        self._open[request_id] = generation
        try:
            for index, prompt in enumerate(prompts):
                self._engine.submit(
                    prompt,
                    params,
                    request_id=generation.engine_id(index),
                    on_delta=partial(self.deliver, generation, index),
                )
        except InvalidRequest as error:
            generation.close()
            raise refusal(error, renamed) from None
        except EngineClosed:
            generation.close()
            raise engine_unavailable() from None
        except BaseException:
            generation.close()
            raise
        return generation

    def abort(self, request_id: str) -> int:
        """Aborts a request, or one prompt of it, by the id that its client was told; returns how many were found."""
        return sum(generation.abort(request_id) for generation in list(self._open.values()))

    def abort_all(self) -> int:
        """Aborts every request; returns how many there were."""
        return sum(generation.abort() for generation in list(self._open.values()))


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
    ) -> None:
        self._engine = engine
        self._request_id = request_id
        self._num_prompts = len(prompts)
        self._n = params.n
        self._shows_aborts = shows_aborts
        self.choices = [
            Choice(prompt_index * params.n + sample, sample, prompt, keeps_output)
            for prompt_index, prompt in enumerate(prompts)
            for sample in range(params.n)
        ]
        self._unfinished = len(self.choices)
        self._timer = metrics.timer(len(self.choices))
        self._arrived: list[tuple[int, RequestDelta]] = []
        self._failure: ApiError | None = None
        self._wake = asyncio.Event()
        self._is_closed = False
        self.on_close: Callable[[], object] = lambda: None

    def engine_id(self, prompt_index: int) -> str:
        """The engine's name of one prompt of this request."""
        return f"{self._request_id}-{prompt_index}"

    def take(self, prompt_index: int, delta: RequestDelta, arrived: float) -> None:
        """Takes one delta that reached the server at monotonic time `arrived`."""
        if self._is_closed or self._failure is not None:
            return
        if delta.finish_reason == "abort" and not (self._shows_aborts and self._engine.is_healthy):
            self.fail(request_aborted() if self._engine.is_healthy else engine_unavailable())
            return
        index = prompt_index * self._n + delta.sample_index
        self.choices[index].push(delta)
        self._timer.observe(index, len(delta.token_ids), arrived)
        if delta.finish_reason is not None:
            self._unfinished -= 1
            if self._unfinished == 0:
                self._timer.finish(arrived)
        self._arrived.append((index, delta))
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Ends `batches` with `error`, after what has arrived so far."""
        self._failure = self._failure or error
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

    async def finish(self) -> list[Choice]:
        """Waits for the end and returns the finished choices. Raises as `batches` does."""
        async for _ in self.batches():
            pass
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
        if self._unfinished == 0:
            return
        for index in range(self._num_prompts):
            # A closed engine has aborted everything already.
            with contextlib.suppress(EngineClosed):
                self._engine.abort(self.engine_id(index))
