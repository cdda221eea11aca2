"""What a jump tells the scheduler, and what of it an abort delivers; in an engine: test_structured_outputs.py."""

from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed_jax import SamplingParams
from tokenspeed_jax.engine.config import EngineConfig
from tokenspeed_jax.engine.jump_forward import JumpForward
from tokenspeed_jax.engine.request_options import RequestOptions
from tokenspeed_jax.engine.requests import RequestState, SampleState
from tokenspeed_jax.engine.stop import StopChecker
from tokenspeed_jax.errors import ConfigError

FORCED = [65, 66, 67, 68]


class Letters:
    def push(self, ids: list[int], /) -> str:
        return "".join(map(chr, ids))

    def flush(self) -> str:
        return ""


def sample_of(params: SamplingParams, forced: list[int]) -> SampleState:
    request = RequestState("r", [5, 6], params, RequestOptions(), params.max_tokens or 0, on_delta=lambda _: None)
    stop = StopChecker(params, [1], params.max_tokens or 0, Letters())
    matcher: Any = SimpleNamespace(take_forced=lambda: forced)
    sample = SampleState("r.0", request, 0, 7, stop, matcher)
    sample.num_dispatched = 1  # by the row that jumps
    request.samples.append(sample)
    return sample


def take(*samples: SampleState) -> tuple[list[int], list[SimpleNamespace], list[int]]:
    """The rows that draw, what the scheduler is told, and the slots whose history is told anew."""
    told: list[Any] = []
    slots: list[int] = []
    scheduler: Any = SimpleNamespace(advance=told.append)
    programs: Any = SimpleNamespace(begin_request=lambda slot, *_: slots.append(slot))
    stats: Any = SimpleNamespace(observe_jump=lambda _: None)
    built: Any = SimpleNamespace(constrained=list(range(len(samples))), samples=samples, slots=[4, 9])
    return JumpForward(scheduler, programs, stats, [1]).take(built, 3), told, slots


def test_a_jump_counts_as_dispatched_and_is_delivered_by_an_abort() -> None:
    jumping = sample_of(SamplingParams(max_tokens=9, stop=["E"], presence_penalty=1.0), FORCED)
    drawing = sample_of(SamplingParams(max_tokens=9), [])
    rows, told, slots = take(jumping, drawing)
    assert (rows, len(told), slots) == ([1], 1, [4])
    assert (jumping.num_dispatched, jumping.token_ids) == (4, FORCED)
    assert (drawing.num_dispatched, drawing.token_ids, drawing.jump) == (1, [], None)
    last = jumping.last_delta()
    assert (last.token_ids, last.text, last.finish_reason) == (FORCED, "ABCD", "abort")


@pytest.mark.parametrize(
    ("params", "kept", "text", "reason"),
    [
        (SamplingParams(max_tokens=9, stop=["C"]), 3, "AB", "stop"),
        (SamplingParams(max_tokens=9, stop_token_ids=[66]), 2, "A", "stop"),
        (SamplingParams(max_tokens=3), 3, "ABC", "length"),
        (SamplingParams(max_tokens=4), 4, "ABCD", "length"),
    ],
)
def test_a_jump_ends_where_the_sample_does(params: SamplingParams, kept: int, text: str, reason: str) -> None:
    sample = sample_of(params, FORCED)
    assert take(sample)[0] == []
    assert sample.jump is not None
    assert sample.jump.token_ids == sample.token_ids == FORCED[:kept]
    assert (sample.jump.update.text_delta, sample.jump.update.finish_reason) == (text, reason)


def test_samples_with_log_probabilities_and_those_that_only_score_do_not_jump() -> None:
    scored = sample_of(SamplingParams(max_tokens=9, logprobs=True), FORCED)
    silent = sample_of(SamplingParams(max_tokens=0, prompt_logprobs=0), FORCED)
    rows, told, _ = take(scored, silent)
    assert (rows, told) == ([0, 1], [])


def test_an_option_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="disable_jump_forward has no effect with grammar_backend none"):
        EngineConfig(model="m", grammar_backend="none", disable_jump_forward=True)
