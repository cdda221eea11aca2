"""`Engine`: the public face. Generates, streams, scores; owns one model on one device."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from flax import nnx
from tqdm import tqdm

from tokenspeed_jax.engine.activity import Activity
from tokenspeed_jax.engine.assembly import Assembly, assemble
from tokenspeed_jax.engine.collector import RequestCollector
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.device_memory import explained
from tokenspeed_jax.engine.given_tokens import GivenCompletions, GivenTokens, ScoreMethod
from tokenspeed_jax.engine.grammar import Grammar
from tokenspeed_jax.engine.memory import MemoryReport
from tokenspeed_jax.engine.outputs import RequestDelta, RequestOutput
from tokenspeed_jax.engine.profiler import Profiler
from tokenspeed_jax.engine.prompts import Prompt, as_batch, as_token_ids, options_per_prompt, params_per_prompt, present
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.requests import LiveRequestIds, RequestState, SampleState
from tokenspeed_jax.engine.sampler import sample_seed
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.source import ModelSource
from tokenspeed_jax.engine.start_report import StartReport
from tokenspeed_jax.engine.stats import EngineStats
from tokenspeed_jax.engine.stop import StopChecker
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.engine.validation import check_sampling, check_tokens
from tokenspeed_jax.errors import EngineClosed
from tokenspeed_jax.text import Tokenizer

_LOG = logging.getLogger(__name__)


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
        self._serial = itertools.count()
        self._live_ids = LiveRequestIds()
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
        """
        batch = as_batch(prompts)
        each = params_per_prompt(params, len(batch))
        options = options_per_prompt(priority, cache_salt, len(batch))
        tokenizer = self._assembly.source.tokenizer
        requests = [
            (as_token_ids(prompt, tokenizer), item, option)
            for prompt, item, option in zip(batch, each, options, strict=True)
        ]
        for token_ids, item, _ in requests:
            self._check(token_ids, item)
        with tqdm(total=len(requests), desc="Generating", disable=not use_tqdm) as bar:
            collectors = []
            for token_ids, item, option in requests:
                collector = RequestCollector(item, on_finish=bar.update)
                collector.request_id = self._submit(token_ids, item, option, None, collector.push)
                collectors.append(collector)
            outputs = [collector.wait() for collector in collectors]
        cut = any(sample.finish_reason in ("abort", "error") for output in outputs for sample in output.samples)
        if cut and not self.is_healthy:
            raise EngineClosed("the engine ended while generating") from self._loop.failure
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
        """
        return self._submit(prompt_token_ids, params, RequestOptions(priority, cache_salt), request_id, on_delta)

    def _submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        request_id: str | None,
        on_delta: Callable[[RequestDelta], None],
    ) -> str:
        prompt = list(prompt_token_ids)
        max_tokens, grammar = self._check(prompt, params)
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
        seed = params.seed if params.seed is not None else self.config.seed ^ (serial << 20)
        for index in range(params.n):
            request.samples.append(self._sample(request, serial, index, seed))
        try:
            self._loop.submit(request, [sample.spec() for sample in request.samples])
        except EngineClosed:
            self._live_ids.release(request.request_id)
            raise
        return request.request_id

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
        """
        options = RequestOptions(priority, cache_salt)
        params = params or SamplingParams()
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestDelta] = asyncio.Queue()

        def push(delta: RequestDelta) -> None:
            try:
                loop.call_soon_threadsafe(queue.put_nowait, delta)
            except RuntimeError:  # the loop was closed, as by an interrupt: nobody is left to tell
                self.abort(delta.request_id)

        token_ids = await asyncio.to_thread(as_token_ids, prompt, self._assembly.source.tokenizer)
        if params.structured_outputs is not None:
            await asyncio.to_thread(self.compile_grammar, params.structured_outputs)
        request_id = self._submit(token_ids, params, options, request_id, push)
        running = params.n
        try:
            while running:
                delta = await queue.get()
                running -= delta.finish_reason is not None
                if delta.finish_reason == "error":
                    raise EngineClosed("the engine failed while generating") from self._loop.failure
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
            EngineClosed: the engine is closed, or ends meanwhile.
        """
        given = GivenTokens.of(prompts, completions, method, self._assembly.source.tokenizer, self._assembly.limits)
        if not self.is_healthy:
            raise EngineClosed("the engine is closed")
        return given.scored_by(self._assembly.scorer.score, self.generate)

    def flush_cache(self) -> bool:
        """Empties the prefix cache between two steps, and waits for that.

        Returns:
            False, and then nothing was dropped, while running requests hold blocks of it.

        Raises:
            EngineClosed: the engine is closed, or ends meanwhile.
        """
        return self._loop.flush_cache()

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
        assembly = self._assembly
        return assembly.stats.snapshot(
            arena_bytes=assembly.report.arena,
            compilations_after_warmup=assembly.programs.compilations - assembly.start.programs,
            compile_seconds=assembly.start.compiling + assembly.programs.late_compile_seconds,
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, token_ids: list[int], params: SamplingParams) -> tuple[int, Grammar | None]:
        """Validates a request as a whole; returns its resolved max_tokens and its grammar."""
        limits = self._assembly.limits
        check_tokens(token_ids, limits)
        max_tokens = check_sampling(token_ids, params, limits, self._assembly.source.eos_token_ids)
        constraint = params.structured_outputs
        return max_tokens, None if constraint is None else self._assembly.grammars.compile(constraint)

    def _sample(self, request: RequestState, serial: int, index: int, seed: int) -> SampleState:
        source = self._assembly.source
        stop = StopChecker(
            request.params,
            eos_token_ids=source.eos_token_ids,
            max_tokens=request.max_tokens,
            detokenizer=source.detokenizer(skip_special_tokens=request.params.skip_special_tokens),
        )
        matcher = None if request.grammar is None else request.grammar.matcher()
        return SampleState(f"{serial}-{index}", request, index, sample_seed(seed, index), stop, matcher)

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
                if not request.finished and self.is_healthy:
                    self._loop.abort(request.request_id)

        return deliver
