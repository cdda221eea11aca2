"""Scoring without a cache: plain forward passes with the same model code that serves."""

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tokenspeed_jax.engine.split_model import Weights
from tokenspeed_jax.engine.weight_store import WeightStore
from tokenspeed_jax.models.log_probabilities import token_log_probabilities

_SHORTEST = 64
_TOKENS_PER_CALL = 4096
"""Of the padded sequences that go through the model together; a longer sequence goes alone."""


class Scorer:
    """Log-probabilities of given tokens. Thread-safe.

    Sequences are padded to the next power of two, and so is the number of those that go together; each such shape
    compiles once, on first use.
    """

    def __init__(self, store: WeightStore, *, precision: str | None) -> None:
        self._store = store
        self._precision = precision
        self._forward = jax.jit(self._score_padded)

    def score(self, sequences: list[list[int]]) -> list[list[float | None]]:
        """Natural log-probability of each token given those before it; None for the first of each sequence.

        Raises:
            EngineStateError: the engine has no weights now.
        """
        scores: list[list[float | None]] = [[] for _ in sequences]
        with self._store.borrowed() as weights:  # the same for all of them
            for length, places in _by_padded_length(sequences).items():
                most = max(1, _TOKENS_PER_CALL // length)
                for begin in range(0, len(places), most):
                    together = places[begin : begin + most]
                    values = self._scored_together(weights, [sequences[place] for place in together], length)
                    for place, row in zip(together, values, strict=False):
                        scores[place] = [None, *row[1 : len(sequences[place])].tolist()]
        return scores

    def _scored_together(self, weights: Weights, sequences: list[list[int]], length: int) -> np.ndarray:
        """[rows, length] of log-probabilities; rows behind the last sequence are padding."""
        tokens = np.zeros((1 << (len(sequences) - 1).bit_length(), length), np.int32)
        is_token = np.zeros(tokens.shape, bool)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
            is_token[row, : len(sequence)] = True
        with jax.default_matmul_precision(self._precision):
            return np.asarray(self._forward(weights, tokens, is_token))

    def _score_padded(
        self, weights: Weights, tokens: Int[Array, "rows length"], is_token: Bool[Array, "rows length"]
    ) -> Float[Array, "rows length"]:
        return token_log_probabilities(self._store.structure.module(weights), tokens, is_token)


def _by_padded_length(sequences: list[list[int]]) -> dict[int, list[int]]:
    """Places of the sequences that are padded alike."""
    places: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        places.setdefault(max(_SHORTEST, 1 << (len(sequence) - 1).bit_length()), []).append(place)
    return places
