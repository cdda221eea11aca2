"""Times linear layers of few tokens on one GPU beside reading their weights once, and beside XLA's product.

    python bench/linear.py [--tokens 32 64]

Weights are bf16 and rotate, so that none comes from the L2 cache; a program runs twelve products.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from attention import ceilings

from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.linear import GateActivation, linear

# Rows of the weight, input channels, gate: the layers of Qwen3-8B.
SHAPES: dict[str, tuple[int, int, GateActivation | None]] = {
    "qkv 4096 -> 6144": (6144, 4096, None),
    "out 4096 -> 4096": (4096, 4096, None),
    "gate and up 4096 -> 12288": (24576, 4096, "silu"),
    "down 12288 -> 4096": (4096, 12288, None),
}
WEIGHTS = 12


def seconds(tokens: int, outputs: int, channels: int, gate: GateActivation | None, name: Implementation) -> float:
    """Median seconds of one product."""
    one = jax.jit(lambda x, w: linear(x, w, gate=gate, implementation=name))
    x = jax.random.normal(jax.random.key(tokens), (tokens, channels), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), WEIGHTS)
    weights = [jax.random.normal(key, (outputs, channels), jnp.bfloat16) / channels**0.5 for key in keys]
    run = jax.jit(lambda x, weights: [one(x, w) for w in weights])
    jax.block_until_ready(run(x, weights))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(8):
            out = run(x, weights)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / 8 / WEIGHTS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64])
    args = parser.parse_args()
    _, read = ceilings()
    print(f"{jax.devices()[0].device_kind}, read {read / 1e9:,.0f} GB/s\n")
    print("| product | tokens | time | weights read at | of the read rate | XLA |\n|---|---|---|---|---|---|")
    for case, (outputs, channels, gate) in SHAPES.items():
        for tokens in args.tokens:
            took = seconds(tokens, outputs, channels, gate, "mosaic")
            peer = seconds(tokens, outputs, channels, gate, "xla")
            rate = 2 * outputs * channels / took
            print(f"| {case} | {tokens} | {took * 1e6:.1f} us | {rate / 1e9:,.0f} GB/s | ", end="")
            print(f"{rate / read:.2f} | {peer * 1e6:.1f} us |", flush=True)


if __name__ == "__main__":
    main()
