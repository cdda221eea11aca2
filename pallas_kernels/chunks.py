"""`Chunks`: the rows of a step cut into pieces of a fixed size, as chunked recurrences walk them.

Each row's body and tail are cut apart, so that the checkpoint between them is always the end of a chunk and one pass
over the chunks meets every state that must be stored. Only the last chunk of a body or tail is partly filled. The
chunk size divides 64, so a row that resumes at a multiple of 64 is cut at the same positions as one that ran from its
beginning, up to its checkpoint.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from tokenspeed_jax.pallas_kernels.recurrent_rows import RecurrentRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Chunks in the order of their tokens; those from `count` on are empty and belong to no row.

    Attributes:
        tokens: the token in each slot; the number of tokens where the slot is empty.
        rows: row of each chunk; the number of rows where it has none.
        opens: whether the chunk is the first of its row.
        closes_body: whether the body of its row ends with the chunk.
        closes_row: whether its row ends with the chunk.
        slots: where each token stands in the flattened `tokens`; the number of slots for tokens of no row.
        count: how many chunks there are.
    """

    tokens: Int[Array, "chunks size"]
    rows: Int[Array, " chunks"]
    opens: Bool[Array, " chunks"]
    closes_body: Bool[Array, " chunks"]
    closes_row: Bool[Array, " chunks"]
    slots: Int[Array, " tokens"]
    count: Int[Array, ""]

    @classmethod
    def cut(cls, rows: RecurrentRows, num_tokens: int, size: int, multiple: int = 1) -> "Chunks":
        """Cuts rows into chunks of `size`; room for the worst case, rounded up to a multiple of `multiple`."""
        capacity = -(-(-(-num_tokens // size) + 2 * rows.num_rows) // multiple) * multiple
        bodies, starts = rows.body_lengths, rows.starts[:-1]
        # Body and tail of row r are the parts 2r and 2r + 1.
        lengths = jnp.stack([bodies, rows.lengths - bodies], axis=1).reshape(-1)
        begins = jnp.stack([starts, starts + bodies], axis=1).reshape(-1)
        pieces = (lengths + size - 1) // size
        ends = jnp.cumsum(pieces)
        chunk = jnp.arange(capacity, dtype=starts.dtype)
        live = chunk < ends[-1]
        part = jnp.minimum(jnp.searchsorted(ends, chunk, side="right"), lengths.shape[0] - 1)
        index = chunk - (ends - pieces)[part]
        offset = (index * size)[:, None] + jnp.arange(size, dtype=starts.dtype)
        held = live[:, None] & (offset < lengths[part][:, None])
        tokens = jnp.where(held, begins[part][:, None] + offset, num_tokens)
        slots = jnp.full(num_tokens, capacity * size, jnp.int32)
        slots = slots.at[tokens.reshape(-1)].set(jnp.arange(capacity * size, dtype=jnp.int32), mode="drop")
        row, is_tail = part // 2, part % 2 == 1
        last = live & (index == pieces[part] - 1)
        return cls(
            tokens=tokens,
            rows=jnp.where(live, row, rows.num_rows),
            opens=live & ~is_tail & (index == 0),
            closes_body=last & ~is_tail,
            closes_row=last & (is_tail | (pieces.reshape(-1, 2)[row, 1] == 0)),
            slots=slots,
            count=ends[-1],
        )

    @property
    def capacity(self) -> int:
        return self.tokens.shape[0]

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    def part(self, first: Int[Array, ""], count: int) -> "Chunks":
        """`count` chunks from `first` on; `slots` and `count` stay those of the whole."""
        fields = {
            name: jax.lax.dynamic_slice_in_dim(getattr(self, name), first, count)
            for name in ("tokens", "rows", "opens", "closes_body", "closes_row")
        }
        return dataclasses.replace(self, **fields)

    def gather(self, values: Shaped[Array, "tokens ..."]) -> Shaped[Array, "chunks size ..."]:
        """Each slot's value; zeros in empty slots."""
        return values.at[self.tokens].get(mode="fill", fill_value=0)

    def restore(self, values: Shaped[Array, "chunks size ..."]) -> Shaped[Array, "tokens ..."]:
        """Each token's value from its slot; zeros for tokens of no row."""
        flat = values.reshape(-1, *values.shape[2:])
        return flat.at[self.slots].get(mode="fill", fill_value=0)
