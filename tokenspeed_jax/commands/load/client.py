"""Sends a workload to a server's OpenAI endpoints and times the replies."""

import asyncio
import json
import string
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import msgspec

from tokenspeed_jax.commands.load.config import BenchConfig
from tokenspeed_jax.commands.load.endpoint import Endpoint, EndpointError
from tokenspeed_jax.commands.load.measurement import Record
from tokenspeed_jax.commands.load.workload import LoadRequest

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_WORDS = " ".join(first + second for first in string.ascii_lowercase for second in string.ascii_lowercase)


class LoadClient:
    """One server, under load."""

    def __init__(self, config: BenchConfig, model: str) -> None:
        self._config = config
        self._model = model
        self._endpoint = Endpoint.at(config.base_url, config.api_key)

    async def word_ids(self) -> list[int]:
        """Ids of ordinary words, from the server's `/tokenize`: random ids may be special tokens, or none at all.

        Raises:
            EndpointError: the server has no such route.
        """
        body = {"model": self._model, "prompt": _WORDS, "add_special_tokens": False}
        try:
            tokens = (await self._endpoint.post("/tokenize", body))["tokens"]
            return sorted({int(token) for token in tokens})
        except (KeyError, TypeError, ValueError):
            raise EndpointError("POST /tokenize: the answer has no tokens; give --vocab-size") from None
        except EndpointError as error:
            raise EndpointError(f"{error}; without this route, give --vocab-size") from None

    async def run(self, requests: Sequence[LoadRequest], on_end: Callable[[], object]) -> tuple[list[Record], float]:
        """Sends every request at its time and waits for all replies.

        Returns:
            A record per request, and the seconds that all took.

        Raises:
            EndpointError: prompts cannot be made; failures of requests are in their records.
        """
        limit = self._config.max_concurrency
        room = asyncio.Semaphore(len(requests) if limit is None else limit)
        records: list[Record] = []
        start = perf_counter()

        async def one(body: bytes) -> None:
            record = Record(perf_counter() - start)
            records.append(record)
            await self._timed(body, record)
            room.release()
            on_end()

        try:
            async with asyncio.TaskGroup() as group:
                for request in requests:
                    # Before the body is made: those of a long trace would fill the memory.
                    await room.acquire()
                    body = await self._body(request)
                    await asyncio.sleep(max(0.0, start + request.seconds - perf_counter()))
                    group.create_task(one(body))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return records, perf_counter() - start

    async def _body(self, request: LoadRequest) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.output_length,
            "temperature": self._config.temperature,
            "ignore_eos": self._config.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        prompt = request.make_prompt()
        if self._config.endpoint == "completions":
            return msgspec.json.encode(body | {"prompt": prompt})
        reply = await self._endpoint.post("/detokenize", {"model": self._model, "tokens": prompt})
        if not isinstance(reply, dict) or not isinstance(reply.get("prompt"), str):
            raise EndpointError("POST /detokenize: the answer has no prompt; --endpoint chat needs it")
        return msgspec.json.encode(body | {"messages": [{"role": "user", "content": reply["prompt"]}]})

    async def _timed(self, body: bytes, record: Record) -> None:
        try:
            async with asyncio.timeout(self._config.request_timeout), self._endpoint.connection() as connection:
                start = perf_counter()
                status = await connection.send("POST", _PATHS[self._config.endpoint], body)
                if status != 200:
                    raise await connection.refusal(status)
                async for payload in connection.payloads():
                    _observe(json.loads(payload), perf_counter() - start, record)
                record.end = perf_counter() - start
            if not record.prompt_tokens:
                record.error = "the stream ended without usage"
        except TimeoutError:
            record.error = f"no reply within {self._config.request_timeout:g} s"
        except EndpointError as error:
            record.error = str(error)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            record.error = f"the stream is not as OpenAI's: {error!r}"


def _observe(chunk: dict[str, Any], now: float, record: Record) -> None:
    """Takes one chunk of a stream."""
    if error := chunk.get("error"):
        raise EndpointError(f"in the stream: {error['message']}")
    for choice in chunk.get("choices") or ():
        said = choice.get("delta") or choice
        if said.get("text") or said.get("content") or said.get("reasoning") or said.get("reasoning_content"):
            record.arrivals.append(now)
    if usage := chunk.get("usage"):
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
