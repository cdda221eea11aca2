"""Times latent attention on one GPU against what its memory and its matrix units can do.

    python bench/latent_attention.py [--implementation mosaic|xla] [--quick]

Cached rows are bf16, 512 latent and 64 positional channels, in pages of 64 tokens in random order; heads have 128 key
channels from the latent and 128 value channels. Decode calls are timed absorbed, as the kernel gets them, in chains as
in `bench/attention.py`, and printed with the rate at which cached rows are read and the rate of products (scores and
outputs of all heads, 2 x (576 + 512) a row and head). Prefill calls expand the cached rows too, whose products are not
counted: the rate is that of scores and outputs, 2 x (192 + 128) a visible pair and head. Peers on one H200 (kernels.md
6): FlashInfer's FA3 kernel takes 151 us for 64 rows of 8k with 16 heads (4,006 GB/s), 250 us with 128 (584 TFLOP/s).
"""

import argparse
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from attention import L2_BYTES, PAGE, ceilings, seconds

from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.latent_attention import latent_decode_attention, latent_prefill_attention
from tokenspeed_jax.pallas_kernels.pages import PageView

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` sequences with `new` new tokens each, `length` tokens in all; one new token is decode."""

    rows: int
    new: int
    length: int
    heads: int

    @property
    def name(self) -> str:
        kind = "decode" if self.new == 1 else f"prefill {self.new} of"
        return f"{kind} {self.length} x {self.rows}, {self.heads} heads"

    @property
    def cached_bytes(self) -> int:
        return 2 * self.rows * self.length * (LATENT + ROPE)

    @property
    def flops(self) -> float:
        seen = self.new * (self.length - self.new) + self.new * (self.new + 1) / 2
        channels = 2 * LATENT + ROPE if self.new == 1 else NOPE + ROPE + VALUE
        return 2 * self.rows * seen * self.heads * channels


DECODE = [
    Case(64, 1, 8192, 16), Case(64, 1, 8192, 128),
    Case(1, 1, 8192, 16), Case(1, 1, 8192, 128), Case(16, 1, 8192, 16), Case(16, 1, 8192, 128),
    Case(256, 1, 1024, 16), Case(256, 1, 1024, 128), Case(64, 1, 32768, 16), Case(64, 1, 32768, 128),
]  # fmt: skip
PREFILL = [
    Case(1, 2048, 2048, 128), Case(1, 2048, 8192, 128), Case(1, 8192, 8192, 128), Case(1, 8192, 8192, 16),
    Case(16, 1024, 1024, 128), Case(1, 8192, 40960, 128),
]  # fmt: skip


def pages_and_tables(case: Case, chain: int) -> tuple[PageView, jax.Array]:
    """Random pages, enough that no two calls in a row find theirs in the cache, and a table for each call."""
    columns = -(-case.length // PAGE)
    needed = case.rows * columns
    pages = max(needed, int(4 * L2_BYTES / (case.cached_bytes / needed))) + 1
    rows = PageView.from_array(jax.random.normal(jax.random.key(0), (pages, PAGE, 1, LATENT + ROPE), jnp.bfloat16))
    rng = np.random.default_rng(0)
    tables = np.stack([rng.permutation(np.arange(1, pages))[:needed] for _ in range(chain)])
    return rows, jnp.asarray(tables.reshape(chain, case.rows, columns), jnp.int32)


def measure_decode(case: Case, implementation: Implementation | None) -> float:
    """Seconds of one absorbed decode call."""
    work = max(case.cached_bytes / 4e12, case.flops / 6e14)
    chain = int(np.clip(5e-3 / work, 2, 24))
    rows, tables = pages_and_tables(case, chain)
    q = jax.random.normal(jax.random.key(1), (case.rows, case.heads, LATENT + ROPE), jnp.bfloat16)
    lens = jnp.full((case.rows,), case.length, jnp.int32)

    @jax.jit
    def run(q: jax.Array, rows: PageView, tables: jax.Array) -> jax.Array:
        for i in range(chain):
            out = latent_decode_attention(
                q, rows, tables[i], lens, latent_dim=LATENT, scale=SCALE, implementation=implementation
            )
            q = q.at[:, :, :LATENT].set(out)
        return q

    calls = int(np.clip(20e-3 / (work * chain), 2, 20))
    return seconds(lambda: run(q, rows, tables), calls) / chain


def measure_prefill(case: Case, implementation: Implementation | None) -> float:
    """Seconds of one prefill call, expansion included."""
    rows, tables = pages_and_tables(case, 1)
    keys = jax.random.split(jax.random.key(1), 3)
    q = jax.random.normal(keys[0], (case.rows * case.new, case.heads, NOPE + ROPE), jnp.bfloat16)
    key, value = (
        LATENT**-0.5 * jax.random.normal(k, (case.heads, dim, LATENT), jnp.bfloat16)
        for k, dim in zip(keys[1:], (NOPE, VALUE), strict=True)
    )
    starts = jnp.arange(case.rows + 1, dtype=jnp.int32) * case.new
    lens = jnp.full((case.rows,), case.length, jnp.int32)

    @jax.jit
    def run(q: jax.Array, key: jax.Array, value: jax.Array, rows: PageView) -> jax.Array:
        return latent_prefill_attention(
            q, key, value, rows, tables[0], starts, lens, scale=SCALE, implementation=implementation
        )

    return seconds(lambda: run(q, key, value, rows), calls=2, repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["mosaic", "xla"], default=None)
    parser.add_argument("--quick", action="store_true", help="two decode cases and no prefill")
    options = parser.parse_args()
    copy, read = ceilings()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {copy / 1e9:,.0f} GB/s, read {read / 1e9:,.0f}")
    for case in DECODE[:2] if options.quick else DECODE:
        taken = measure_decode(case, options.implementation)
        rate = case.cached_bytes / taken
        print(
            f"{case.name:<40} {taken * 1e6:10.1f} us {rate / 1e9:8,.0f} GB/s {rate / read:6.2f} of read "
            f"{case.flops / taken / 1e12:6,.0f} TFLOP/s"
        )
    for case in [] if options.quick else PREFILL:
        taken = measure_prefill(case, options.implementation)
        print(f"{case.name:<40} {taken * 1e6:10.1f} us {case.flops / taken / 1e12:8,.0f} TFLOP/s")


if __name__ == "__main__":
    main()
