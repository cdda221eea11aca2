"""How latent decode shares rows among multiprocessors, and joins what they made of them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
PAIR = 2  # pages that a block takes at a time
SPLIT_OVERHEAD_PAIRS = 2  # what starting and merging a split costs, in pairs of pages that it could have read


def choose_splits(*, rows: int, head_tiles: int, columns: int) -> int:
    """The number of splits that wastes least of the GPU for a full table, one block on a multiprocessor."""
    pairs = -(-columns // PAIR)

    def cost(splits: int) -> int:
        waves = -(-rows * head_tiles * splits // MULTIPROCESSORS)
        return waves * (-(-pairs // splits) + (SPLIT_OVERHEAD_PAIRS if splits > 1 else 0))

    return min(range(1, min(pairs, MULTIPROCESSORS) + 1), key=cost)


def merged(
    out: Float[Array, "splits *heads dim"], log_weight: Float32[Array, "splits *heads"]
) -> Float32[Array, "*heads dim"]:
    """Joins the splits' outputs; one that took no page has weight exactly 0 unless none took any."""
    weight = jnp.exp2(log_weight - log_weight.max(axis=0))
    return (out.astype(jnp.float32) * weight[..., None]).sum(axis=0) / weight.sum(axis=0)[..., None]
