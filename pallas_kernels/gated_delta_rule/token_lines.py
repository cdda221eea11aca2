"""What the kernels of the chunked gated delta rule share: products with sums in registers, and chunks of tokens in
shared memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Not all public names of this module are declared to type checkers.
gpu: Any = plgpu

Ref = Any

COLUMNS = 64  # one 128-byte swizzle of 16-bit values
TOKENS = 64
SWIZZLE = gpu.SwizzleTransform(128)


class Product(NamedTuple):
    """One product that is added to a sum.

    Attributes:
        target: index of the sum.
        left: [rows, inner], 16-bit; registers in the layout of accumulators, or shared memory.
        right: [inner, columns], shared memory of the same dtype.
    """

    target: int
    left: Any
    right: Ref


def add_products(sums: Sequence[jax.Array], products: Sequence[Product], interpreted: bool) -> tuple[jax.Array, ...]:
    """The sums with the products added, all in flight at once.

    Args:
        sums: float32.
        interpreted: the CPU interpreter multiplies with plain dots, since its matrix units take no registers.
    """
    if interpreted:
        held = list(sums)
        for target, left, right in products:
            held[target] = held[target] + jnp.dot(left[...], right[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # plain reads, unlike wgmma's, must be fenced from the TMA write that follows
        return tuple(held)

    def issue(accumulators: tuple[Ref, ...]) -> None:
        for target, left, right in products:
            plgpu.wgmma(accumulators[target], left, right)

    out = pl.run_state(issue)(tuple(gpu.ACC.init(plgpu.layout_cast(x, plgpu.Layout.WGMMA)) for x in sums))
    return tuple(plgpu.layout_cast(x, plgpu.Layout.WGMMA) for x in out)


def zeros(rows: int, columns: int) -> jax.Array:
    """A sum of nothing yet."""
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), plgpu.Layout.WGMMA)


class TokenLines(NamedTuple):
    """Vectors of 64 tokens in shared memory, by chunks of 64 columns: one memory under two names.

    Attributes:
        lines: as the copy engine moves them, from and to any token.
        tiles: as the matrix units read them.
    """

    lines: tuple[Ref, ...]
    tiles: tuple[Ref, ...]

    @staticmethod
    def scratch(columns: int, *slots: int, dtype: jnp.dtype, interpreted: bool) -> list[Any]:
        """Scratch for copies from any token on; Mosaic's tiles of 8 tokens alone allow only multiples of 8.

        Tiles of one token are the same bytes: a swizzle of 128 bytes repeats after 8 lines of 128 bytes.
        """
        lines, tiles = (
            plgpu.SMEM((*slots, TOKENS, COLUMNS), dtype, transforms=(gpu.TilingTransform((rows, COLUMNS)), SWIZZLE))
            for rows in (1, 8)
        )
        return [tiles if interpreted else gpu.RefUnion(lines, tiles) for _ in range(columns // COLUMNS)]

    @classmethod
    def of(cls, refs: list[Ref], interpreted: bool) -> "TokenLines":
        """The two names of such scratch; the interpreter, whose memory has no layout, has one."""
        pairs = [(ref, ref) if interpreted else tuple(ref) for ref in refs]
        return cls(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))

    def slot(self, index: jax.Array) -> "TokenLines":
        """One slot of scratch that has several."""
        return TokenLines(tuple(x.at[index] for x in self.lines), tuple(x.at[index] for x in self.tiles))

    def load(self, ref: Ref, token: jax.Array, ready: Ref) -> None:
        """Starts the copy of 64 tokens from `token` on; `ref` is [tokens, columns], zeros beyond its end."""
        for i, lines in enumerate(self.lines):
            source = ref.at[pl.ds(token, TOKENS), pl.ds(i * COLUMNS, COLUMNS)]
            plgpu.copy_gmem_to_smem(source, lines, ready)

    def store(self, ref: Ref) -> None:
        """Starts the copy to [64, columns]."""
        for i, tiles in enumerate(self.tiles):
            plgpu.copy_smem_to_gmem(tiles, ref.at[:, pl.ds(i * COLUMNS, COLUMNS)])

    def clear(self, length: jax.Array) -> None:
        """Zeros in the tokens from `length` on, which belong to other rows or none."""
        shape = self.tiles[0].shape
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
        for tiles in self.tiles:
            held = plgpu.layout_cast(tiles[...], plgpu.Layout.WGMMA)
            tiles[...] = jnp.where(row < length, held, jnp.zeros((), held.dtype))
        plgpu.commit_smem()
