"""What `bench` asks, and what it says of the answers, checked without a server."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed_jax.commands.load.config import BenchConfig
from tokenspeed_jax.commands.load.measurement import Record, Results, Spread
from tokenspeed_jax.commands.load.traces import MOONCAKE_BLOCK, TraceError, TraceRow, read_trace
from tokenspeed_jax.commands.load.workload import Vocabulary, workload

IDS = range(1000, 2000)


@settings(max_examples=25, deadline=None)
@given(
    mean=st.integers(1, 200), output=st.integers(1, 50), ratio=st.floats(0, 0.99), prefix=st.integers(0, 40),
    prefixes=st.integers(1, 3), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_random_prompts_have_the_lengths_and_prefixes_asked_for(
    mean: int, output: int, ratio: float, prefix: int, prefixes: int, seed: int
) -> None:
    config = BenchConfig(
        random_input_len=mean, random_output_len=output, random_range_ratio=ratio, random_prefix_len=prefix,
        random_num_prefixes=prefixes if prefix else 1, num_prompts=20, seed=seed,
    )  # fmt: skip
    requests = workload(config, Vocabulary(IDS, seed))
    prompts = [request.make_prompt() for request in requests]
    assert [len(prompt) for prompt in prompts] == [request.input_length for request in requests]
    assert all(mean * (1 - ratio) <= len(prompt) - prefix <= mean * (1 + ratio) for prompt in prompts)
    assert all(1 <= request.output_length <= output * (1 + ratio) for request in requests)
    assert all(token in IDS for prompt in prompts for token in prompt)
    assert len({tuple(prompt[:prefix]) for prompt in prompts}) <= prefixes
    again = workload(config, Vocabulary(IDS, seed))
    assert [request.make_prompt() for request in again] == prompts


def test_request_rate_is_the_rate_of_a_poisson_process() -> None:
    requests = workload(BenchConfig(num_prompts=4000, request_rate=50.0), Vocabulary(IDS, 0))
    gaps = np.diff([request.seconds for request in requests])
    assert requests[0].seconds == 0
    # Of an exponential distribution mean and deviation are equal; 4,000 gaps tell them to a few percent.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.1)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)


@settings(max_examples=20, deadline=None)
@given(
    common=st.lists(st.integers(0, 99), max_size=3), tails=st.tuples(st.integers(100, 199), st.integers(200, 299)),
    lengths=st.tuples(st.integers(1, MOONCAKE_BLOCK), st.integers(1, MOONCAKE_BLOCK)),
)  # fmt: skip
def test_prompts_of_a_trace_agree_for_as_long_as_their_ids_do(
    tmp_path_factory: pytest.TempPathFactory, common: list[int], tails: tuple[int, int], lengths: tuple[int, int]
) -> None:
    file = tmp_path_factory.getbasetemp() / "trace.jsonl"
    shared = len(common) * MOONCAKE_BLOCK
    rows = [
        {"timestamp": 5, "input_length": shared + length, "output_length": 1, "hash_ids": [*common, tail]}
        for tail, length in zip(tails, lengths, strict=True)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    first, second = (request.make_prompt() for request in workload(BenchConfig(trace=str(file)), Vocabulary(IDS, 1)))
    assert (len(first), len(second)) == (shared + lengths[0], shared + lengths[1])
    assert first[:shared] == second[:shared]
    longest = min(lengths)
    if longest > 10:  # ten equal tokens of a thousand are no chance
        assert first[shared : shared + longest] != second[shared : shared + longest]


def test_traces_of_both_forms(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "a.csv", tmp_path / "m.jsonl"
    csv.write_text("seconds,context_tokens,generated_tokens\n3.5,374,44\n4.25,396,109\n9,1,1\n")
    assert read_trace(str(csv), 2) == [TraceRow(0.0, 374, 44, None), TraceRow(0.75, 396, 109, None)]
    jsonl.write_text(
        '{"timestamp":2000,"input_length":513,"output_length":5,"hash_ids":[0,7]}\n\n'
        '{"timestamp":500,"input_length":512,"output_length":6,"hash_ids":[9]}\n'
    )
    assert read_trace(str(jsonl), None) == [TraceRow(0.0, 512, 6, (9,)), TraceRow(1.5, 513, 5, (0, 7))]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.txt", "", ["neither"]),
        ("t.csv", "", ["no requests"]),
        ("t.csv", "seconds,context_tokens\n1,2\n", ["line 2", "generated_tokens"]),
        ("t.csv", "seconds,context_tokens,generated_tokens\n1,2\n", ["line 2"]),
        ("t.csv", "seconds,context_tokens,generated_tokens\nnan,2,3\n", ["line 2", "nan"]),
        ("t.csv", "seconds,context_tokens,generated_tokens\n1,0,3\n", ["line 2", "0 tokens"]),
        ("t.jsonl", "{}\n", ["line 1", "timestamp"]),
        ("t.jsonl", "\n[1]\n", ["line 2"]),
        ("t.jsonl", '{"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[1]}\n', ["line 1", "1 hash_ids"]),
        ("t.jsonl", '{"timestamp":0,"input_length":1e400,"output_length":1,"hash_ids":[1]}\n', ["line 1"]),
        ("t.jsonl", "\xff", ["UTF-8"]),
    ],
)
def test_a_malformed_trace_names_file_and_line(tmp_path: Path, name: str, text: str, says: list[str]) -> None:
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(TraceError) as caught:
        read_trace(str(tmp_path / name), None)
    assert all(part in str(caught.value) for part in [name, *says]), caught.value


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=200))
def test_spreads_are_those_of_the_statistics_module(values: list[float]) -> None:
    spread = Spread.of(values)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert spread is not None
    expected = [1000 * number for number in (statistics.fmean(values), cuts[49], cuts[89], cuts[98])]
    assert [spread.mean, spread.p50, spread.p90, spread.p99] == pytest.approx(expected)


def test_results_of_records_that_can_be_added_up_by_hand() -> None:
    records = [
        Record(0.0, [0.1, 0.2, 0.4], 0.5, prompt_tokens=10, output_tokens=4, cached_tokens=5),
        Record(0.5, [0.3], 0.3, prompt_tokens=30, output_tokens=1, cached_tokens=None),
        Record(0.6, [0.1], error="lost"),
    ]
    results = Results.of(records, 2.0, skipped=1)
    assert (results.completed, results.failed, results.errors) == (2, 1, ("lost",))
    assert (results.prompt_tokens, results.output_tokens) == (40, 5)
    assert results.hit_rate == 5 / 40
    means = [spread and pytest.approx(spread.mean) for spread in (results.ttft, results.itl, results.tpot, results.e2e)]
    assert means == [200.0, 150.0, 100.0, 400.0]
    plain = results.as_json()
    assert (plain["request_throughput"], plain["input_throughput"], plain["output_throughput"]) == (1.0, 20.0, 2.5)
    text = "\n".join(results.lines())
    assert "2 completed, 1 failed, 1 not sent" in text
    assert "failed: lost" in text


def test_results_of_nothing_are_written_all_the_same() -> None:
    results = Results.of([Record(0.0, error="lost")], 0.0, skipped=0)
    assert results.hit_rate is None
    assert "not reported" in "\n".join(results.lines())
