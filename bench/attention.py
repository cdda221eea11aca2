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
from typing import Any

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
    """Sequences with new tokens each, of a length in all; one new token in each is decode.

    Attributes:
        groups: (sequences, new tokens, length) of sequences that are alike.
        label: names groups that are too many to spell out.
    """

    groups: tuple[tuple[int, int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    label: str = ""

    @property
    def decodes(self) -> bool:
        return all(new == 1 for _, new, _ in self.groups)

    @property
    def name(self) -> str:
        kind = "decode" if self.decodes else "prefill"
        news = "{length} x {rows}" if self.decodes else "{new} of {length} x {rows}"
        words = [self.label or " and ".join(news.format(rows=r, new=n, length=t) for r, n, t in self.groups)]
        if (self.heads, self.kv_heads, self.dim) != (32, 8, 128):
            words.append(f"{self.heads}/{self.kv_heads} heads of {self.dim}")
        words += [f"window {self.sliding_window}"] * (self.sliding_window is not None)
        words += ["soft cap"] * (self.soft_cap is not None) + ["sinks"] * self.sinks
        return f"{kind} {', '.join(words)}"

    @property
    def rows(self) -> list[tuple[int, int]]:
        """New tokens and length of each sequence."""
        return [(new, length) for count, new, length in self.groups for _ in range(count)]

    @property
    def kv_bytes(self) -> int:
        """Of keys and values that some token sees."""
        window = self.sliding_window or 2**31
        seen = sum(min(length, window + new - 1) for new, length in self.rows)
        return 2 * 2 * seen * self.kv_heads * self.dim

    @property
    def flops(self) -> float:
        window = self.sliding_window or 2**31
        seen = sum(float(np.minimum(np.arange(length - new, length) + 1, window).sum()) for new, length in self.rows)
        return 4 * seen * self.heads * self.dim


def alike(rows: int, new: int, length: int, heads: int = 32, kv_heads: int = 8, dim: int = 128, **options: Any) -> Case:
    return Case(((rows, new, length),), heads, kv_heads, dim, **options)


def prompts(label: str, *, prefixes: bool) -> Case:
    """16 prompts of 100 to 2,000 tokens, alone or each over up to 3,200 cached ones."""
    rng = np.random.default_rng(1)
    lens, cached = rng.integers(100, 2001, 16), rng.integers(0, 33, 16) * 100 * prefixes
    return Case(tuple((1, int(n), int(n + c)) for n, c in zip(lens, cached, strict=True)), label=label)


DECODE = [
    alike(1, 1, 1024), alike(1, 1, 8192), alike(1, 1, 32768),
    alike(16, 1, 1024), alike(16, 1, 8192), alike(16, 1, 32768),
    alike(64, 1, 1024), alike(64, 1, 8192), alike(64, 1, 32768),
    alike(256, 1, 1024), alike(256, 1, 8192),
    Case(((1, 1, 32768), (63, 1, 1024))),
    alike(64, 1, 8192, sliding_window=4096), alike(64, 1, 8192, sinks=True), alike(64, 1, 8192, soft_cap=30.0),
    alike(64, 1, 8192, 9, 3, 64), alike(64, 1, 8192, 16, 8, 256),
]  # fmt: skip
PREFILL = [
    alike(1, 2048, 2048), alike(1, 8192, 8192), alike(1, 32768, 32768), alike(1, 8192, 40960), alike(16, 512, 2048),
    prompts("16 prompts of 100 to 2,000", prefixes=False), prompts("16 prompts over prefixes", prefixes=True),
    # Decode rows that ride in a prefill step.
    Case(((1, 2048, 2048), (64, 1, 4096))),
    alike(1, 8192, 8192, sliding_window=1024), alike(1, 32768, 32768, sliding_window=4096),
    alike(1, 8192, 8192, sinks=True), alike(1, 8192, 8192, soft_cap=30.0),
    alike(1, 8192, 8192, 9, 3, 64), alike(1, 8192, 8192, 64, 8, 64), alike(1, 8192, 8192, 16, 8, 256),
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
    columns = max(-(-length // PAGE) for _, length in case.rows)
    needed = len(case.rows) * columns
    # Enough pages that no two calls in a row find theirs in the cache.
    page_bytes = 2 * 2 * PAGE * case.kv_heads * case.dim
    pages = max(needed, int(4 * L2_BYTES / page_bytes)) + 1
    work = case.kv_bytes / 4e12 + case.flops / 6e14
    chain = chain or int(np.clip(5e-3 / work, 2, 24))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (pages, PAGE, case.kv_heads, case.dim)
    k, v = (PageView.from_array(jax.random.normal(key, shape, jnp.bfloat16)) for key in keys[:2])
    tokens = sum(new for new, _ in case.rows)
    # Steps come in buckets: what the prompts leave of theirs is padding.
    padded = tokens if case.decodes else -(-tokens // PAGE) * PAGE
    q = jax.random.normal(keys[2], (padded, case.heads, case.dim), jnp.bfloat16)
    tables = np.stack([rng.permutation(np.arange(1, pages))[:needed] for _ in range(chain)])
    tables = jnp.asarray(tables.reshape(chain, len(case.rows), columns), jnp.int32)
    lens = jnp.asarray([length for _, length in case.rows], jnp.int32)
    starts = jnp.asarray(np.cumsum([0, *(new for new, _ in case.rows)]), jnp.int32)
    options = {
        "scale": case.dim**-0.5,
        "sliding_window": case.sliding_window,
        "soft_cap": case.soft_cap,
        "sinks": jnp.linspace(-2.0, 4.0, case.heads, dtype=jnp.bfloat16) if case.sinks else None,
        "implementation": implementation,
    }

    @jax.jit
    def run(q: jax.Array, k: PageView, v: PageView, tables: jax.Array) -> jax.Array:
        for i in range(chain):
            if case.decodes:
                q = decode_attention(q, k, v, tables[i], lens, **options)
            else:
                q = prefill_attention(q, k, v, tables[i], starts, lens, **options)
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
        print(f"{case.name:<56} {time_taken * 1e6:10.1f} us {rate / 1e9:8,.0f} GB/s {rate / copy:6.2f} of copy")
    for case in PREFILL[1:2] if options.quick else PREFILL:
        time_taken = measure(case, options.implementation)
        print(f"{case.name:<56} {time_taken * 1e6:10.1f} us {case.flops / time_taken / 1e12:8,.0f} TFLOP/s")


if __name__ == "__main__":
    main()
