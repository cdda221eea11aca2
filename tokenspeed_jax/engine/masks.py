"""Which ids the constrained rows of a batch may draw: one bit per id, filled in parallel and without Python's lock."""

import time
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tokenspeed_jax.engine.redraw import mask_words
from tokenspeed_jax.engine.requests import SampleState

if TYPE_CHECKING:
    import llguidance

_ALL = -1  # every bit of an int32
_COSTLY_SECONDS = 0.1
"""A grammar that fails in a step whose masks take longer is not served again."""


class MaskBuilder:
    """Fills masks from the matchers of samples. Not thread-safe; owned by the step loop.

    Args:
        token_ids: ids that the tokenizer knows; no others are allowed.
        eos_token_ids: ids that end a sample.

    Attributes:
        vocab_size: of the model.
    """

    def __init__(self, vocab_size: int, token_ids: Collection[int], eos_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        bits = np.zeros(mask_words(vocab_size) * 32, np.uint8)
        bits[[item for item in token_ids if item < vocab_size]] = 1
        bits[list(eos_token_ids)] = 0
        self._front = np.packbits(bits, bitorder="little").view(np.int32)

    @cached_property
    def _executor(self) -> "llguidance.LLExecutor":
        from llguidance import LLExecutor

        return LLExecutor()

    def fill(self, masks: np.ndarray, rows: Sequence[int], samples: Sequence[SampleState]) -> None:
        """Fills the masks of some rows of a batch. A sample whose grammar fails is noted in its matcher.

        Args:
            masks: int32[rows, words], contiguous.
            samples: of all rows.
        """
        parsed = []
        for row in rows:
            sample, matcher = samples[row], samples[row].matcher
            if matcher is not None and matcher.error is None:
                matcher.error = matcher.cost.error
            if sample.finished or matcher is None or matcher.error is not None:
                masks[row] = _ALL  # what it draws is dropped
            elif matcher.front is not None:
                masks[row] = self._front
                self._hold_back(masks[row], sample)
            else:
                parsed.append((matcher, row))
        if not parsed:
            return
        targets = [(matcher.inner, row) for matcher, row in parsed]
        before = time.perf_counter()
        self._executor.unsafe_compute_mask_ptr(targets, masks.ctypes.data, masks.strides[0], len(masks))
        is_costly = time.perf_counter() - before > _COSTLY_SECONDS
        for matcher, row in parsed:
            matcher.note_error()
            if is_costly and matcher.error is not None:
                matcher.cost.error = matcher.error
            self._hold_back(masks[row], samples[row])

    def _hold_back(self, mask: np.ndarray, sample: SampleState) -> None:
        """Takes away the ids that `ignore_eos` and `min_tokens` hold back, unless the grammar admits nothing else."""
        params = sample.params
        ids: tuple[int, ...] = self._eos_token_ids if params.ignore_eos else ()
        if len(sample.token_ids) < params.min_tokens:
            ids = (*self._eos_token_ids, *params.stop_token_ids)
        if not ids:
            return
        before = mask.copy()
        for item in ids:
            mask.view(np.uint32)[item >> 5] &= np.uint32(~(1 << (item & 31)) & 0xFFFFFFFF)
        if not mask.any():
            mask[:] = before
