"""`OnlineSoftmax`: attention accumulated block of keys by block of keys, in float32, for the portable kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32

from tokenspeed_jax.pallas_kernels.scores import ScoreRule


def product_precision(dtype: jnp.dtype) -> lax.Precision:
    """Float32 inputs are multiplied in full float32; shorter ones lose nothing that matters in a GPU's tf32 mode."""
    return lax.Precision.HIGHEST if jnp.dtype(dtype) == jnp.float32 else lax.Precision.DEFAULT


class OnlineSoftmax(NamedTuple):
    """Running state of `rows` groups of `queries` that share KV heads.

    Attributes:
        top: highest score so far, -inf before any visible key.
        weight: sum of exp(score - top).
        values: sum of exp(score - top) * value.
    """

    top: Float32[Array, "rows heads queries"]
    weight: Float32[Array, "rows heads queries"]
    values: Float32[Array, "rows heads queries dim"]

    @classmethod
    def empty(cls, rows: int, heads: int, queries: int, dim: int) -> "OnlineSoftmax":
        shape = (rows, heads, queries)
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros((*shape, dim)))

    def add(
        self,
        q: Float32[Array, "rows heads queries dim"],
        k: Float[Array, "rows keys heads dim"],
        v: Float[Array, "rows keys heads dim"],
        visible: Bool[Array, "rows queries keys"],
        rule: ScoreRule,
        precision: lax.Precision,
    ) -> "OnlineSoftmax":
        """The state after one more block of keys; a query that sees none of them keeps its state bit for bit."""
        products = jnp.einsum("rhqd,rkhd->rhqk", q, k.astype(jnp.float32), precision=precision)
        scores = jnp.where(visible[:, None], rule.score(products), -jnp.inf)
        top = jnp.maximum(self.top, scores.max(axis=-1))
        # A finite stand-in where nothing is visible yet keeps inf - inf out of the exponent.
        base = jnp.where(jnp.isneginf(top), 0.0, top)
        p = jnp.exp(scores - base[..., None])
        keep = jnp.exp(self.top - base)
        # Rows that nobody sees may hold anything, NaN included, and 0 * NaN is NaN.
        seen = visible.any(axis=1)[:, :, None, None]
        v = jnp.where(seen, v.astype(jnp.float32), 0.0)
        return OnlineSoftmax(
            top,
            self.weight * keep + p.sum(axis=-1),
            self.values * keep[..., None] + jnp.einsum("rhqk,rkhd->rhqd", p, v, precision=precision),
        )

    def result(self, sinks: Float32[Array, "heads queries"] | None = None) -> Float32[Array, "rows heads queries dim"]:
        """The attention output; zeros for queries that saw no key.

        Args:
            sinks: a logit of each query that joins the denominator and brings no value.
        """
        weight = self.weight
        if sinks is not None:
            # A sink far above every score overflows to infinity, and the output is the 0 that it should be.
            weight = weight + jnp.exp(sinks - jnp.where(jnp.isneginf(self.top), 0.0, self.top))
        weight = weight[..., None]
        return jnp.where(weight > 0, self.values / jnp.where(weight > 0, weight, 1.0), 0.0)


def pages_per_block(tokens_per_page: int, block_tokens: int) -> int:
    """Whole pages that make a block of about `block_tokens` keys."""
    return max(1, block_tokens // tokens_per_page)


def padded_table(page_table: jax.Array, pages: int) -> jax.Array:
    """The table with null pages appended until whole blocks of `pages` columns fill it."""
    missing = -page_table.shape[1] % pages
    return jnp.pad(page_table, ((0, 0), (0, missing)))
