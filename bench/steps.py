"""Whole steps of models with random bf16 weights, beside what the GPU's memory and matrix units allow.

    python bench/steps.py [--model dense moe hybrid] [--case decode prefill generate] [--profile] [--json FILE]

Models are Qwen3-8B-shaped (dense), Qwen3-30B-A3B-shaped (moe), and Qwen3-Next-80B-A3B-shaped with 12 of its 48 layers
(hybrid). Floors: a decode step reads the weights (without the embedding table, and of the experts those that a
uniform router touches), the keys and values, and reads and writes recurrent states, once at the read rate measured
first; a prefill does its products at 790 TFLOP/s, what a large product reaches on an H200.

- decode: a real batch is prefilled, and its decode step, as the engine built it, is dispatched again and again.
- prefill: `Engine.generate` with one new token, planning, dispatch and reply included.
- generate: 256 requests of 1,024 tokens in and 256 out at once, everything included.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import itertools
import json
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tokenspeed_jax import Engine, EngineConfig, SamplingParams
from tokenspeed_jax.cache.resident_tables import Tables
from tokenspeed_jax.engine.batch import BuiltBatch
from tokenspeed_jax.engine.memory import tree_bytes
from tokenspeed_jax.engine.step import DeviceOutputs
from tokenspeed_jax.models.registry import MODEL_FAMILIES

MATRIX_RATE = 790e12
REPLAYED = 30

EVERYWHERE = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
QWEN3_8B = EVERYWHERE | {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B = EVERYWHERE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
QWEN3_NEXT = EVERYWHERE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model to time.

    Attributes:
        decode: (rows, context) of its decode cases.
        arena_bytes: of the cache.
    """

    hf: dict[str, Any]
    decode: tuple[tuple[int, int], ...]
    arena_bytes: int

    @property
    def attention_layers(self) -> int:
        return self.hf["num_hidden_layers"] // self.hf.get("full_attention_interval", 1)

    def decode_bytes(self, weights: int, rows: int, context: int) -> float:
        """Fewest bytes that one decode step moves."""
        hf = self.hf
        read = weights - 2 * hf["vocab_size"] * hf["hidden_size"]
        if experts := hf.get("num_experts"):
            missed = (1 - hf["num_experts_per_tok"] / experts) ** rows
            one = 2 * 3 * hf["hidden_size"] * hf["moe_intermediate_size"]
            read -= missed * experts * one * hf["num_hidden_layers"]
        read += rows * context * self.attention_layers * 2 * hf["num_key_value_heads"] * hf["head_dim"] * 2
        if heads := hf.get("linear_num_value_heads"):
            state = heads * hf["linear_key_head_dim"] * hf["linear_value_head_dim"] * 4
            read += 2 * rows * state * (hf["num_hidden_layers"] - self.attention_layers)
        return read

    def prefill_flops(self, weights: int, rows: int, tokens: int) -> float:
        """Products of a dense model for `rows` prompts of `tokens`, causal."""
        hf = self.hf
        parameters = weights / 2 - 2 * hf["vocab_size"] * hf["hidden_size"]
        attention = 2 * tokens**2 * hf["num_attention_heads"] * hf["head_dim"] * self.attention_layers
        head = 2 * rows * hf["vocab_size"] * hf["hidden_size"]
        return rows * (2 * parameters * tokens + attention) + head


SHAPES = {
    "dense": Shape(QWEN3_8B, ((1, 2048), (16, 2048), (64, 2048), (256, 1024)), 60 << 30),
    "moe": Shape(QWEN3_30B_A3B, ((1, 2048), (64, 2048)), 24 << 30),
    "hybrid": Shape(QWEN3_NEXT, ((1, 2048), (64, 2048)), 24 << 30),
}


def read_rate() -> float:
    """Bytes per second of a large reduction."""
    x = jnp.ones(1 << 31, jnp.bfloat16)
    total = jax.jit(lambda a: jnp.sum(a.reshape(-1, 4096), axis=1, dtype=jnp.float32))
    total(x).block_until_ready()
    start = time.perf_counter()
    for _ in range(10):
        y = total(x)
    y.block_until_ready()
    return 10 * x.nbytes / (time.perf_counter() - start)


