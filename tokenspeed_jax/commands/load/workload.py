"""What is asked of the server: prompts, lengths and times, the same for the same seed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int

from tokenspeed_jax.commands.load.config import BenchConfig
from tokenspeed_jax.commands.load.traces import MOONCAKE_BLOCK, TraceRow, read_trace

DEFAULT_PROMPTS = 1000
# Kinds of random streams: what one draws must not shift what another does.
_LENGTHS, _TIMES, _PROMPT, _PREFIX, _BLOCK = range(5)

type Tokens = Int[np.ndarray, " tokens"]


@dataclass(frozen=True)
class LoadRequest:
    """One request; its prompt is made when it is needed, for those of a long trace would fill the memory.

    Attributes:
        seconds: when it is sent, since the start.
        input_length: tokens of the prompt.
        output_length: tokens to generate.
    """

    seconds: float
    input_length: int
    output_length: int
    make_prompt: Callable[[], list[int]]


class Vocabulary:
    """The token ids that prompts are drawn from."""

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._ids = np.asarray(token_ids, np.int64)
        self._seed = seed

    def tokens(self, count: int, *stream: int) -> Tokens:
        """`count` tokens, always the same ones for the same stream, whose beginning does not depend on `count`."""
        generator = np.random.default_rng([self._seed, *stream])
        return self._ids[generator.integers(0, len(self._ids), count)]


def workload(config: BenchConfig, vocabulary: Vocabulary) -> list[LoadRequest]:
    """The requests in the order of their times.

    Raises:
        TraceError: the trace cannot be read.
    """
    if config.trace is None:
        requests = _random_requests(config, vocabulary)
    else:
        rows = read_trace(config.trace, config.num_prompts)
        requests = [_of_trace(row, index, vocabulary) for index, row in enumerate(rows)]
    if math.isinf(config.request_rate):
        return requests
    gaps = _generator(config, _TIMES).exponential(1 / config.request_rate, len(requests))
    times = np.cumsum(gaps) - gaps[0]
    return [replace(request, seconds=float(time)) for request, time in zip(requests, times, strict=True)]


def _generator(config: BenchConfig, stream: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, stream])


def _random_requests(config: BenchConfig, vocabulary: Vocabulary) -> list[LoadRequest]:
    generator = _generator(config, _LENGTHS)
    count = config.num_prompts or DEFAULT_PROMPTS

    def lengths(mean: int) -> list[int]:
        low, high = mean * (1 - config.random_range_ratio), mean * (1 + config.random_range_ratio)
        return generator.integers(max(1, math.ceil(low)), math.floor(high) + 1, count).tolist()

    inputs, outputs = lengths(config.random_input_len), lengths(config.random_output_len)
    prefixes = generator.integers(0, config.random_num_prefixes, count).tolist()

    def request(index: int) -> LoadRequest:
        def prompt() -> list[int]:
            shared = vocabulary.tokens(config.random_prefix_len, _PREFIX, prefixes[index])
            return [*shared.tolist(), *vocabulary.tokens(inputs[index], _PROMPT, index).tolist()]

        return LoadRequest(0.0, config.random_prefix_len + inputs[index], outputs[index], prompt)

    return [request(index) for index in range(count)]


def _of_trace(row: TraceRow, index: int, vocabulary: Vocabulary) -> LoadRequest:
    def prompt() -> list[int]:
        if row.block_ids is None:
            return vocabulary.tokens(row.input_length, _PROMPT, index).tolist()
        # The stream of an id is the same in every request, so that equal ids are equal tokens.
        blocks = [vocabulary.tokens(MOONCAKE_BLOCK, _BLOCK, block) for block in row.block_ids]
        return np.concatenate(blocks)[: row.input_length].tolist()

    return LoadRequest(row.seconds, row.input_length, row.output_length, prompt)
