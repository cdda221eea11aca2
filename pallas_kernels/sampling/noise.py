"""Noise of a row's next token: counter-based, so that nothing but seed, output index and token id enters it.

The bits are those of `jax.random.bits` under `fold_in(key, index)`, written out: JAX's own kernel for CUDA reads its
counters from memory and writes its words there, six arrays of the size of the logits, where these operations are part
of whatever reads the noise.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

Words = UInt32[Array, "..."]


def threefry(key: tuple[Words, Words], counter: tuple[Words, Words]) -> tuple[Words, Words]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011): two words for a key of two words and a counter of two."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def row_keys(seed: UInt32[Array, "rows 2"], output_index: Int32[Array, " rows"]) -> tuple[Words, Words]:
    """The generator's key of each row's next token, in two words.

    Args:
        seed: high and low word of each row's 63-bit seed.
        output_index: tokens that the row's sample generated before.
    """
    return threefry((seed[:, 0], seed[:, 1]), (jnp.zeros_like(seed[:, 0]), output_index.astype(jnp.uint32)))


def gumbel_of_bits(
    high: Words, low: Words, log1p: Callable[[jax.Array], jax.Array] = jnp.log1p
) -> Float32[Array, "..."]:
    """Standard Gumbel noise of the two words that the generator gives for a token."""
    drawn = (high ^ low).astype(jnp.float32)
    # Large noise comes from numbers near zero, where float32 resolves all 32 drawn bits: the tail is not quantised.
    uniform = jnp.minimum((drawn + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-log1p(-uniform))


def log1p_by_log(x: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """log(1 + x) of x in (-1, 0] for Mosaic, which has no log1p: what 1 + x loses to rounding, the quotient returns."""
    rest = 1.0 + x
    is_lost = rest == 1.0
    return jnp.where(is_lost, x, jnp.log(rest) * (x / jnp.where(is_lost, 1.0, rest - 1.0)))


def gumbel_noise(
    seed: UInt32[Array, "rows 2"], output_index: Int32[Array, " rows"], vocab_size: int
) -> Float32[Array, "rows vocab"]:
    """Standard Gumbel noise of every token of the vocabulary; see `row_keys`."""
    high, low = row_keys(seed, output_index)
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)[None]
    return gumbel_of_bits(*threefry((high[:, None], low[:, None]), (jnp.zeros_like(tokens), tokens)))
