"""Request traces: when requests came, how long they were, and which prefixes they shared."""

import csv
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512
"""Tokens of one prefix block of Mooncake's traces."""
_LONGEST = 1 << 24


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line."""


@dataclass(frozen=True)
class TraceRow:
    """One request.

    Attributes:
        seconds: since the first row.
        block_ids: of the prompt, a block of `MOONCAKE_BLOCK` tokens each; an id stands for its block and all before
            it. None where the trace does not say.
    """

    seconds: float
    input_length: int
    output_length: int
    block_ids: tuple[int, ...] | None


def read_trace(path: str, limit: int | None) -> list[TraceRow]:
    """The first `limit` rows of a trace: Mooncake's (`.jsonl`) or Azure's (`.csv`).

    Raises:
        TraceError: the file is missing, of another kind, or malformed.
    """
    file = Path(path)
    parsers = {".jsonl": _mooncake, ".csv": _azure}
    if file.suffix not in parsers:
        raise TraceError(f"{path} is neither Mooncake's .jsonl nor Azure's .csv")
    rows: list[TraceRow] = []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in parsers[file.suffix](path, lines):
                if limit is not None and len(rows) == limit:
                    break
                rows.append(row)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no UTF-8") from None
    if not rows:
        raise TraceError(f"{path} has no requests")
    first = min(row.seconds for row in rows)
    shifted = [dataclasses.replace(row, seconds=row.seconds - first) for row in rows]
    return sorted(shifted, key=lambda row: row.seconds)


def _mooncake(path: str, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields: dict[str, Any] = json.loads(line)
            row = TraceRow(
                _seconds(fields["timestamp"]) / 1000,
                _length(fields["input_length"]),
                _length(fields["output_length"]),
                tuple(map(int, fields["hash_ids"])),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from None
        if len(row.block_ids or ()) != -(-row.input_length // MOONCAKE_BLOCK):
            raise TraceError(
                f"{path}, line {number}: {len(row.block_ids or ())} hash_ids for {row.input_length} tokens in blocks "
                f"of {MOONCAKE_BLOCK}"
            )
        yield row


def _azure(path: str, lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, fields in enumerate(csv.DictReader(lines), 2):
        try:
            yield TraceRow(
                _seconds(fields["seconds"]),
                _length(fields["context_tokens"]),
                _length(fields["generated_tokens"]),
                None,
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error!r}") from None


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"a time of {seconds}")
    return seconds


def _length(value: Any) -> int:
    length = int(value)
    if not 0 < length <= _LONGEST:
        raise ValueError(f"a length of {length} tokens")
    return length
