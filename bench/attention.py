"""Times paged attention on one GPU against what its memory and its matrix units can do.

    python bench/attention.py [--implementation mosaic|xla] [--quick]

Keys and values are bf16 in pages of 64 tokens in random order; 32 query heads, 8 KV heads, head dim 128 unless a case
says otherwise. Each case runs as a chain, every call's output being the next call's queries, over changing page
tables, so that a small case does not read from the L2 cache. The table's last column is the fraction of the copy
rate (bytes of keys and values over time) for decode, TFLOP/s for prefill.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.pallas_kernels.decode_attention import decode_attention
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.prefill_attention import prefill_attention

PAGE = 64
L2_BYTES = 60e6


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` sequences with `new` new tokens each, `length` tokens in all; one new token is decode."""

    rows: int
    new: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        kind = "decode" if self.new == 1 else f"prefill {self.new} of"
        shape = (
            ""
            if (self.heads, self.kv_heads, self.dim) == (32, 8, 128)
            else (f", {self.heads}/{self.kv_heads} heads of {self.dim}")
        )
        return f"{kind} {self.length} x {self.rows}{shape}"

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * self.rows * self.length * self.kv_heads * self.dim

    @property
    def flops(self) -> float:
        seen = self.new * (self.length - self.new) + self.new * (self.new + 1) / 2
        return 4 * self.rows * seen * self.heads * self.dim


DECODE = [
    Case(1, 1, 1024), Case(1, 1, 8192), Case(1, 1, 32768),
    Case(16, 1, 1024), Case(16, 1, 8192), Case(16, 1, 32768),
    Case(64, 1, 1024), Case(64, 1, 8192), Case(64, 1, 32768),
    Case(256, 1, 1024), Case(256, 1, 8192),
    Case(64, 1, 8192, 9, 3, 64), Case(64, 1, 8192, 16, 8, 256),
]  # fmt: skip
PREFILL = [
    Case(1, 2048, 2048), Case(1, 8192, 8192), Case(1, 32768, 32768), Case(1, 8192, 40960), Case(16, 512, 2048),
    Case(1, 8192, 8192, 9, 3, 64), Case(1, 8192, 8192, 16, 8, 256),
]  # fmt: skip


def seconds(run: Callable[[], jax.Array], calls: int, repeats: int = 5) -> float:
    """Median time of one call; calls are queued back to back so that dispatch is hidden."""
    run().block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        out.block_until_ready()
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Copy rate (bytes read plus written) and read rate, in bytes/s, of 4 GiB of random words."""
    x = jax.random.bits(jax.random.key(0), (2**30,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ 1)
    read = jax.jit(lambda x: jnp.max(x.reshape(2**15, -1), axis=1))
    return 2 * x.nbytes / seconds(lambda: copy(x), 10), x.nbytes / seconds(lambda: read(x), 10)


def measure(case: Case, implementation: Implementation | None, chain: int | None = None) -> float:
    """Seconds of one attention call."""
    rng = np.random.default_rng(0)
    columns = -(-case.length // PAGE)
    needed = case.rows * columns
    # Enough pages that no two calls in a row find theirs in the cache.
    page_bytes = case.kv_bytes / needed
    pages = max(needed, int(4 * L2_BYTES / page_bytes)) + 1
    work = case.kv_bytes / 4e12 + case.flops / 6e14
    chain = chain or int(np.clip(5e-3 / work, 2, 24))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (pages, PAGE, case.kv_heads, case.dim)
    k, v = (PageView.from_array(jax.random.normal(key, shape, jnp.bfloat16)) for key in keys[:2])
    q = jax.random.normal(keys[2], (case.rows * case.new, case.heads, case.dim), jnp.bfloat16)
    tables = np.stack([rng.permutation(np.arange(1, pages))[:needed] for _ in range(chain)])
    tables = jnp.asarray(tables.reshape(chain, case.rows, columns), jnp.int32)
    lens = jnp.full((case.rows,), case.length, jnp.int32)
    starts = jnp.arange(case.rows + 1, dtype=jnp.int32) * case.new
    scale = case.dim**-0.5

    @jax.jit
    def run(q: jax.Array, k: PageView, v: PageView, tables: jax.Array) -> jax.Array:
        for i in range(chain):
            if case.new == 1:
                q = decode_attention(q, k, v, tables[i], lens, scale=scale, implementation=implementation)
            else:
                q = prefill_attention(q, k, v, tables[i], starts, lens, scale=scale, implementation=implementation)
        return q

    calls = int(np.clip(20e-3 / (work * chain), 2, 20))
    return seconds(lambda: run(q, k, v, tables), calls) / chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["mosaic", "xla"], default=None)
    parser.add_argument("--quick", action="store_true", help="one decode and one prefill case")
    options = parser.parse_args()
    copy, read = ceilings()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {copy / 1e9:,.0f} GB/s, read {read / 1e9:,.0f}")
    for case in DECODE[7:8] if options.quick else DECODE:
        time_taken = measure(case, options.implementation)
        rate = case.kv_bytes / time_taken
        print(f"{case.name:<40} {time_taken * 1e6:10.1f} us {rate / 1e9:8,.0f} GB/s {rate / copy:6.2f} of copy")
    for case in PREFILL[1:2] if options.quick else PREFILL:
        time_taken = measure(case, options.implementation)
        print(f"{case.name:<40} {time_taken * 1e6:10.1f} us {case.flops / time_taken / 1e12:8,.0f} TFLOP/s")


if __name__ == "__main__":
    main()
