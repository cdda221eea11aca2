"""An engine with the public API of `Engine` and a scripted model, so that the server is tested without JAX."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from tokenspeed_jax.engine.activity import Activity, LiveRequest
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.histogram import HistogramCounts
from tokenspeed_jax.engine.memory import MemoryReport
from tokenspeed_jax.engine.outputs import RequestDelta
from tokenspeed_jax.engine.prompt_logprobs import PromptLogprobs
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.sampling_params import SamplingParams
from tokenspeed_jax.engine.start_report import StartReport
from tokenspeed_jax.engine.structured_outputs import StructuredOutputsParams
from tokenspeed_jax.errors import EngineClosed, EngineStateError, InvalidRequest, ProfilerError
from tokenspeed_jax.recipes.report import GroupCapacity
from tokenspeed_jax.text.piece_decoder import BYTE_OF_CHARACTER
from tokenspeed_jax.text.tokenizer import Tokenizer, TokenizerFiles

BOS, EOS = 0, 1
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}[{{ m.role }}]{{ m.content }}{{ mark }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer(
    *, template: str | None = TEMPLATE, special: Sequence[str] = (), added: Sequence[str] = ()
) -> Tokenizer:
    """Ids 0 and 1 are special, then one id per byte, merged pieces, further special and other added tokens."""
    vocabulary = {"<bos>": BOS, "<eos>": EOS}
    vocabulary |= {character: 2 + byte for character, byte in BYTE_OF_CHARACTER.items()}
    merges = [("H", "e"), ("l", "l"), ("He", "ll"), ("Hell", "o"), ("Ġ", "w")]
    vocabulary |= {left + right: 258 + index for index, (left, right) in enumerate(merges)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False) for token in added])
    settings = {"bos_token": "<bos>", "eos_token": "<eos>"} | ({"chat_template": template} if template else {})
    return Tokenizer(TokenizerFiles(tokenizer_json=backend.to_str(), tokenizer_config=settings))


STEP_SECONDS = HistogramCounts((0.001, 1.0), (0, 2, 1), 1.5)
STEP_TOKENS = HistogramCounts((1, 8), (1, 2, 0), 12.0)


def prompt_logprobs_of(prompt: list[int], count: int) -> PromptLogprobs:
    """Place i of a prompt has log-probability -i and rank 3; its alternatives are the ids 40, 41, ..."""
    rows = len(prompt) - 1
    return PromptLogprobs(
        prompt,
        logprobs=-np.arange(1, rows + 1, dtype=np.float32),
        ranks=np.full(rows, 3, np.int32),
        top_ids=np.tile(np.arange(40, 40 + count, dtype=np.int32), (rows, 1)),
        top_logprobs=np.tile(-np.arange(1, count + 1, dtype=np.float32) / 4, (rows, 1)),
    )


@dataclass(frozen=True)
class FakeStats:
    running: int
    waiting: int
    kv_usage: float
    prompt_tokens: int
    generation_tokens: int
    cached_tokens: int
    prefix_query_tokens: int
    finished: dict[str, int]
    checkpoint_lost_tokens: int = 5
    retractions: int = 2
    compilations_after_warmup: int = 0
    arena_bytes: int = 4096
    step_seconds_total: float = 1.5
    steps: int = 3
    live_tokens: int = 77
    parents_in_use: int = 4
    num_parents: int = 16
    kv_events_dropped: int = 0
    group_hit_tokens: dict[str, int] = field(default_factory=lambda: {"layers.full": 6, "layers.window": 2})
    compile_seconds: float = 20.5
    step_seconds: HistogramCounts = STEP_SECONDS
    step_tokens: HistogramCounts = STEP_TOKENS
    overlapped_steps: int = 6
    late_steps: int = 2
    jump_forward_tokens: int = 7
    overlap_efficiency: float = 0.75
    weight_version: int = 4


GROUP = GroupCapacity(
    group_id="layers.full",
    unit="tokens",
    block_bytes=1024,
    bytes_per_token=64.0,
    cache_blocks_per_lcm_block=1,
    padding_bytes_per_lcm_block=0,
    capacity=256,
    supported_requests=None,
    dead_bytes=0,
    binding_utilization=1.0,
)
REPORT = MemoryReport(
    weights=1000,
    arena=4096,
    device_state=10,
    workspace=20,
    free=None,
    num_parents=16,
    parent_bytes=256,
    prefix_granularity=16,
    token_capacity=256,
    groups=(GROUP,),
)
PARENT_USES = np.array([1] * 4 + [-1] * 2 + [0] * 10, np.int32)


@dataclass(eq=False)
class FakeSample:
    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    script: list[int]
    max_tokens: int
    on_delta: Callable[[RequestDelta], None]
    token_ids: list[int] = field(default_factory=list)
    sent: int = 0
    has_told_prompt: bool = False
    scheduled_at: float = field(default_factory=time.monotonic)


def experts_of(prompt: Sequence[int]) -> np.ndarray:
    """Two experts of each token in three layers, of whatever the prompt says."""
    return (np.array(prompt, np.int32)[:, None, None] + np.arange(6, dtype=np.int32).reshape(3, 2)) % 8


class FakeEngine:
    """Every sample follows `script(prompt, sample_index)`, one token per round of all running samples.

    Attributes:
        allowed_tokens: rounds stop producing for samples that have this many tokens, until it is raised.
        compiled: constraints given to `compile_grammar`.
        aborted: request ids given to `abort`.
        cache_is_free: what `flush_cache` returns.
        profiles: what was asked of the profiler, in order.
        num_queued_requests: what it says of its queue; it has none, everything runs at once.
        weight_version: what its deltas carry.
        looks: the answers to `activity`, which are given at once unless the engine `is_stuck`.
    """

    config = EngineConfig(model="/models/fake", max_num_seqs=8)
    memory_report = REPORT
    start_report = StartReport(
        loading=1.5, planning=0.5, compiling=20.0, programs=12, from_cache=3, options={"dtype": "bfloat16"}
    )
    model_name = "fake/model"
    max_model_len = 256
    cached_tokens = 3
    lacks_weights = False

    def __init__(
        self,
        reply: str = "Hello wörld €!",
        *,
        template: str | None = TEMPLATE,
        special: Sequence[str] = (),
        added: Sequence[str] = (),
    ) -> None:
        self.tokenizer = byte_tokenizer(template=template, special=special, added=added)
        self.reply_ids = self.tokenizer.encode(reply)
        self.script: Callable[[list[int], int], list[int]] = lambda _prompt, _index: [*self.reply_ids, EOS]
        self.allowed_tokens = 10**9
        self.is_healthy = True
        self.is_sleeping = False
        self.num_queued_requests = 0
        self.submitted: list[tuple[list[int], SamplingParams]] = []
        self.options: list[RequestOptions] = []
        self.compiled: list[StructuredOutputsParams] = []
        self.aborted: list[str] = []
        self.cache_is_free = True
        self.profiles: list[str] = []
        self.looks: list[Future[Activity]] = []
        self.is_stuck = False
        self.weight_version = 7
        self._finished: Counter[str] = Counter()
        self._samples: list[FakeSample] = []
        self._tokens = 0
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, prompt_token_ids, params, *, request_id=None, priority=0, cache_salt=None, on_delta):
        if not self.is_healthy:
            raise EngineClosed("dead")
        if self.lacks_weights:
            raise EngineStateError("the engine has no weights")
        options = RequestOptions(priority, cache_salt)
        if not prompt_token_ids:
            raise InvalidRequest("the prompt is empty", parameter="prompt_token_ids")
        for token in prompt_token_ids:
            if not 0 <= token < self.tokenizer.vocab_size:
                raise InvalidRequest(f"token id {token} is out of vocabulary", parameter="prompt_token_ids")
        room = self.max_model_len - len(prompt_token_ids)
        if room < 1:
            raise InvalidRequest(f"the prompt fills {self.max_model_len} tokens", parameter="prompt_token_ids")
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise InvalidRequest(f"max_tokens {params.max_tokens} is over {room}", parameter="max_tokens")
        with self._wake:
            self.submitted.append((prompt_token_ids, params))
            self.options.append(options)
            for index in range(params.n):
                script = self.script(prompt_token_ids, index)
                self._samples.append(
                    FakeSample(request_id, index, prompt_token_ids, params, script, max_tokens, on_delta)
                )
            self._wake.notify()
        return request_id

    def compile_grammar(self, structured_outputs):
        self.compiled.append(structured_outputs)

    def abort(self, request_id):
        with self._wake:
            self.aborted.append(request_id)
        self._end(request_id, "abort")

    def give_up(self, reason: str) -> None:
        """Ends what runs as `Engine` does when a grammar cannot go on."""
        for request_id in {sample.request_id for sample in self._samples}:
            self._end(request_id, "abort", reason)

    def _end(self, request_id: str, reason: str, stop_reason: str | None = None) -> None:
        with self._wake:
            ended = [sample for sample in self._samples if sample.request_id == request_id]
            self._samples = [sample for sample in self._samples if sample.request_id != request_id]
        for sample in ended:
            self._deliver(sample, [], "", reason, stop_reason)

    def flush_cache(self) -> bool:
        if not self.is_healthy:
            raise EngineClosed("dead")
        return self.cache_is_free

    def start_profile(self, folder: str) -> None:
        if self.profiles[-1:] == [folder]:
            raise ProfilerError("a trace runs already")
        self.profiles.append(folder)

    def stop_profile(self) -> None:
        if self.profiles[-1:] in ([], ["stop"]):
            raise ProfilerError("no trace runs")
        self.profiles.append("stop")

    def allow(self, tokens: int) -> None:
        """Lets every sample reach this many tokens."""
        with self._wake:
            self.allowed_tokens = tokens
            self._wake.notify()

    def die(self, *, silently: bool = False) -> None:
        """Fails; ends what runs with "error" unless silent."""
        self.is_healthy = False
        if not silently:
            for request_id in {sample.request_id for sample in self._samples}:
                self._end(request_id, "error")

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def stats(self) -> FakeStats:
        prompt_tokens = sum(len(prompt) for prompt, _ in self.submitted)
        return FakeStats(
            running=len(self._samples),
            waiting=0,
            kv_usage=0.25,
            prompt_tokens=prompt_tokens,
            generation_tokens=self._tokens,
            cached_tokens=self.cached_tokens * len(self.submitted),
            prefix_query_tokens=prompt_tokens,
            finished=dict(self._finished),
        )

    def activity(self, max_requests: int) -> Future[Activity]:
        if not self.is_healthy:
            raise EngineClosed("dead")
        self.looks.append(Future())
        if not self.is_stuck:
            requests = [
                LiveRequest("decode", 2.5, len(sample.prompt), self.cached_tokens, len(sample.token_ids), 1)
                for sample in self._samples[:max_requests]
            ]
            self.looks[-1].set_result(Activity(tuple(requests), PARENT_USES))
        return self.looks[-1]

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closing and not self._ready():
                    self._wake.wait()
                if self._closing:
                    return
                ready = self._ready()
            for sample in ready:
                self._step(sample)

    def _ready(self) -> list[FakeSample]:
        return [sample for sample in self._samples if len(sample.token_ids) < self.allowed_tokens]

    def _step(self, sample: FakeSample) -> None:
        if sample.max_tokens == 0:
            with self._wake:
                self._samples.remove(sample)
            self._deliver(sample, [], "", "length", None)
            return
        token = sample.script[len(sample.token_ids) % len(sample.script)]
        sample.token_ids.append(token)
        self._tokens += 1
        reason, stop_reason = None, None
        shown = sample.token_ids
        if token in sample.params.stop_token_ids:
            reason, stop_reason, shown = "stop", token, shown[:-1]
        elif token == EOS and not sample.params.ignore_eos:
            reason, shown = "stop", shown[:-1]
        elif len(sample.token_ids) >= sample.max_tokens:
            reason = "length"
        text = self.tokenizer.decode(shown, skip_special_tokens=sample.params.skip_special_tokens)
        for stop in sample.params.stop:
            if stop in text:
                text, reason, stop_reason = text[: text.index(stop)], "stop", stop
        if reason is None:
            text = text.rstrip("\ufffd")
        fresh, sample.sent = text[sample.sent :], max(len(text), sample.sent)
        if reason is not None:
            with self._wake:
                if sample not in self._samples:
                    return
                self._samples.remove(sample)
        self._deliver(sample, [token], fresh, reason, stop_reason)

    def _deliver(self, sample, token_ids, text, reason, stop_reason) -> None:
        if reason is not None:
            self._finished[reason] += 1
        params = sample.params
        tells_prompt = params.prompt_logprobs is not None and not sample.has_told_prompt
        sample.has_told_prompt = True
        tops = [{token: -0.5, (token + 1) % 263: -math.inf} for token in token_ids]
        tops = [dict(list(top.items())[: params.top_logprobs]) for top in tops]
        sample.on_delta(
            RequestDelta(
                request_id=sample.request_id,
                sample_index=sample.index,
                prompt_token_ids=sample.prompt,
                cached_tokens=self.cached_tokens,
                token_ids=token_ids,
                text=text,
                logprobs=[-0.5] * len(token_ids) if params.logprobs else None,
                sampling_logprobs=[-0.25] * len(token_ids) if params.logprobs else None,
                top_logprobs=tops if params.top_logprobs else None,
                finish_reason=reason,
                stop_reason=stop_reason,
                prompt_logprobs=prompt_logprobs_of(sample.prompt, params.prompt_logprobs or 0)
                if tells_prompt
                else None,
                scheduled_at=sample.scheduled_at,
                weight_version=self.weight_version,
                routed_experts=experts_of(sample.prompt) if reason and params.return_routed_experts else None,
            )
        )
