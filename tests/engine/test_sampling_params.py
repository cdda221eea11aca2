"""Every value that sampling cannot serve is refused by name, before anything runs."""

import math
from typing import Any

import numpy as np
import pytest

from tokenspeed_jax.engine.sampling_params import MAX_LOGIT_BIAS, MAX_N, MAX_STOP, SamplingParams
from tokenspeed_jax.engine.sampling_state import (
    MAX_BLOCKED,
    bias_arrays,
    blocked_ids,
    init_sampling_state,
    padded_ids,
    sampling_state_bytes,
)
from tokenspeed_jax.errors import InvalidRequest

NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", None, True]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("n", [0, -1, MAX_N + 1, 1.0, True, "2"]),
        ("max_tokens", [0, -5, 1.5, "16", True, 2**31]),
        ("min_tokens", [-1, 0.5, True, 17]),
        ("temperature", [-0.1, 101.0, *NOT_NUMBERS]),
        ("top_k", [-1, 1.0, True, 2**31]),
        ("top_p", [0.0, -0.5, 1.0001, *NOT_NUMBERS]),
        ("min_p", [-0.1, 1.1, *NOT_NUMBERS]),
        ("presence_penalty", [-2.1, 2.1, *NOT_NUMBERS]),
        ("frequency_penalty", [-2.1, 2.1, *NOT_NUMBERS]),
        ("repetition_penalty", [0.0, -1.0, 100.1, *NOT_NUMBERS]),
        ("logit_bias", [[(1, 2.0)], {-1: 0.0}, {"1": 0.0}, {1: 101.0}, {1: math.nan}, {1: True}, {2**31: 0.0}]),
        ("seed", [-1, 2**63, 1.0, True]),
        ("stop", ["", [""], [1], 5, ["x"] * (MAX_STOP + 1)]),
        ("stop_token_ids", [[-1], ["1"], [True], "12", 3]),
        ("ignore_eos", [1, "yes", None]),
        ("logprobs", [1, None]),
        ("top_logprobs", [-1, 21, True, 1.0]),
        ("skip_special_tokens", [0, None]),
    ],
)
def test_a_bad_value_is_refused_and_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=name) as refusal:
            SamplingParams(**{name: value})
        assert refusal.value.parameter == name


def test_too_many_biases_are_refused() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 0.0))
    with pytest.raises(InvalidRequest, match=f"at most {MAX_LOGIT_BIAS}"):
        SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0))


def test_top_logprobs_without_logprobs_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="needs logprobs"):
        SamplingParams(top_logprobs=3)
    assert SamplingParams(logprobs=True, top_logprobs=20).top_logprobs == 20


def test_min_tokens_above_max_tokens_are_refused_but_not_without_a_maximum() -> None:
    with pytest.raises(InvalidRequest, match="must not exceed max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_the_caller_cannot_change_parameters_through_what_it_passed() -> None:
    stop, ids, bias = ["a"], [1], {1: 2.0}
    params = SamplingParams(stop=stop, stop_token_ids=ids, logit_bias=bias)
    stop.append("b"), ids.append(2), bias.update({3: 4.0})
    assert (params.stop, params.stop_token_ids, dict(params.logit_bias)) == (("a",), (1,), {1: 2.0})
    assert SamplingParams(stop="one").stop == ("one",)


@pytest.mark.parametrize(
    "change",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {0: 1.0}},
        {"min_tokens": 1},
    ],
)
def test_what_needs_the_device_state_says_so(change: dict[str, Any]) -> None:
    assert SamplingParams(**change).uses_history
    assert not SamplingParams(temperature=0.0, **change).is_plain_greedy
    assert SamplingParams(temperature=0.0).is_plain_greedy
    assert not SamplingParams(temperature=0.0).uses_history
    assert not SamplingParams(temperature=0.0, logprobs=True, top_logprobs=1).is_plain_greedy


def test_blocked_ids_are_what_would_end_the_sample() -> None:
    def blocked(**kwargs: Any) -> list[int]:
        ids = blocked_ids(SamplingParams(**kwargs), (2, 9))
        assert ids.shape == (MAX_BLOCKED,)
        return ids[ids >= 0].tolist()

    assert blocked(min_tokens=1, stop_token_ids=[9, 4]) == [2, 4, 9]
    assert blocked(min_tokens=1, stop_token_ids=[4], ignore_eos=True) == [4]
    assert blocked(stop_token_ids=[4]) == []


def test_too_many_blocked_ids_are_refused_only_with_min_tokens() -> None:
    stops = list(range(10, 10 + MAX_BLOCKED))
    assert (blocked_ids(SamplingParams(stop_token_ids=stops), (2,)) == -1).all()
    with pytest.raises(InvalidRequest, match=f"at most {MAX_BLOCKED}.*got {MAX_BLOCKED + 1}"):
        blocked_ids(SamplingParams(stop_token_ids=stops, min_tokens=1), (2,))


def test_bias_arrays_pair_ids_with_values() -> None:
    ids, values = bias_arrays(SamplingParams(logit_bias={7: 1.5, 3: -2.0}))
    assert (ids.shape, values.shape, values.dtype) == ((MAX_LOGIT_BIAS,), (MAX_LOGIT_BIAS,), np.float32)
    assert (ids[:2].tolist(), values[:2].tolist()) == ([7, 3], [1.5, -2.0])
    assert (ids[2:] == -1).all()


def test_padded_ids_never_cut() -> None:
    assert padded_ids((4, 5), 3).tolist() == [4, 5, -1]
    with pytest.raises(ValueError, match="do not fit"):
        padded_ids((1, 2, 3), 2)


def test_state_bytes_are_those_of_the_arrays() -> None:
    state = init_sampling_state(3, 50)
    arrays = (state.output_counts, state.token_flags, state.logit_bias)
    assert all(array.shape == (4, 50) for array in arrays)
    assert sampling_state_bytes(3, 50) == sum(array.nbytes for array in arrays)
