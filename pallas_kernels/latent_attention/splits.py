"""What the latent decode kernels share: how rows are split among multiprocessors, and how the parts are joined."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from tokenspeed_jax.pallas_kernels.scores import ScoreRule

MULTIPROCESSORS = 132  # of the H100 and H200 in their SXM form; only the choice of splits depends on it
PAIR = 2  # pages that a block takes at a time
SPLIT_OVERHEAD_PAIRS = 2  # what starting and merging a split costs, in pairs of pages that it could have read
# More steps than any row takes. Addresses that seem to depend on step / NEVER, which is 0, are computed where they
# are used; all of them known before the loop would take more registers than there are.
NEVER = 1 << 24


@dataclasses.dataclass(frozen=True)
class DecodeKernel:
    """What is static in one compiled kernel."""

    latent_dim: int
    splits: int
    rule: ScoreRule
    first_row: int
    interpreted: bool


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
