"""`ExpertRecord`: the experts of one sample's tokens."""

from typing import Self

import numpy as np

_FIRST_CAPACITY = 64


class ExpertRecord:
    """What has landed of the experts that a sample's tokens went to. Owned by the step loop; not thread-safe.

    Args:
        prompt: the record of the sample that has computed the prompt, of which this one's takes over what it has not
            computed itself; None if it computes the whole prompt.
    """

    def __init__(self, prompt: Self | None) -> None:
        self._prompt = prompt
        self._rows: np.ndarray | None = None
        self._begin = 0
        self._end = 0

    def put(self, first: int, rows: np.ndarray) -> None:
        """Takes the experts of the tokens from place `first` on, and copies them.

        Tokens are fed in order. After a retraction they are fed again, but for those that are still cached; what was
        noted of these stays.

        Args:
            rows: `int16[tokens, moe_layers, top_k]`.
        """
        end = first + len(rows)
        if self._rows is None:
            self._begin = first
            self._rows = np.zeros((max(_FIRST_CAPACITY, end), *rows.shape[1:]), rows.dtype)
        elif end > len(self._rows):
            more = max(len(self._rows), end - len(self._rows))
            self._rows = np.concatenate([self._rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])
        self._rows[first:end] = rows
        self._begin, self._end = min(self._begin, first), max(self._end, end)

    def whole(self) -> np.ndarray | None:
        """`int32[tokens, moe_layers, top_k]` of all tokens that were fed; None while there are none."""
        if self._rows is None:
            return None
        whole = self._rows[: self._end].astype(np.int32)
        if self._prompt is not None and self._prompt._rows is not None:
            whole[: self._begin] = self._prompt._rows[: self._begin]
        return whole
