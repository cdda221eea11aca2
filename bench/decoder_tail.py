"""Times a decoder layer after its attention on one GPU, in one launch and as separate operations.

    python bench/decoder_tail.py [--tokens 1 16 64]

Weights are bf16; a program runs twelve layers whose weights do not come from the L2 cache.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from attention import ceilings

from tokenspeed_jax.pallas_kernels.decoder_tail import decoder_tail
from tokenspeed_jax.pallas_kernels.implementations import Implementation
from tokenspeed_jax.pallas_kernels.norm_rules import Norm, NormRule

# Hidden, heads x dim, inner.
SHAPES = {"Qwen3-8B": (4096, 4096, 12288), "Qwen3-4B": (2560, 4096, 9728)}
LAYERS = 12

Weights = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def layer(seed: int, hidden: int, mixed: int, inner: int) -> Weights:
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = ((hidden, mixed), (hidden,), (2 * inner, hidden), (hidden, inner))
    out, gain, gate_up, down = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
    return out / mixed**0.5, gain, gate_up / hidden**0.5, down / inner**0.5


def seconds(tokens: int, sizes: tuple[int, int, int], layers: list[Weights], name: Implementation) -> float:
    """Median seconds of one layer."""

    @jax.jit
    def run(x: jax.Array, mixed: jax.Array, layers: list[Weights]) -> jax.Array:
        for out, gain, gate_up, down in layers:
            norm = Norm(gain, NormRule(1e-6))
            stream, update = decoder_tail(x, mixed, out, norm, gate_up, down, activation="silu", implementation=name)
            x = stream if update is None else stream + update
        return x

    x, mixed = (jax.random.normal(jax.random.key(i), (tokens, size), jnp.bfloat16) for i, size in enumerate(sizes[:2]))
    run(x, mixed, layers).block_until_ready()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(8):
            out = run(x, mixed, layers)
        out.block_until_ready()
        times.append((time.perf_counter() - begin) / 8 / LAYERS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    args = parser.parse_args()
    _, read = ceilings()
    print(f"{jax.devices()[0].device_kind}, read {read / 1e9:,.0f} GB/s\n")
    print("| layer | tokens | one launch | weights read at | of the read rate | separate |\n|---|---|---|---|---|---|")
    for name, sizes in SHAPES.items():
        layers = [layer(seed, *sizes) for seed in range(LAYERS)]
        for tokens in args.tokens:
            took, separate = (seconds(tokens, sizes, layers, form) for form in ("mosaic", "xla"))
            rate = sum(weight.nbytes for weight in layers[0]) / took
            print(f"| {name} | {tokens} | {took * 1e6:.1f} us | {rate / 1e9:,.0f} GB/s | ", end="")
            print(f"{rate / read:.2f} | {separate * 1e6:.1f} us |", flush=True)


if __name__ == "__main__":
    main()
