"""Requests that share prefixes, run without and with each other's cache, and how the scheduler cut them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenspeed_jax import Engine, RequestOutput, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=True)


@dataclass
class WatchedScheduler:
    """An engine's scheduler, noting the chunks of each request in the order in which requests came.

    Attributes:
        chunks: request id -> (tokens before, tokens of the chunk) of each prefill chunk.
    """

    scheduler: object
    chunks: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def next_execution_plan(self) -> object:
        plan = self.scheduler.next_execution_plan()  # pyright: ignore[reportAttributeAccessIssue]
        batch = plan.forward[0]
        lengths = batch.input_lengths
        for row, before in enumerate(batch.extend_prefix_lens):
            self.chunks.setdefault(batch.request_ids[row], []).append((before, lengths[row]))
        return plan

    def __getattr__(self, name: str) -> object:
        return getattr(self.scheduler, name)


@dataclass(frozen=True)
class Run:
    """One request's outcome.

    Attributes:
        granted: tokens that the scheduler took from the cache.
        ends: where its prefill chunks ended.
    """

    output: RequestOutput
    granted: int
    ends: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        return self.output.samples[0].token_ids

    @property
    def logprobs(self) -> list[float]:
        values = self.output.samples[0].logprobs
        assert values is not None
        return values


def run_one_after_another(engine: Engine, prompts: Sequence[list[int]]) -> list[Run]:
    """Greedy outputs, each request after the one before."""
    loop = engine._loop  # pyright: ignore[reportPrivateUsage]
    original = loop._scheduler  # pyright: ignore[reportPrivateUsage]
    watched = WatchedScheduler(original)
    loop._scheduler = watched  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    try:
        outputs = [engine.generate(prompt, GREEDY)[0] for prompt in prompts]
    finally:
        loop._scheduler = original  # pyright: ignore[reportPrivateUsage]
    return [
        Run(output, chunks[0][0], tuple(before + size for before, size in chunks))
        for output, chunks in zip(outputs, watched.chunks.values(), strict=True)
    ]


def forget_prefixes(engine: Engine) -> None:
    """Empties the prefix cache of an idle engine."""
    loop = engine._loop  # pyright: ignore[reportPrivateUsage]
    for _ in range(100):
        done, cleared = threading.Event(), []

        def clear(done: threading.Event = done, cleared: list[bool] = cleared) -> None:
            loop._scheduler.next_execution_plan()  # pyright: ignore[reportPrivateUsage]
            cleared.append(loop._scheduler.clear_cache())  # pyright: ignore[reportPrivateUsage]
            done.set()

        loop.call(clear)
        assert done.wait(30)
        if cleared[0]:
            return
    raise AssertionError("the engine is not idle")


@dataclass(frozen=True)
class Triple:
    """A prompt and two that share its first `shared` tokens, and nothing else with it or each other."""

    first: list[int]
    second: list[int]
    third: list[int]
    shared: int


def draw_triples(rng: np.random.Generator, count: int, boundary: int, chunk: int) -> list[Triple]:
    """Prompts whose lengths, shared parts and remainders lie around multiples of `boundary` tokens.

    The first triple shares `chunk` tokens and less than a `boundary` more.
    """
    near = [multiple * boundary + by for multiple in (1, 2, 4, 5, 8) for by in (-1, 0, 1, 3)]
    triples = []
    for index in range(count):
        length = int(rng.choice(near)) if index else chunk + int(rng.integers(2, boundary))
        # In turn: all but the last tokens, anything around a boundary, and anything.
        shared = (
            length - int(rng.integers(0, 3)),
            min(int(rng.choice(near)), length),
            int(rng.integers(1, length + 1)),
        )[index % 3]
        first = rng.integers(3, 500, length).tolist()
        second, third = (
            # A token of its own in front of the remainder keeps the two apart at `shared`.
            [*first[:shared], own, *rng.integers(3, 500, int(rng.integers(0, boundary + 4))).tolist()]
            for own in (500, 501)
        )
        if length > shared and first[shared] in (500, 501):
            raise AssertionError("prompts use tokens below 500")
        triples.append(Triple(first, second, third, shared))
    return triples
