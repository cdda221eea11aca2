"""Times the kernels around a layer's products, attention prologue and residual norm, against the copy rate.

    python bench/prologue.py [--implementation mosaic|xla]

bf16, shapes of Qwen3-8B: 32 query and 8 KV heads of 128 with norms and rotation, rows of 4096. Kernels run in chains of
one program; the time of a kernel is the chain's over its length, launches included: what 8,192 tokens take is memory's,
what one token takes is the launch's. Bytes are those that must move: projections and angles read, queries, keys and
values written; stream and update read, stream and norm written. "plain" is the time of XLA's kernels for the same.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recurrence import copy_rate, seconds

from tokenspeed_jax.pallas_kernels.add_norm import add_norm
from tokenspeed_jax.pallas_kernels.attention_prologue import AttentionPrologue, attention_prologue
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule
from tokenspeed_jax.pallas_kernels.pages import PageView
from tokenspeed_jax.pallas_kernels.rotation import Rotation

HEADS, KV_HEADS, DIM, HIDDEN, PAGE = 32, 8, 128, 4096, 64
TOKENS = (1, 64, 256, 2048, 8192)
RULE = NormRule(1e-6)


def chain_length(tokens: int) -> int:
    """Kernels of one program: few where each is long."""
    return 48 if tokens <= 256 else 8


def prologue_seconds(tokens: int, implementation: Implementation | None) -> float:
    """Time of one attention prologue, its cache written in place."""
    keys, length = jax.random.split(jax.random.key(0), 4), chain_length(tokens)
    pages = tokens // PAGE + 8
    planes = [jnp.zeros((pages, PAGE * KV_HEADS * DIM * 2), jnp.uint8) for _ in "kv"]
    # One set of projections per kernel, so that none is found in the L2 cache.
    columns = (HEADS + 2 * KV_HEADS) * DIM
    projected = jax.random.normal(keys[0], (length, tokens, columns), jnp.bfloat16)
    angles = jax.random.normal(keys[1], (tokens, DIM // 2), jnp.float32)
    weights = 1 + 0.1 * jax.random.normal(keys[2], (2, DIM), jnp.bfloat16)
    slots = jnp.asarray(PAGE + np.random.default_rng(0).permutation((pages - 1) * PAGE)[:tokens], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(k: jax.Array, v: jax.Array, projected: list[jax.Array], angles: jax.Array) -> Any:
        prologue = AttentionPrologue(Rotation(jnp.cos(angles), jnp.sin(angles)), *(Norm(w, RULE) for w in weights))
        keys, values = (PageView(plane, (PAGE, KV_HEADS, DIM), "bfloat16") for plane in (k, v))
        queries = []
        for rows in projected:
            q, keys, values = attention_prologue(
                rows, keys, values, slots, prologue, num_heads=HEADS, implementation=implementation
            )
            queries.append(q)
        return queries, [keys.plane, values.plane]

    rows = list(projected)

    def call() -> Any:
        queries, planes[:] = run(*planes, rows, angles)
        return queries

    return seconds(call, 10) / length


def add_norm_seconds(tokens: int, implementation: Implementation | None) -> float:
    """Time of one residual sum and norm; each takes the sum and the norm of the one before."""
    keys, length = jax.random.split(jax.random.key(0), 3), chain_length(tokens)
    x, update = (jax.random.normal(key, (tokens, HIDDEN), jnp.bfloat16) for key in keys[:2])
    norm = Norm(1 + 0.1 * jax.random.normal(keys[2], (HIDDEN,), jnp.bfloat16), RULE)

    @jax.jit
    def run(x: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
        for _ in range(length):
            x, update = jax.lax.optimization_barrier(add_norm(x, update, norm, implementation=implementation))
        return x, update

    return seconds(lambda: run(x, update), 10) / length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["mosaic", "xla"], default=None)
    implementation = parser.parse_args().implementation
    rate = copy_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copy {rate / 1e9:,.0f} GB/s\n")
    print("| kernel | tokens | us | GB/s | of copy | plain us | plain / us |\n|---|---|---|---|---|---|---|")
    heads = 2 * (HEADS + 2 * KV_HEADS) * DIM
    cases = (
        ("attention prologue", prologue_seconds, 2 * heads + 4 * DIM),
        ("residual sum and norm", add_norm_seconds, 4 * 2 * HIDDEN),
    )
    for name, measure, token_bytes in cases:
        for tokens in TOKENS:
            taken, plain = measure(tokens, implementation), measure(tokens, "xla")
            moved = tokens * token_bytes / taken
            cells = (f"{taken * 1e6:.2f}", f"{moved / 1e9:,.0f}", f"{moved / rate:.2f}", f"{plain * 1e6:.2f}")
            print(f"| {name} | {tokens} | {' | '.join(cells)} | {plain / taken:.2f} |", flush=True)


if __name__ == "__main__":
    main()
