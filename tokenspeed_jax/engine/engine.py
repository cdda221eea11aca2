"""`Engine`: the public face. Generates, streams, scores; owns one model on one device."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self

import jax
from flax import nnx
from tqdm import tqdm

from tokenspeed_jax.engine.activity import Activity
from tokenspeed_jax.engine.assembly import Assembly, assemble
from tokenspeed_jax.engine.collector import RequestCollector
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.device_memory import explained
from tokenspeed_jax.engine.given_tokens import GivenCompletions, GivenTokens, ScoreMethod
from tokenspeed_jax.engine.inbox import LiveRequestMode
from tokenspeed_jax.engine.lifecycle import SleepReport, WakeReport
from tokenspeed_jax.engine.memory import MemoryReport
from tokenspeed_jax.engine.outputs import RequestDelta, RequestOutput
from tokenspeed_jax.engine.profiler import Profiler
from tokenspeed_jax.engine.prompts import Prompt, as_token_ids, present
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.source import ModelSource
from tokenspeed_jax.engine.start_report import StartReport
from tokenspeed_jax.engine.stats import EngineStats
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.engine.weight_store import WeightUpdate
from tokenspeed_jax.errors import EngineClosed
from tokenspeed_jax.text import Tokenizer


class Engine:
    """Serves one model on one device.

    Thread-safe. `close` (or leaving the context) ends all requests and frees the arena and the device state.

    Attributes:
        config: the options it was made with.
        tokenizer: the checkpoint's tokenizer.
        model_name: the checkpoint's name.
        max_model_len: most tokens of prompt and output together.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the checkpoint, sizes and allocates the cache arena, compiles every step.

        Raises:
            ConfigError: an option that cannot work here, before anything is allocated.
            CheckpointError: a checkpoint that is incomplete, unknown or does not fit its architecture.
            OutOfDeviceMemory: the device has less memory left than was planned with.
        """
        self._start(config, ModelSource.of_checkpoint(config))

    @classmethod
    def from_model(
        cls,
        model: nnx.Module,
        config: EngineConfig,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> Self:
        """An engine around a model that already exists, such as a trainer's; its arrays are used as they are.

        Without a tokenizer only token-id prompts are taken and texts are empty.
        """
        engine = cls.__new__(cls)
        engine._start(config, ModelSource.of_model(model, config, tokenizer, tuple(eos_token_ids)))
        return engine

    def _start(self, config: EngineConfig, source: ModelSource) -> None:
        self.config = config
        with explained("the engine started"):
            self._assembly: Assembly = assemble(config, source)
        self._loop = self._assembly.loop
        self.model_name = source.name
        self.max_model_len = self._assembly.limits.max_model_len
        self._profiler = Profiler()

    @property
    def tokenizer(self) -> Tokenizer:
        return present(self._assembly.source.tokenizer)

    @property
    def memory_report(self) -> MemoryReport:
        """Where the device's memory went at start."""
        return self._assembly.report

    @property
    def start_report(self) -> StartReport:
        """Where the time of the start went."""
        return self._assembly.start

    @property
    def is_healthy(self) -> bool:
        """False once the engine is closed or its step loop has died."""
        return self._loop.is_healthy

    @property
    def num_queued_requests(self) -> int:
        """Requests that wait to be started for the first time. What was retracted waits too, but does not count."""
        return self._loop.num_queued_requests

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generates for every prompt and waits for all of them.

        Args:
            prompts: one prompt or a list of them; each is text, token ids or chat messages.
            params: one for all, or one per prompt.
            priority: one for all, or one per prompt; the lower, the earlier served (see `RequestOptions`).
            cache_salt: share the prefix cache only with requests of the same salt.

        Returns:
            One output per prompt, in order.

        Raises:
            InvalidRequest: some prompt or parameter is refused; then nothing was submitted.
            EngineClosed: the engine ended before the outputs were complete.
            EngineStateError: the engine sleeps, or its weights are gone or were deleted while it generated.
        """
        requests = self._assembly.intake.batch(prompts, params, priority, cache_salt)
        with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            collectors = [RequestCollector(item, on_finish=bar.update) for _, item, _ in requests]
            self._assembly.intake.submit_batch(requests, [collector.push for collector in collectors])
            outputs = [collector.wait() for collector in collectors]
        self._assembly.lifecycle.explain_cut({sample.finish_reason for output in outputs for sample in output.samples})
        return outputs

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        on_delta: Callable[[RequestDelta], None],
    ) -> str:
        """Submits one request and returns its id.

        Args:
            priority: the lower, the earlier served (see `RequestOptions`).
            cache_salt: share the prefix cache only with requests of the same salt.
            on_delta: receives every delta, on the engine's thread; it must not block. Each sample's last one has a
                `finish_reason`; "error" says that the engine failed.

        Raises:
            InvalidRequest: the request is refused; nothing was changed.
            EngineClosed: the engine was closed or has failed.
            EngineStateError: the engine sleeps, or has no weights.
        """
        options = RequestOptions(priority, cache_salt)
        return self._assembly.intake.submit(list(prompt_token_ids), params, options, request_id, on_delta)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestDelta]:
        """Yields a request's deltas as they land; leaving the iteration early aborts the request.

        Args:
            priority, cache_salt: as in `submit`.

        Raises:
            InvalidRequest: the request is refused.
            EngineClosed: the engine was closed, or failed while it generated.
            EngineStateError: as in `generate`.
        """
        params, loop = params or SamplingParams(), asyncio.get_running_loop()
        queue: asyncio.Queue[RequestDelta] = asyncio.Queue()

        def push(delta: RequestDelta) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, delta)
            except RuntimeError:  # the loop was closed, as by an interrupt: nobody is left to tell
                self.abort(delta.request_id)

        token_ids = await asyncio.to_thread(as_token_ids, prompt, self._assembly.source.tokenizer)
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.compile_grammar, params.structured_outputs)
        options = RequestOptions(priority, cache_salt)
        request_id = self._assembly.intake.submit(token_ids, params, options, request_id, push)
        running = params.n
        try:
            while running:
                delta = await queue.get()
                running -= delta.finish_reason is not None
                if delta.finish_reason == "error":
                    self._assembly.lifecycle.explain_cut({"error"})
                yield delta
        finally:
            if running:
                self.abort(request_id)

    def compile_grammar(self, structured_outputs: StructuredOutputsParams) -> None:
        """Compiles a constraint ahead of `submit`, which else does it itself: up to a second for a large one.

        Raises:
            InvalidRequest: the constraint cannot be compiled, or this engine serves none.
        """
        self._assembly.grammars.compile(structured_outputs)

    def abort(self, request_id: str) -> None:
        """Ends a request; its samples finish with "abort". Ids that are unknown or already finished are ignored."""
        if self.is_healthy:
            self._loop.abort(request_id)

    def score(
        self, prompts: Prompt | Sequence[Prompt], completions: GivenCompletions = None, *, method: ScoreMethod = "plain"
    ) -> Any:
        """Natural log-probability under the model of each token of each completion, given all before it.

        Args:
            prompts: one per completion; without completions, the ids of one sequence, whose first token gets None.
            completions: token ids.
            method: "plain", forward passes without a cache on this thread, or "paged", the steps that prefill prompts.

        Returns:
            A `list[list[float]]`, one list per completion; of one sequence a `list[float | None]`.

        Raises:
            InvalidRequest: see `GivenTokens.of`.
            EngineStateError: the engine sleeps, or has no weights.
            EngineClosed: the engine is closed, or ends meanwhile.
        """
        given = GivenTokens.of(prompts, completions, method, self._assembly.source.tokenizer, self._assembly.limits)
        if not self.is_healthy:
            raise EngineClosed("the engine is closed")
        self._assembly.lifecycle.check_awake()
        return given.scored_by(self._assembly.scorer.score, self.generate)

    def flush_cache(self) -> bool:
        """Empties the prefix cache between two steps, and waits for that.

        Returns:
            False, and then nothing was dropped, while running requests hold blocks of it.

        Raises:
            EngineClosed: the engine is closed, or ends meanwhile.
        """
        return self._loop.flush_cache()

    @property
    def weight_version(self) -> int:
        """Of the weights that the next step runs with; the ones that the engine started with are version 0."""
        return self._assembly.programs.store.version

    def update_weights(
        self, params: Any, *, version: int, mode: LiveRequestMode = "drain", check_finite: bool = False
    ) -> WeightUpdate:
        """Puts new weights in place of all that the engine has, between two steps. All or nothing.

        Arrays of the right dtype on the right device are used as they are, without a copy: they must live until the
        next update. The others are moved, cast or fused, into the memory of those that they replace where these are the
        engine's own. Nothing that was computed before is found in the prefix cache afterwards.

        Args:
            params: all parameters: an `nnx.State` or module of this architecture, a nested dict with the same paths
                (also in linen's "params" collection), or a flat dict under Hugging Face names. `jax` or `numpy` arrays.
            version: greater than `weight_version`.
            mode: of the requests that run: "drain" waits until they have ended, "abort" ends them, "keep" lets them go
                on with the new weights over the cache that they have. What is submitted meanwhile waits.
            check_finite: refuse NaNs and infinities; reads every value once.

        Raises:
            WeightUpdateError: names, shapes, dtypes, values or the version do not fit; the message names them.
            EngineStateError: the engine sleeps, or is paused with requests, which do not drain.
            EngineClosed: the engine is closed, or ends meanwhile.
        """
        return self._assembly.lifecycle.update(params, version, mode, check_finite=check_finite)

    def export_weights(self, naming: Literal["nnx", "hf"] = "nnx") -> nnx.State | dict[str, jax.Array]:
        """The weights, as `update_weights` takes them: the engine's own arrays, or under Hugging Face names.

        Raises:
            WeightUpdateError: "hf", and the model has no such names or stands in checkpoints quantised.
            EngineStateError: the engine sleeps, or has no weights.
        """
        return self._assembly.lifecycle.export(naming)

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume`."""
        return self._loop.is_paused

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine waits for `wake`, without an arena."""
        return self._assembly.lifecycle.is_sleeping

    def pause(self, mode: LiveRequestMode = "keep") -> None:
        """Runs no step any more until `resume`; what is submitted meanwhile waits.

        Args:
            mode: of the requests that run: "keep" lets them wait with the cache that they hold, "drain" waits until
                they have ended, "abort" ends them.

        Raises:
            EngineStateError: the engine sleeps; or "drain" while it is paused with requests.
        """
        self._assembly.lifecycle.pause(mode)

    def resume(self) -> None:
        """Goes on after `pause`; does nothing if the engine is not paused.

        Raises:
            EngineStateError: the engine sleeps, or has no weights.
        """
        self._assembly.lifecycle.resume()

    def sleep(self, level: Literal[1, 2] = 1) -> SleepReport:
        """Empties the prefix cache and frees the arena (level 1), and the engine's own weights too (level 2).

        After level 2, `wake` brings back the arena alone: `update_weights` has to bring the weights.

        Raises:
            EngineStateError: requests run or wait, or the engine sleeps as deeply already.
        """
        return self._assembly.lifecycle.sleep(level)

    def wake(self) -> WakeReport:
        """Allocates the arena again, zeroed.

        Raises:
            EngineStateError: the engine is not asleep.
            OutOfDeviceMemory: others have taken the memory; the engine sleeps on.
        """
        return self._assembly.lifecycle.wake()

    def start_profile(self, folder: str) -> None:
        """Begins a trace of the process with JAX's profiler; `stop_profile` or `close` writes it.

        Args:
            folder: where the trace goes; made if it is missing. XProf and Perfetto read it.

        Raises:
            ProfilerError: a trace runs already, in this engine or elsewhere in the process.
            EngineClosed: the engine is closed.
        """
        if not self.is_healthy:
            raise EngineClosed("the engine is closed")
        self._profiler.start(folder)

    def stop_profile(self) -> None:
        """Ends the trace and writes it, which may take seconds.

        Raises:
            ProfilerError: no trace runs, or it cannot be written; either way none runs afterwards.
        """
        self._profiler.stop()

    def stats(self) -> EngineStats:
        """Current figures of the engine."""
        start, programs = self._assembly.start, self._assembly.programs
        return self._assembly.stats.snapshot(
            arena_bytes=0 if self.is_sleeping else self._assembly.report.arena,
            compilations_after_warmup=programs.compilations - start.programs,
            compile_seconds=start.compiling + programs.late_compile_seconds,
            weight_version=self.weight_version,
        )

    def activity(self, max_requests: int = 100) -> Future[Activity]:
        """What the engine is doing, once the step that runs now has ended; waits for nothing.

        Args:
            max_requests: most started and most waiting requests that are listed.

        Raises:
            EngineClosed: the engine is closed; the future raises it if the engine ends meanwhile.
        """
        return self._loop.activity(max_requests)

    def close(self) -> None:
        """Aborts what runs, ends the step loop and frees device memory. Further calls raise `EngineClosed`."""
        self._loop.close()
        self._profiler.close()
        self._assembly.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
