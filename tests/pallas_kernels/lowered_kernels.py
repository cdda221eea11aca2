"""A process that lowers programs with Mosaic kernels for an H200, on any machine, and prints a digest of each;
`python lowered_kernels.py DEPTH`, where DEPTH is how many calls deep it does so."""

import hashlib
import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed_jax.pallas_kernels.decode_attention.mosaic import decode_attention_mosaic
from tokenspeed_jax.pallas_kernels.prefill_attention.mosaic import prefill_attention_mosaic
from tokenspeed_jax.pallas_kernels.problems import PagedProblem
from tokenspeed_jax.pallas_kernels.scores import ScoreRule

RULE = ScoreRule(0.1)


def lowered() -> Iterator[str]:
    """Digests of the StableHLO of two programs; the Mosaic kernels are bytes in it."""
    for rows in (1, 2):
        problem = PagedProblem.random(
            np.random.default_rng(0), query_lens=[1] * rows, kv_lens=[100] * rows, num_heads=8, num_kv_heads=2,
            head_dim=64, dtype=jnp.bfloat16,
        )  # fmt: skip
        program = jax.jit(partial(attend, problem)).trace().lower(lowering_platforms=("cuda",)).as_text()
        assert program.count("custom_call @mosaic_gpu") >= 2
        yield hashlib.sha256(program.encode()).hexdigest()


def attend(problem: PagedProblem) -> tuple[jax.Array, jax.Array]:
    decode, prefill = problem.decode_arguments(), problem.prefill_arguments()
    return decode_attention_mosaic(*decode, RULE, None), prefill_attention_mosaic(*prefill, RULE, None)


def at_depth(depth: int) -> list[str]:
    return at_depth(depth - 1) if depth else list(lowered())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    print("\n".join(at_depth(int(sys.argv[1]))))
