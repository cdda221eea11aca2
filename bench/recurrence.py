"""Times recurrences on one GPU: steps against the copy rate, chunks against the peers of kernels.md, section 6.

    python bench/recurrence.py [--implementation mosaic|xla] [--quick]

32 heads with K = V = 128, bf16 inputs, float32 states unless a case says otherwise. Steps run in place on blocks in
random order, a chain of them over disjoint blocks, so that no state is found in the L2 cache; the bytes of a step are
its states, read once and written once. "peer" is the time of the fastest other implementation on an H200.
"""

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.pallas_kernels.blocks import BlockView
from tokenspeed_jax.pallas_kernels.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.linear_attention import linear_attention, linear_attention_step
from tokenspeed_jax.pallas_kernels.recurrent_problems import (
    ragged_rows,
    random_delta_rule,
    random_linear_attention,
    random_selective_scan,
)
from tokenspeed_jax.pallas_kernels.selective_scan import selective_scan

CHAIN = 4
SHAPE = {"key_heads": 32, "heads": 32, "key_dim": 128, "value_dim": 128, "dtype": jnp.bfloat16}
GDN = functools.partial(random_delta_rule, decay_per_channel=False, **SHAPE)
KDA = functools.partial(random_delta_rule, decay_per_channel=True, **SHAPE)
LINEAR = functools.partial(random_linear_attention, **SHAPE)
SELECTIVE = functools.partial(random_selective_scan, channels=8192, states=16, dtype=jnp.bfloat16)
STATE = (32, 128, 128)


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows` rows of `length` tokens, their bodies of `body`; `peer` in seconds, None where no one was measured."""

    name: str
    op: Callable[..., Any]
    make: Callable[..., Any]
    state: tuple[int, ...]
    rows: int
    length: int = 1
    peer: float | None = None
    body: int | None = None


STEPS = [
    Case("GDN step", gated_delta_rule_step, GDN, STATE, 1),
    Case("GDN step", gated_delta_rule_step, GDN, STATE, 64, peer=95e-6),
    Case("GDN step", gated_delta_rule_step, GDN, STATE, 256, peer=366e-6),
    Case("KDA step", gated_delta_rule_step, KDA, STATE, 64, peer=71e-6),
    Case("KDA step", gated_delta_rule_step, KDA, STATE, 256, peer=291e-6),
    Case("linear attention step", linear_attention_step, LINEAR, STATE, 64),
]
CHUNKS = [
    Case("GDN", gated_delta_rule, GDN, STATE, 1, 8192, 394e-6),
    Case("GDN", gated_delta_rule, GDN, STATE, 1, 32768, 1550e-6),
    Case("GDN", gated_delta_rule, GDN, STATE, 16, 512),
    Case("GDN, body and tail", gated_delta_rule, GDN, STATE, 1, 8292, body=8192),
    Case("KDA", gated_delta_rule, KDA, STATE, 1, 8192, 987e-6),
    Case("KDA", gated_delta_rule, KDA, STATE, 1, 32768, 3854e-6),
    Case("linear attention", linear_attention, LINEAR, STATE, 1, 8192),
    Case("selective scan, 8192 channels", selective_scan, SELECTIVE, (8192, 16), 1, 8192),
]


def seconds(run: Callable[[], Any], calls: int, repeats: int = 5) -> float:
    """Median time of one call; calls are queued back to back so that dispatch is hidden."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read plus written per second, of 4 GiB of random words."""
    x = jax.random.bits(jax.random.key(0), (2**30,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ 1)
    return 2 * x.nbytes / seconds(lambda: copy(x), 10)


def step_seconds(case: Case, implementation: Implementation | None) -> float:
    """Seconds of one step, its states donated."""
    rng = np.random.default_rng(0)
    inputs = case.make(rng, case.rows)
    blocks = CHAIN * case.rows
    ids = jnp.asarray(rng.permutation(np.arange(1, blocks + 1)).reshape(CHAIN, case.rows), jnp.int32)

    @functools.partial(jax.jit, donate_argnums=1)
    def run(inputs: Any, states: BlockView, ids: jax.Array) -> tuple[jax.Array, BlockView]:
        total = jnp.zeros(inputs.v.shape, inputs.v.dtype)
        for i in range(CHAIN):
            out, states = case.op(inputs, states, ids[i], ids[i], implementation=implementation)
            total = total + out
        return total, states

    held = [BlockView.from_array(jax.random.normal(jax.random.key(1), (blocks + 1, *case.state), jnp.float32))]

    def call() -> jax.Array:
        out, held[0] = run(inputs, held[0], ids)
        return out

    return seconds(call, 20) / CHAIN


def chunk_seconds(case: Case, implementation: Implementation | None) -> float:
    """Seconds of one pass over the rows, from states of zeros."""
    inputs = case.make(np.random.default_rng(0), case.rows * case.length)
    initial = jnp.zeros((case.rows, *case.state), jnp.float32)
    run = jax.jit(functools.partial(case.op, implementation=implementation))
    rows = ragged_rows([case.length] * case.rows, [case.body or case.length] * case.rows)
    return seconds(lambda: run(inputs, initial, rows).output, 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["mosaic", "xla"], default=None, help="of all")
    parser.add_argument("--quick", action="store_true", help="one step and one pass of chunks")
    options = parser.parse_args()
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {rate / 1e9:,.0f} GB/s")
    for case in STEPS[1:2] if options.quick else STEPS:
        taken = step_seconds(case, options.implementation)
        moved = 2 * 4 * case.rows * float(np.prod(case.state))
        peer = f"peer {case.peer * 1e6:6.0f} us" if case.peer else ""
        share = moved / taken / rate
        print(f"{case.name} x {case.rows:<20} {taken * 1e6:10.1f} us {share:6.2f} of copy {peer}")
    for case in CHUNKS[:1] if options.quick else CHUNKS:
        has_kernel = case.op is not selective_scan
        taken = chunk_seconds(case, options.implementation if has_kernel else None)
        peer = f"peer {case.peer * 1e6:6.0f} us, {taken / case.peer:5.1f} times its time" if case.peer else ""
        print(f"{case.name}, {case.length} tokens x {case.rows:<10} {taken * 1e6:10.1f} us {peer}")


if __name__ == "__main__":
    main()
