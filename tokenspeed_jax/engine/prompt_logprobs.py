"""Log-probabilities of a prompt's own tokens: gathered as its chunks land, handed out as one sequence."""

from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np


class Logprob(NamedTuple):
    """How probable a token is at its place.

    Attributes:
        logprob: natural log-probability under the model.
        rank: 1 + the number of tokens that are more probable.
    """

    logprob: float
    rank: int


PromptToken = dict[int, Logprob]
"""The prompt's token at one place, then the most probable tokens there that are not the same, most probable first."""


class PromptLogprobs(Sequence[PromptToken | None]):
    """One entry per token of a prompt; None for the first, which has nothing before it.

    Immutable. Entries are made when they are read: a long prompt has millions of numbers, which stay in arrays.

    Args:
        token_ids: the prompt.
        logprobs, ranks: of its tokens but the first.
        top_ids, top_logprobs: per token but the first, the most probable ids of the whole vocabulary in falling order.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        logprobs: np.ndarray,
        ranks: np.ndarray,
        top_ids: np.ndarray,
        top_logprobs: np.ndarray,
    ) -> None:
        self._token_ids = token_ids
        self._logprobs = logprobs
        self._ranks = ranks
        self._top_ids = top_ids
        self._top_logprobs = top_logprobs

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, index: int) -> PromptToken | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptToken | None]: ...
    def __getitem__(self, index: int | slice) -> PromptToken | list[PromptToken | None] | None:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        row = range(len(self))[index] - 1
        if row < 0:
            return None
        entry = {self._token_ids[row + 1]: Logprob(float(self._logprobs[row]), int(self._ranks[row]))}
        tops = zip(self._top_ids[row].tolist(), self._top_logprobs[row].tolist(), strict=True)
        for place, (token, logprob) in enumerate(tops):
            entry.setdefault(token, Logprob(logprob, place + 1))
        return entry

    def token_logprobs(self) -> list[float | None]:
        """Of each token of the prompt alone, as `Engine.score` gives them."""
        return [None, *self._logprobs.tolist()]

    def top_logprobs(self) -> list[dict[int, float] | None]:
        """Of each token's alternatives alone, as `Sample.top_logprobs` has them."""
        rows = zip(self._top_ids.tolist(), self._top_logprobs.tolist(), strict=True)
        return [None, *(dict(zip(ids, logprobs, strict=True)) for ids, logprobs in rows)]

    def limited(self, count: int) -> "PromptLogprobs":
        """The same with at most `count` alternatives per token."""
        tops = self._top_ids[:, :count], self._top_logprobs[:, :count]
        return PromptLogprobs(self._token_ids, self._logprobs, self._ranks, *tops)


class PromptScores:
    """What has landed of a prompt's log-probabilities. Owned by the step loop; not thread-safe.

    Args:
        count: alternatives to keep per token.
    """

    def __init__(self, token_ids: list[int], count: int) -> None:
        self._token_ids = token_ids
        self._count = count
        self._rows: np.ndarray | None = None
        self._num_scored = 1
        self._whole: PromptLogprobs | None = None

    def targets(self, first: int, count: int) -> list[int]:
        """The tokens from place `first` on."""
        return self._token_ids[first : first + count]

    def put(self, first: int, rows: np.ndarray) -> None:
        """Takes the scores of tokens from place `first` on, in the form that `score_rows` packs.

        Prompts are fed from their beginning, also a second time after a retraction; so places come in order.
        """
        if self._rows is None:
            self._rows = np.zeros((len(self._token_ids) - 1, rows.shape[1]), np.int32)
        self._rows[first - 1 : first - 1 + len(rows)] = rows
        self._num_scored = max(self._num_scored, first + len(rows))

    def whole(self) -> PromptLogprobs | None:
        """The log-probabilities, once those of the last token have landed."""
        if self._whole is None and self._num_scored == len(self._token_ids):
            self._whole = self._unpacked()
            self._rows = None
        return self._whole

    def _unpacked(self) -> PromptLogprobs:
        rows = np.zeros((0, 2), np.int32) if self._rows is None else self._rows
        top = (rows.shape[1] - 2) // 2
        kept = min(self._count, top)
        floats = rows.view(np.float32)
        # Copies, so that the numbers which nobody asked for are freed.
        return PromptLogprobs(
            self._token_ids,
            logprobs=floats[:, 0].copy(),
            ranks=rows[:, 1].copy(),
            top_ids=rows[:, 2 : 2 + kept].copy(),
            top_logprobs=floats[:, 2 + top : 2 + top + kept].copy(),
        )