def build_engine(shape: Shape) -> Engine:
    """An engine of the model with random weights, its prefix cache off."""
    family = MODEL_FAMILIES[shape.hf["architectures"][0]]
    model = family.build(family.config.from_hf(shape.hf), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    options = EngineConfig(
        model="random",
        max_model_len=8256,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=shape.arena_bytes,
        enable_prefix_caching=False,
        warmup=False,
        disable_progress_bars=True,
    )
    return Engine.from_model(model, options)


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


class Recorder:
    """Keeps a late batch of each kind that the engine dispatched: decode batches by rows, others as `EXTEND`.

    With it go the block tables of its time: those of requests that ended since are empty, and reading one page again
    and again takes no time.
    """

    EXTEND = 0
    KEPT = 8  # of so many batches in a row one is kept

    def __init__(self, engine: Engine) -> None:
        self._programs = engine._assembly.programs
        self._run = self._programs.run
        self._last: dict[int, tuple[BuiltBatch, Tables]] = {}
        self._seen: collections.Counter[int] = collections.Counter()
        self._dispatched: list[tuple[int, float]] = []
        self._programs.run = self._record  # type: ignore[method-assign]

    def _record(self, built: BuiltBatch) -> DeviceOutputs:
        kind = len(built.slots) if built.layout.bucket.mode == "decode" else self.EXTEND
        self._dispatched.append((kind, time.perf_counter()))
        outputs = self._run(built)
        if self._seen[kind] % self.KEPT == 0:
            self._last[kind] = built, self._copied_tables()
        self._seen[kind] += 1
        return outputs

    def _copied_tables(self) -> Tables:
        return jax.tree.map(jnp.copy, self._programs.device_state.tables)

    def served_intervals(self, kind: int) -> list[float]:
        """Seconds from one dispatch to the next while the engine served steps of one kind."""
        pairs = itertools.pairwise(self._dispatched)
        return [after - before for (a, before), (b, after) in pairs if a == b == kind]

    def forget_times(self) -> None:
        """Leaves what was served so far out of the intervals."""
        self._dispatched.clear()

    def replay(self, kind: int, count: int) -> float:
        """Seconds per step of `count` dispatches of a batch of a kind that was kept."""
        built, tables = self._last[kind]
        built = dataclasses.replace(built, early_changes=())
        now = self._copied_tables()
        self._restore(tables)
        start = time.perf_counter()
        for _ in range(count):
            outputs = self._run(built)
        outputs.packed.block_until_ready()
        took = (time.perf_counter() - start) / count
        self._restore(now)
        return took

    def _restore(self, tables: Tables) -> None:
        state = self._programs.device_state
        copied = jax.block_until_ready(jax.tree.map(jnp.copy, tables))
        self._programs.device_state = dataclasses.replace(state, tables=copied)


def time_decode(engine: Engine, shape: Shape, recorder: Recorder, rate: float, profile: bool) -> list[dict[str, Any]]:
    weights = tree_bytes(engine._assembly.programs.weights)
    found = []
    print("| decode: rows x context | step | floor | of the floor |\n|---|---|---|---|")
    for rows, context in shape.decode:
        # Enough tokens that the first prompts still run when the last is in.
        engine.generate(prompts(rows, context - 40, shape.hf["vocab_size"], rows), greedy(40))
        recorder.replay(rows, 5)
        took = float(np.median([recorder.replay(rows, REPLAYED) for _ in range(3)]))
        floor = shape.decode_bytes(weights, rows, context) / rate
        found.append({"rows": rows, "context": context, "seconds": took, "floor": floor})
        print(f"| {rows} x {context} | {took * 1e3:.2f} ms | {floor * 1e3:.2f} ms | {floor / took:.2f} |", flush=True)
        if profile:
            print_kernels(lambda rows=rows: recorder.replay(rows, 5), 5)
    return found


def time_prefill(engine: Engine, shape: Shape, profile: bool) -> list[dict[str, Any]]:
    weights = tree_bytes(engine._assembly.programs.weights)
    found = []
    print("| prefill | time | floor | of the floor |\n|---|---|---|---|")
    for rows, tokens in ((1, 8192), (16, 2048)):
        batch = prompts(rows, tokens, shape.hf["vocab_size"], tokens)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            engine.generate(batch, greedy(1))
            times.append(time.perf_counter() - start)
        took, floor = min(times[1:]), shape.prefill_flops(weights, rows, tokens) / MATRIX_RATE
        found.append({"rows": rows, "tokens": tokens, "seconds": took, "floor": floor})
        print(f"| {rows} x {tokens} | {took:.3f} s | {floor:.3f} s | {floor / took:.2f} |", flush=True)
        if profile:
            print_kernels(lambda batch=batch: engine.generate(batch, greedy(1)), 1)
    return found


def time_generate(engine: Engine, shape: Shape, recorder: Recorder, rate: float) -> dict[str, Any]:
    """256 requests of 1,024 + 256 tokens; the floor adds up its prefill and its 255 decode steps."""
    weights = tree_bytes(engine._assembly.programs.weights)
    times = []
    for seed in range(2):
        batch = prompts(256, 1024, shape.hf["vocab_size"], seed)
        recorder.forget_times()
        start = time.perf_counter()
        engine.generate(batch, greedy(256))
        times.append(time.perf_counter() - start)
    took = min(times)
    floor = shape.prefill_flops(weights, 256, 1024) / MATRIX_RATE
    floor += sum(shape.decode_bytes(weights, 256, 1024 + i) for i in range(1, 256)) / rate
    print(f"generate 256 x (1,024 + 256): {took:.2f} s, floor {floor:.2f} s, {floor / took:.2f} of it, ", end="")
    print(f"{256 * 256 / took:.0f} tokens/s (first run, compiling: {times[0]:.1f} s)", flush=True)
    served, replayed = float(np.median(recorder.served_intervals(256))), recorder.replay(256, REPLAYED)
    print(f"  decode steps of 256 rows come every {served * 1e3:.2f} ms; dispatched alone they take ", end="")
    print(f"{replayed * 1e3:.2f} ms: the GPU is busy {replayed / served:.3f} of the time", flush=True)
    mixed = recorder.served_intervals(recorder.EXTEND)
    print(
        f"  {len(mixed) + 1} steps with prompts, every {np.median(mixed) * 1e3:.0f} ms; the last one alone takes ",
        end="",
    )
    print(f"{recorder.replay(recorder.EXTEND, 3) * 1e3:.0f} ms", flush=True)
    return {"seconds": took, "floor": floor, "busy": replayed / served}


def print_memory(engine: Engine) -> None:
    """Peak memory beside what the engine's report promised."""
    report = engine.memory_report
    promised = report.weights + report.arena + report.device_state
    workspace = engine._assembly.programs.workspace_bytes
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    print(f"peak memory {peak / 2**30:.2f} GiB; weights, arena and device state {promised / 2**30:.2f}, ", end="")
    print(f"workspace of the largest step {workspace / 2**30:.2f}: {peak / (promised + workspace):.3f}", flush=True)


def print_kernels(run: Any, steps: int, shown: int = 24) -> None:
    """Time of each kernel on the device, per step, from JAX's profiler."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    totals, counts = collections.Counter(), collections.Counter()
    for event in events:
        if event.get("ph") != "X" or "GPU" not in processes[event["pid"]]:
            continue
        if "Stream" in threads[event["pid"], event["tid"]]:
            totals[event["name"]] += event["dur"]
            counts[event["name"]] += 1
    print(f"  kernels: {sum(totals.values()) / steps:.0f} us and {sum(counts.values()) / steps:.0f} launches a step")
    for name, took in totals.most_common(shown):
        print(f"  {took / steps:9.1f} us {counts[name] / steps:7.1f} x {took / counts[name]:8.2f} us  {name[:90]}")


def measure(name: str, cases: list[str], rate: float, profile: bool) -> dict[str, Any]:
    """All cases of one model. Nothing of it is left on the device afterwards, where the next one needs the room."""
    shape, found = SHAPES[name], {}
    start = time.perf_counter()
    with build_engine(shape) as engine:
        recorder = Recorder(engine)
        print(f"\n{name}: engine up in {time.perf_counter() - start:.1f} s", flush=True)
        if "decode" in cases:
            found["decode"] = time_decode(engine, shape, recorder, rate, profile)
        if "prefill" in cases and name == "dense":
            found["prefill"] = time_prefill(engine, shape, profile)
        if "generate" in cases and name == "dense":
            found["generate"] = time_generate(engine, shape, recorder, rate)
        print_memory(engine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--case", nargs="+", choices=("decode", "prefill", "generate"), default=["decode", "prefill"])
    parser.add_argument("--profile", action="store_true", help="list the kernels of each case")
    parser.add_argument("--json", help="write what was measured to this file")
    args = parser.parse_args()
    rate = read_rate()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, read {rate / 1e9:.0f} GB/s", flush=True)
    found: dict[str, Any] = {"read_rate": rate}
    for name in args.model:
        found[name] = measure(name, args.case, rate, args.profile)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
