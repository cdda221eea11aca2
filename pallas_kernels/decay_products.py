"""Products between the tokens of a chunk under the decay that lies between them, safe for any decay.

For tokens j <= i of a chunk the factor is exp(d[j + 1] + ... + d[i]) with log decays d <= 0. Taken as a difference of
running sums it loses its digits after one strong decay, and split into exp(sum to i) * exp(-sum to j) it overflows.
Here every pair is split at the middle of the smallest aligned block that holds both tokens:

    block of 2h tokens      columns j: first half    second half
    rows i, first half      (blocks of h)            -
    rows i, second half     middle -> i, j -> middle (blocks of h)

Both factors, from j to the middle and from there to i, are exponentials of sums of numbers <= 0: at most 1, with no
subtraction, and 0 where a decay is -inf.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class DecayedProducts(NamedTuple):
    """What a chunk's tokens have to do with each other, with its beginning and with its end.

    Attributes:
        products: sum over channels of rows[i] * columns[j] * decay(j, i) for j <= i, zero above the diagonal.
        to_token: log decay from before the chunk's first token to each token, the token's own included.
        to_end: log decay from each token, its own excluded, to the chunk's last.
    """

    products: Float[Array, "... size size"]
    to_token: Float[Array, "... size decays"]
    to_end: Float[Array, "... size decays"]


def decayed_products(
    rows: Float[Array, "... batch size channels"],
    columns: Float[Array, "... batch size channels"],
    log_decay: Float[Array, "... batch size decays"],
    precision: lax.Precision,
) -> DecayedProducts:
    """See `DecayedProducts`; a power of two tokens, and `decays` is `channels`, or 1 for a decay that all share."""
    size = rows.shape[-2]
    if size == 1:
        products = jnp.sum(rows * columns, axis=-1, keepdims=True)
        return DecayedProducts(products, log_decay, jnp.zeros_like(log_decay))
    inner = decayed_products(*(_halves(x) for x in (rows, columns, log_decay)), precision)
    first, second = (DecayedProducts(*(_half(x, index) for x in inner)) for index in (0, 1))
    late = rows[..., size // 2 :, :] * jnp.exp(second.to_token)
    early = columns[..., : size // 2, :] * jnp.exp(first.to_end)
    low = jnp.einsum("...ic,...jc->...ij", late, early, precision=precision)
    return DecayedProducts(
        lower_blocks(first.products, low, second.products),
        jnp.concatenate([first.to_token, second.to_token + first.to_token[..., -1:, :]], axis=-2),
        jnp.concatenate([first.to_end + second.to_token[..., -1:, :], second.to_end], axis=-2),
    )


def decays(log_decay: Float[Array, "... batch size"]) -> DecayedProducts:
    """The factors themselves, as `products`; `to_token` and `to_end` keep a last axis of 1."""
    size = log_decay.shape[-1]
    after = jnp.arange(size)[:, None] > jnp.arange(size)
    # Column j sums the decays behind token j, so that no sum is the difference of two.
    between = jnp.cumsum(jnp.where(after, log_decay[..., :, None], 0.0), axis=-2)
    factors = jnp.where(after | jnp.eye(size, dtype=bool), jnp.exp(between), 0.0)
    return DecayedProducts(factors, jnp.cumsum(log_decay, axis=-1)[..., None], between[..., -1, :, None])


def unit_lower_inverse(a: Float[Array, "... batch size size"]) -> Float[Array, "... batch size size"]:
    """Inverse of I + (a below its diagonal), by blocks of a power of two: forward substitution in matrix products."""
    size = a.shape[-1]
    if size == 1:
        return jnp.ones_like(a)
    half = size // 2
    blocks = jnp.stack([a[..., :half, :half], a[..., half:, half:]], axis=-3)
    inner = unit_lower_inverse(blocks.reshape(*a.shape[:-3], -1, half, half))
    first, second = _half(inner, 0), _half(inner, 1)
    through = jnp.matmul(a[..., half:, :half], first, precision=lax.Precision.HIGHEST)
    return lower_blocks(first, -jnp.matmul(second, through, precision=lax.Precision.HIGHEST), second)


def lower_blocks(
    first: Float[Array, "... half half"], low: Float[Array, "... half half"], second: Float[Array, "... half half"]
) -> Float[Array, "... size size"]:
    """[[first, 0], [low, second]]."""
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([low, second], axis=-1)], axis=-2)


def _halves(x: Float[Array, "... batch size channels"]) -> Float[Array, "... twice half channels"]:
    return x.reshape(*x.shape[:-3], -1, x.shape[-2] // 2, x.shape[-1])


def _half(x: Float[Array, "... twice half channels"], index: int) -> Float[Array, "... batch half channels"]:
    return x.reshape(*x.shape[:-3], -1, 2, *x.shape[-2:])[..., index, :, :]
