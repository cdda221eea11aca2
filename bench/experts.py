"""Times the experts of one mixture-of-experts layer on one GPU against reading their weights and multiplying.

    python bench/experts.py [--implementation mosaic|xla] [--quick] [--parts]

Random bf16 weights; unless a case says otherwise 128 experts of 2048 x 768, 8 per token, chosen evenly at random. Each
case runs as a chain, every call's output being the next call's tokens. The floor is the larger of two times: reading
the chosen experts' weights once at the read rate of the same run, and the products at 790 TFLOP/s. `peer` is the best
kernel known for the case (Triton, from torch), measured on another H200 of the same kind.

With `--parts` the kernels around the products run alone too, tokens to their experts' tiles and the weighted sum back,
against moving each row at the read rate: below the cache's 50 MB they may be faster than that.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.pallas_kernels.experts import expert_mlp
from tokenspeed_jax.pallas_kernels.experts.combination import combine_mosaic
from tokenspeed_jax.pallas_kernels.experts.dispatch import dispatch_mosaic
from tokenspeed_jax.pallas_kernels.experts.problems import ExpertProblem
from tokenspeed_jax.pallas_kernels.experts.tiles import mosaic_tile_rows
from tokenspeed_jax.pallas_kernels.implementations import Implementation

PRODUCT_RATE = 790e12  # bf16 operations per second of a large cuBLAS product on an H200
CALLS = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer's experts and a step's tokens; `peer_us` as in the table that this prints."""

    tokens: int
    peer_us: float | None = None
    num_experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    inner: int = 768

    @property
    def name(self) -> str:
        return f"{self.tokens} tokens, {self.top_k} of {self.num_experts} experts, {self.hidden} x {self.inner}"

    @property
    def flops(self) -> float:
        return 6 * self.tokens * self.top_k * self.hidden * self.inner

    def weight_bytes(self, chosen: int) -> float:
        """Of so many experts."""
        return 6 * chosen * self.hidden * self.inner

    @property
    def moved_bytes(self) -> float:
        """Of reading each token and writing its copies, and of the way back."""
        return 4 * self.tokens * (self.top_k + 1) * self.hidden

    def problem(self) -> ExpertProblem:
        return ExpertProblem.random(
            np.random.default_rng(0), tokens=self.tokens, top_k=self.top_k, num_experts=self.num_experts,
            hidden=self.hidden, inner=self.inner, dtype=jnp.bfloat16,
        )  # fmt: skip


CASES = [
    Case(1), Case(16), Case(64, 287), Case(512, 321), Case(2048), Case(8192, 1346),
    Case(64, num_experts=256, hidden=3072, inner=1536), Case(8192, num_experts=256, hidden=3072, inner=1536),
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


def read_rate() -> float:
    """Bytes per second of reading 4 GiB of random words."""
    x = jax.random.bits(jax.random.key(0), (2**30,), jnp.uint32)
    read = jax.jit(lambda x: jnp.max(x.reshape(2**15, -1), axis=1))
    return x.nbytes / seconds(lambda: read(x), 10)


def measure(case: Case, implementation: Implementation | None, rate: float) -> tuple[float, float]:
    """Seconds of one call, and of its floor."""
    problem = case.problem()
    chosen = len(np.unique(np.asarray(problem.expert_ids)))
    floor = max(case.weight_bytes(chosen) / rate, case.flops / PRODUCT_RATE)
    chain = int(np.clip(5e-3 / floor, 2, 16))

    @jax.jit
    def run(x: jax.Array, weights: tuple[jax.Array, ...], choices: tuple[jax.Array, ...]) -> jax.Array:
        for _ in range(chain):
            x = expert_mlp(x, *weights, *choices, implementation=implementation)
        return x

    x, gate_up, down, *choices = problem.arguments()
    return seconds(lambda: run(x, (gate_up, down), tuple(choices)), CALLS) / chain, floor


def measure_moves(case: Case) -> float:
    """Seconds of one way of all tokens to their tiles and back, without products."""
    problem = case.problem()
    rows = mosaic_tile_rows(case.tokens * case.top_k, case.num_experts)
    chain = 8

    @jax.jit
    def move(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        x_slots, tiles = dispatch_mosaic(x, ids, case.num_experts, rows)
        return combine_mosaic(x_slots, tiles.slot_of_choice, weights)

    @jax.jit
    def run(x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        for _ in range(chain):
            x = move(x, ids, weights)
        return x

    return seconds(lambda: run(problem.x, problem.expert_ids, problem.expert_weights), CALLS) / chain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementation", choices=["mosaic", "xla"], default=None)
    parser.add_argument("--quick", action="store_true", help="one case")
    parser.add_argument("--parts", action="store_true", help="the kernels around the products too")
    options = parser.parse_args()
    rate = read_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: read {rate / 1e9:,.0f} GB/s")
    for case in CASES[2:3] if options.quick else CASES:
        taken, floor = measure(case, options.implementation, rate)
        peer = "" if case.peer_us is None else f", peer {case.peer_us:,.0f} us"
        print(
            f"{case.name:<50} {taken * 1e6:9.1f} us, {floor / taken:.2f} of the floor of {floor * 1e6:,.1f} us"
            f" ({case.flops / taken / 1e12:,.0f} TFLOP/s){peer}"
        )
        if options.parts:
            moves, floor = measure_moves(case), case.moved_bytes / rate
            print(f"    tokens to tiles and back {moves * 1e6:29.1f} us, {floor / moves:.2f} of {floor * 1e6:,.1f} us")


if __name__ == "__main__":
    main()
