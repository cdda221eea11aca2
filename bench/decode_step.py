"""Decode steps of a Qwen3-8B-shaped model with random bf16 weights, beside the bandwidth floor.

    python bench/decode_step.py [--batch 1 16 64 256] [--layers 36]

The floor reads the weights (without the embedding table) and the batch's keys and values once, at the copy rate that
this run measures first. Steps are the engine's own compiled decode programs, fed as in serving: dispatched one after
another, each on the planes and the device state of the one before.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tokenspeed_jax import Engine, EngineConfig
from tokenspeed_jax.engine.batch import BatchLayout
from tokenspeed_jax.engine.memory import tree_bytes
from tokenspeed_jax.models.registry import MODEL_FAMILIES

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
CONTEXT = {1: 2048, 16: 2048, 64: 2048, 256: 1024}


def copy_rate() -> float:
    """Bytes per second of a large device copy, read and write counted."""
    x = jnp.zeros(1 << 30, jnp.float32)
    copy = jax.jit(lambda a: a + 1.0)
    copy(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        y = copy(x)
    y.block_until_ready()
    return 10 * 2 * x.nbytes / (time.perf_counter() - start)


def time_decode(engine: Engine, batch: int, context: int, steps: int = 30) -> float:
    """Median-of-three milliseconds per decode step of `batch` rows at `context` tokens."""
    programs, builder = engine._assembly.programs, engine._assembly.loop._builder
    bucket = builder._buckets.decode(batch, "greedy")
    layout: BatchLayout = builder.layout(bucket)
    buffer = np.zeros(layout.size, np.int32)
    view = layout.views(buffer)
    view["tokens"][:batch] = -1
    view["kv_lens"][:batch] = context
    view["ints"][0, :batch] = np.arange(1, batch + 1)
    view["ints"][layout_row("samples"), :batch] = 1
    pages = iter(np.random.default_rng(0).permutation(np.arange(1, programs.model.arena.plan.num_lcm_blocks + 1)))
    span = -(-context // programs.model.arena.plan.prefix_granularity)
    for group, table in programs.device_state.tables.items():
        rows = np.zeros(table.shape, np.int32)
        rows[1 : batch + 1, :span] = [[next(pages) for _ in range(span)] for _ in range(batch)]
        programs.device_state.tables[group] = jax.device_put(rows)
    for group, _ in layout.table_changes:
        view[f"changes.{group}"][0] = np.iinfo(np.int32).max  # nothing changes
    step = programs.compiled(layout)
    arena = programs.model.arena
    device_buffer = jax.device_put(buffer)

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            arena.planes, programs.device_state, out = step(
                programs.weights, arena.planes, programs.device_state, device_buffer
            )
        out.block_until_ready()
        return (time.perf_counter() - start) / count * 1e3

    run(5)
    return float(np.median([run(steps) for _ in range(3)]))


def layout_row(column: str) -> int:
    """Row of an integer sampling column in the batch buffer."""
    from tokenspeed_jax.engine.batch import _INT_COLUMNS

    return _INT_COLUMNS.index(column)


def random_model(layers: int) -> nnx.Module:
    """The model with random weights, made on the device."""
    family = MODEL_FAMILIES["Qwen3ForCausalLM"]
    config = family.config.from_hf(QWEN3_8B | {"num_hidden_layers": layers})
    return family.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    rate = copy_rate()
    print(f"device {jax.devices()[0].device_kind}, copy {rate / 1e9:.0f} GB/s", flush=True)
    model = random_model(args.layers)
    start = time.perf_counter()
    engine = Engine.from_model(
        model,
        EngineConfig(
            model="qwen3-8b-shaped",
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=2048,
            kv_cache_memory_bytes=48 << 30 if args.layers == 36 else 8 << 30,
            warmup=False,
        ),
    )
    weights = tree_bytes(engine._assembly.programs.weights)
    embedding = QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"] * 2
    print(f"engine up in {time.perf_counter() - start:.1f} s, weights {weights / 1e9:.2f} GB", flush=True)
    print("| batch | context | ms per step | floor ms | fraction of floor |\n|---|---|---|---|---|")
    for batch in args.batch:
        context = CONTEXT.get(batch, 1024)
        kv = batch * context * args.layers * 2 * 8 * 128 * 2
        floor = (weights - embedding + kv) / rate * 1e3
        took = time_decode(engine, batch, context)
        print(f"| {batch} | {context} | {took:.2f} | {floor:.2f} | {floor / took:.2f} |", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
