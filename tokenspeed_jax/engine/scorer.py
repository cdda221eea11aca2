"""Scoring without a cache: one plain forward pass per sequence, with the same model code that serves."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from tokenspeed_jax.engine.split_model import Weights
from tokenspeed_jax.engine.weight_store import WeightStore
from tokenspeed_jax.models.plain_step import PlainStep

_SHORTEST = 64
_ROWS_PER_BLOCK = 64
"""Rows whose logits are held at once: a vocabulary of 256k words takes 64 MiB of them."""


class Scorer:
    """Log-probabilities of given tokens. Thread-safe.

    Sequences are padded to the next power of two; each such length compiles once, on first use.
    """

    def __init__(self, store: WeightStore, *, precision: str | None) -> None:
        self._store = store
        self._precision = precision
        self._forward = jax.jit(self._score_padded)

    def score(self, token_ids: list[int]) -> list[float | None]:
        """Natural log-probability of each token given those before it; None for the first.

        Raises:
            EngineStateError: the engine has no weights now.
        """
        length = max(_SHORTEST, 1 << (len(token_ids) - 1).bit_length())
        padded = np.zeros(length, np.int32)
        padded[: len(token_ids)] = token_ids
        with self._store.borrowed() as weights, jax.default_matmul_precision(self._precision):
            values = self._forward(weights, padded, np.int32(len(token_ids)))
        return [None, *np.asarray(values)[: len(token_ids) - 1].tolist()]

    def _score_padded(
        self, weights: Weights, token_ids: Int[Array, " tokens"], length: Int[Array, ""]
    ) -> Float[Array, " tokens"]:
        model = self._store.structure.module(weights)
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        segments = (positions >= length).astype(jnp.int32)
        hidden = model(token_ids, positions, PlainStep(segments, positions, num_segments=2))
        targets = jnp.roll(token_ids, -1)

        def block(rows: tuple[Array, Array]) -> Array:
            logits = model.logits(rows[0])
            chosen = jnp.take_along_axis(logits, rows[1][:, None], axis=-1)[:, 0]
            return chosen - jax.nn.logsumexp(logits, axis=-1)

        cut = hidden.reshape(-1, _ROWS_PER_BLOCK, hidden.shape[-1]), targets.reshape(-1, _ROWS_PER_BLOCK)
        return lax.map(block, cut).reshape(-1)
