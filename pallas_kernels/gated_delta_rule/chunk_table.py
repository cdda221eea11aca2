"""Where a step's chunks lie among its tokens, for kernels that read and write tokens in place."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows

PARTS = 2  # of a row: body and tail


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkTable:
    """Chunks of the bodies and tails of all rows, one after another; none reaches beyond its part.

    Attributes:
        begins: first token of each chunk.
        lengths: its tokens, at most a chunk's size; 0 for chunks of no row.
        parts: of each row's body and tail: first chunk, first token, tokens.
    """

    begins: Int[Array, " chunks"]
    lengths: Int[Array, " chunks"]
    parts: Int[Array, "rows parts 3"]

    @classmethod
    def cut(cls, rows: RecurrentRows, num_tokens: int, size: int) -> "ChunkTable":
        """Has room for the worst case: each body and each tail may end in a chunk that is not full."""
        capacity = -(-num_tokens // size) + PARTS * rows.num_rows
        bodies, starts = rows.body_lengths, rows.starts[:-1]
        tokens = jnp.stack([bodies, rows.lengths - bodies], axis=1).reshape(-1)
        begins = jnp.stack([starts, starts + bodies], axis=1).reshape(-1)
        pieces = (tokens + size - 1) // size
        part = jnp.arange(tokens.shape[0])
        firsts = jnp.sum(jnp.where(part[:, None] > part, pieces, 0), axis=1)
        # Compared with every part, since a search would be a loop of small kernels. At most one part holds a chunk.
        offset = (jnp.arange(capacity)[:, None] - firsts) * size
        held = (offset >= 0) & (offset < tokens)
        return cls(
            begins=jnp.sum(jnp.where(held, begins + offset, 0), axis=1).astype(jnp.int32),
            lengths=jnp.sum(jnp.where(held, jnp.minimum(tokens - offset, size), 0), axis=1).astype(jnp.int32),
            parts=jnp.stack([firsts, begins, tokens], axis=1).reshape(-1, PARTS, 3).astype(jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Number of chunks, those of no row included."""
        return self.begins.shape[0]
