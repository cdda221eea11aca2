"""The few shapes that steps are compiled for, fixed at start."""

from dataclasses import dataclass
from typing import Literal

StepMode = Literal["decode", "extend"]
SamplingMode = Literal["greedy", "full"]


@dataclass(frozen=True)
class Bucket:
    """One compiled step.

    Attributes:
        mode: "decode" feeds one token per row; "extend" feeds rows of any length (prefill chunks, and decode rows
            beside them).
        tokens: padded tokens of the step; equals `rows` in decode mode.
        rows: padded rows of the step.
        sampling: "greedy" takes the argmax of the raw logits; "full" runs the whole sampler.
    """

    mode: StepMode
    tokens: int
    rows: int
    sampling: SamplingMode


def _ladder(first: int, factor: int, last: int) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        size *= factor
    return (*sizes, last)


@dataclass(frozen=True)
class BucketTable:
    """Bucket sizes of one engine, ascending.

    Attributes:
        decode_rows: row counts of decode steps. They stand far apart, since a padding row reads no cache.
        extend_tokens: token counts of extend steps. They stand closer, since a padding token costs arithmetic.
        max_rows: rows of every extend step.
    """

    decode_rows: tuple[int, ...]
    extend_tokens: tuple[int, ...]
    max_rows: int

    @classmethod
    def for_limits(cls, max_num_seqs: int, max_num_batched_tokens: int, platform: str) -> "BucketTable":
        """Buckets up to `max_num_seqs` rows and `max_num_batched_tokens` tokens.

        A CPU ("cpu") gets fewer: it compiles as long as it runs.
        """
        decode_factor, extend_factor = (4, 2) if platform == "gpu" else (16, 4)
        return cls(
            decode_rows=_ladder(1, decode_factor, max_num_seqs),
            extend_tokens=_ladder(min(64, max_num_batched_tokens), extend_factor, max_num_batched_tokens),
            max_rows=max_num_seqs,
        )

    def decode(self, rows: int, sampling: SamplingMode) -> Bucket:
        """The smallest decode bucket that holds `rows` rows."""
        size = next(size for size in self.decode_rows if size >= rows)
        return Bucket("decode", size, size, sampling)

    def extend(self, tokens: int, sampling: SamplingMode) -> Bucket:
        """The smallest extend bucket that holds `tokens` tokens."""
        size = next(size for size in self.extend_tokens if size >= tokens)
        return Bucket("extend", size, self.max_rows, sampling)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket, the costliest to compile first."""
        modes: tuple[SamplingMode, ...] = ("full", "greedy")
        return tuple(
            [self.extend(size, mode) for size in reversed(self.extend_tokens) for mode in modes]
            + [self.decode(size, mode) for size in reversed(self.decode_rows) for mode in modes]
        )
