"""`tokenspeed-jax bench`: load on a running server, and what it did under it."""

import asyncio
import json
import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenspeed_jax.commands.load.client import LoadClient
from tokenspeed_jax.commands.load.config import BenchConfig
from tokenspeed_jax.commands.load.endpoint import Endpoint, EndpointError
from tokenspeed_jax.commands.load.measurement import Record, Results
from tokenspeed_jax.commands.load.traces import TraceError
from tokenspeed_jax.commands.load.workload import LoadRequest, Vocabulary, workload
from tokenspeed_jax.options import CommandLine, Configuration, ParsedOptions

_INTERRUPTED = 130
_OF_RANDOM_PROMPTS = (
    "random_input_len",
    "random_output_len",
    "random_range_ratio",
    "random_prefix_len",
    "random_num_prefixes",
)


def run(argv: Sequence[str], prog: str) -> int:
    """Runs the load and prints the results.

    Returns:
        The exit code: 0; 1 when a request failed or the server cannot be used; 2 for an option that is wrong; 130
        after an interrupt.
    """
    options = CommandLine(
        prog,
        "Put load on a running server's OpenAI endpoints: random prompts, with or without shared prefixes, or a trace.",
        Configuration(BenchConfig),
    ).parse(argv)
    config = options.of(BenchConfig)
    if config.trace is not None:
        for name in _OF_RANDOM_PROMPTS:
            if name in options.given:
                options.refuse("has no effect with --trace", name)
    _allow_many_connections()
    try:
        results, records = asyncio.run(_measure(config, options))
    except TraceError as error:
        options.refuse(str(error), "trace")
    except EndpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    print("\n".join(results.lines()))
    if config.output_json is not None:
        _write(config, results, records)
    return 1 if results.failed or not results.completed else 0


async def _measure(config: BenchConfig, options: ParsedOptions) -> tuple[Results, list[Record]]:
    card = await _model_card(config)
    client = LoadClient(config, config.model or card["id"])
    ids = range(config.vocab_size) if config.vocab_size else await client.word_ids()
    requests = workload(config, Vocabulary(ids, config.seed))
    fitting = _fitting(requests, card.get("max_model_len"))
    if len(fitting) < len(requests) and config.trace is None:
        longest = max(request.input_length + request.output_length for request in requests)
        limit = card["max_model_len"]
        options.refuse(f"{longest} tokens of prompt and output exceed the server's {limit}", "random_input_len")
    with tqdm(total=len(fitting), desc="Requests", disable=config.disable_tqdm) as bar:
        records, duration = await client.run(fitting, bar.update)
    return Results.of(records, duration, len(requests) - len(fitting)), records


async def _model_card(config: BenchConfig) -> dict[str, Any]:
    """What the server says of the model."""
    reply = await Endpoint.at(config.base_url, config.api_key).get("/v1/models")
    try:
        cards = {card["id"]: card for card in reply["data"]}
    except (KeyError, TypeError):
        cards = {}
    if not cards:
        raise EndpointError("GET /v1/models: the answer names no model")
    if config.model is not None and config.model not in cards:
        raise EndpointError(f"--model {config.model}: the server has {', '.join(cards)}")
    return cards[config.model] if config.model is not None else next(iter(cards.values()))


def _fitting(requests: Sequence[LoadRequest], limit: int | None) -> list[LoadRequest]:
    longest = math.inf if limit is None else limit
    return [request for request in requests if request.input_length + request.output_length <= longest]


def _allow_many_connections() -> None:
    """As many as the system lets the process have; by default it is 1024 often."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _write(config: BenchConfig, results: Results, records: Sequence[Record]) -> None:
    everything = {"config": config.shown(), **results.as_json(), "requests": [asdict(record) for record in records]}
    # JSON has no infinity; null is what "all at once" is written as.
    if math.isinf(config.request_rate):
        everything["config"]["request_rate"] = None
    Path(config.output_json or "").write_text(json.dumps(everything, indent=1), encoding="utf-8")
