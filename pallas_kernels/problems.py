"""Random paged attention problems, for the tests and the benchmarks of the kernels."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.pages import PageView


@dataclasses.dataclass(frozen=True)
class PagedProblem:
    """Arguments of `decode_attention` (one query per row) or `prefill_attention` (`query_starts`).

    Pages lie in random order; columns that no query sees are holes; rows of a page beyond its owner's length, the
    pages of nobody and the holes below a window hold `unseen`.
    """

    q: Float[Array, "tokens heads dim"]
    k: PageView
    v: PageView
    page_table: Int[Array, "rows columns"]
    query_starts: Int[Array, " rows_and_end"]
    kv_lens: Int[Array, " rows"]

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_page: int = 64,
        columns: int | None = None,
        num_pages: int | None = None,
        num_tokens: int | None = None,
        sliding_window: int | None = None,
        dtype: DTypeLike = jnp.float32,
        unseen: float = 0.0,
    ) -> "PagedProblem":
        """Rows with the given numbers of new and of all tokens.

        `num_tokens`, `columns` and `num_pages` fix the shapes; left out, they are what the lengths need.
        """
        needed = [-(-length // tokens_per_page) for length in kv_lens]
        columns = max(needed, default=0) if columns is None else columns
        num_pages = sum(needed) + 2 if num_pages is None else num_pages
        order = rng.permutation(np.arange(1, num_pages))
        shape = (num_pages, tokens_per_page, num_kv_heads, head_dim)
        keys = rng.standard_normal(shape, dtype=np.float32)
        values = rng.standard_normal(shape, dtype=np.float32)
        table = np.zeros((len(kv_lens), columns), np.int32)
        used = np.zeros(shape[:2], bool)
        taken = 0
        for row, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
            first = 0 if sliding_window is None else max(0, kv_len - query_len - (sliding_window - 1))
            for column in range(first // tokens_per_page, needed[row]):
                page = order[taken]
                taken += 1
                table[row, column] = page
                used[page, : min(tokens_per_page, kv_len - column * tokens_per_page)] = True
        keys[~used] = unseen
        values[~used] = unseen
        keys[0] = values[0] = 0.0
        total = sum(query_lens) if num_tokens is None else num_tokens
        q = rng.standard_normal((total, num_heads, head_dim), dtype=np.float32)
        return cls(
            jnp.asarray(q, dtype),
            PageView.from_array(jnp.asarray(keys, dtype)),
            PageView.from_array(jnp.asarray(values, dtype)),
            jnp.asarray(table),
            jnp.asarray(np.concatenate([[0], np.cumsum(query_lens)]), jnp.int32),
            jnp.asarray(kv_lens, jnp.int32),
        )

    def decode_arguments(self) -> tuple[jax.Array, PageView, PageView, jax.Array, jax.Array]:
        """Positional arguments of `decode_attention`; every row must have one query."""
        return self.q, self.k, self.v, self.page_table, self.kv_lens

    def prefill_arguments(self) -> tuple[jax.Array, PageView, PageView, jax.Array, jax.Array, jax.Array]:
        """Positional arguments of `prefill_attention`."""
        return self.q, self.k, self.v, self.page_table, self.query_starts, self.kv_lens


@dataclasses.dataclass(frozen=True)
class LatentProblem:
    """Arguments of the latent attention functions: one row per cached token, and expansions to keys and values.

    Pages, table and lengths are as in `PagedProblem`.
    """

    q: Float[Array, "tokens heads query_dim"]
    key: Float[Array, "heads nope_dim latent_dim"]
    value: Float[Array, "heads value_dim latent_dim"]
    rows: PageView
    page_table: Int[Array, "rows columns"]
    query_starts: Int[Array, " rows_and_end"]
    kv_lens: Int[Array, " rows"]

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        *,
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        num_heads: int,
        latent_dim: int,
        rope_dim: int,
        nope_dim: int,
        value_dim: int,
        dtype: DTypeLike = jnp.float32,
        **options: Any,
    ) -> "LatentProblem":
        """Rows with the given numbers of new and of all tokens; `options` are those of `PagedProblem.random`."""
        paged = PagedProblem.random(
            rng,
            query_lens=query_lens,
            kv_lens=kv_lens,
            num_heads=1,
            num_kv_heads=1,
            head_dim=latent_dim + rope_dim,
            dtype=dtype,
            **options,
        )

        def normal(*shape: int, scale: float = 1.0) -> jax.Array:
            return jnp.asarray(scale * rng.standard_normal(shape, dtype=np.float32), dtype)

        return cls(
            normal(paged.q.shape[0], num_heads, nope_dim + rope_dim),
            normal(num_heads, nope_dim, latent_dim, scale=latent_dim**-0.5),
            normal(num_heads, value_dim, latent_dim, scale=latent_dim**-0.5),
            paged.k,
            paged.page_table,
            paged.query_starts,
            paged.kv_lens,
        )

    def absorbed(self) -> Float[Array, "tokens heads row_dim"]:
        """The queries as decode takes them."""
        q_nope, q_rope = jnp.split(self.q, (self.key.shape[1],), axis=-1)
        q_latent = jnp.einsum("thn,hnl->thl", q_nope, self.key, precision=jax.lax.Precision.HIGHEST)
        return jnp.concatenate([q_latent, q_rope], axis=-1)

    def decode_arguments(self) -> tuple[jax.Array, PageView, jax.Array, jax.Array]:
        """Positional arguments of `latent_decode_attention`; every row must have one query."""
        return self.absorbed(), self.rows, self.page_table, self.kv_lens

    def prefill_arguments(self) -> tuple[Any, ...]:
        """Positional arguments of `latent_prefill_attention`."""
        return self.q, self.key, self.value, self.rows, self.page_table, self.query_starts, self.kv_lens
