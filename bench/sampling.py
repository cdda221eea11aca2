"""Times drawing the next tokens of a batch against reading the logits once.

    python bench/sampling.py [--rows 1 64 256] [--modes greedy temperature top-k top-p all]

A vocabulary of 151,936, as Qwen3's; logits with the exponential tail of a language model's. A time is that of one draw
in a chain of them in one program, each of logits of its own, with log-probabilities and the 20 most probable tokens
(greedy: the token's log-probability). "all": top-k 50, top-p 0.95, min-p 0.02, and the three penalties of requests that
have generated 200 tokens, which adds 9 bytes a token of state to the 4 of its logit. "read" is the time in which the
logits are read at the rate of a maximum over 4 GiB.
"""

import argparse
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from attention import ceilings
from recurrence import seconds

from tokenspeed_jax.engine.sampler import RowSampling, sample, sample_greedy
from tokenspeed_jax.engine.sampling_state import SamplingState, init_sampling_state

VOCAB = 151_936
ROWS = (1, 64, 256)
MODES = ("greedy", "temperature", "top-k", "top-p", "all")
CHAIN = 4


def row_sampling(rows: int, mode: str) -> RowSampling:
    """The parameters of a mode, the same in every row; each row has a seed of its own."""

    def each(value: float) -> jax.Array:
        return jnp.full(rows, value, jnp.float32)

    plain = RowSampling(
        slot=jnp.arange(1, rows + 1, dtype=jnp.int32),
        temperature=each(0.8),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=each(1.0),
        min_p=each(0.0),
        presence=each(0.0),
        frequency=each(0.0),
        repetition=each(1.0),
        seed=jnp.asarray(np.random.default_rng(0).integers(0, 2**31, (rows, 2)), jnp.uint32),
        output_index=jnp.full(rows, 200, jnp.int32),
        min_tokens=jnp.zeros(rows, jnp.int32),
        samples=jnp.ones(rows, jnp.bool_),
        uses_history=jnp.zeros(rows, jnp.bool_),
    )
    if mode in ("top-k", "all"):
        plain = replace(plain, top_k=jnp.full(rows, 50, jnp.int32))
    if mode in ("top-p", "all"):
        plain = replace(plain, top_p=each(0.95))
    if mode == "all":
        history = {"presence": each(0.2), "frequency": each(0.1), "repetition": each(1.1)}
        plain = replace(plain, min_p=each(0.02), uses_history=jnp.ones(rows, jnp.bool_), **history)
    return plain


def draw_seconds(rows: int, mode: str) -> float:
    """Time of one draw for a batch."""
    parameters = row_sampling(rows, mode)
    logits = [2.0 * jax.random.exponential(jax.random.key(i), (rows, VOCAB)) for i in range(CHAIN)]
    empty = init_sampling_state(rows, VOCAB)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (rows, 200))
    counts = empty.output_counts.at[np.arange(1, rows + 1)[:, None], tokens].add(1)
    state = [SamplingState(counts, empty.token_flags, empty.logit_bias)]

    def run(state: SamplingState, parameters: RowSampling, logits: list[jax.Array]) -> tuple[SamplingState, list]:
        results = []
        for i in range(CHAIN):
            matrix, state, results = jax.lax.optimization_barrier((logits[i], state, results))
            row = replace(parameters, output_index=parameters.output_index + i)
            result, state = (sample_greedy(matrix), state) if mode == "greedy" else sample(matrix, row, state)
            results.append(result)
        return state, results

    compiled = jax.jit(run, donate_argnums=0)

    def call() -> list:
        state[0], results = compiled(state[0], parameters, logits)
        return results

    return seconds(call, 10) / CHAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    rate = ceilings()[1]
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: read {rate / 1e9:,.0f} GB/s\n")
    print("| rows | mode | us | read us | us / read us |\n|---|---|---|---|---|")
    for rows in args.rows:
        read = rows * VOCAB * 4 / rate
        for mode in args.modes:
            taken = draw_seconds(rows, mode)
            print(f"| {rows} | {mode} | {taken * 1e6:.1f} | {read * 1e6:.1f} | {taken / read:.1f} |", flush=True)


if __name__ == "__main__":
    main()
