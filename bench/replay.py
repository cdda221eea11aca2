"""What routed experts cost a sampler, and what replaying them is worth to a trainer, in bf16 with random weights.

    python bench/replay.py [--layers 12] [--tiny]

The model is Qwen3-30B-A3B-shaped with 12 of its 48 layers. First the throughput of an engine without the option, with
it, and with it while every request asks. Then, for samples of the last one, |sampler - trainer| of their tokens' log-
probabilities, where the trainer's routers choose and where it takes the sampler's experts.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from steps import QWEN3_30B_A3B

from tokenspeed_jax import Engine, EngineConfig, RequestOutput, SamplingParams
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.rollout import token_log_probabilities

TINY = {
    "vocab_size": 512,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SCORED = 16
"""Samples that the trainer's forward pass scores, four at a time."""


def throughput(model: Any, *, serves: bool, asks: bool, sizes: tuple[int, int, int]) -> list[RequestOutput]:
    """Prints output tokens per second of one engine; returns its outputs."""
    requests, prompt, new = sizes
    config = EngineConfig(
        model="random",
        max_model_len=prompt + new,
        max_num_seqs=requests,
        kv_cache_memory_bytes=2048 * requests * (prompt + new + 64) * model.config.num_layers,
        enable_return_routed_experts=serves,
        enable_prefix_caching=False,
        grammar_backend="none",
        warmup=False,
        disable_progress_bars=True,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.config.vocab_size, prompt).tolist() for _ in range(requests)]
    params = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=True, seed=1, return_routed_experts=asks)
    with Engine.from_model(model, config) as engine:
        engine.generate(prompts, params)
        compilations = engine.stats().compilations_after_warmup
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            outputs = engine.generate(prompts, params)
            seconds.append(time.perf_counter() - start)
        late = engine.stats().compilations_after_warmup - compilations
    kind = "asked for" if asks else "served, not asked for" if serves else "not served"
    rates = ", ".join(f"{requests * new / each:,.0f}" for each in seconds)
    print(f"experts {kind}: {rates} output tokens/s, {late} late compilations", flush=True)
    return outputs


def differences(model: Any, outputs: Sequence[RequestOutput], *, replays: bool) -> np.ndarray:
    """|sampler - trainer| of the sampled tokens."""
    forward = nnx.jit(token_log_probabilities)
    apart = []
    for begin in range(0, min(SCORED, len(outputs)), 4):
        batch = [(output.prompt_token_ids, output.samples[0]) for output in outputs[begin : begin + 4]]
        tokens = jnp.asarray([[*prompt, *sample.token_ids] for prompt, sample in batch])
        told = np.stack([sample.routed_experts for _, sample in batch if sample.routed_experts is not None])
        experts = jnp.pad(told, ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=-1) if replays else None
        ours = np.asarray(forward(model, tokens, expert_ids=experts))
        apart += [ours[row, len(prompt) :] - sample.logprobs for row, (prompt, sample) in enumerate(batch)]
    return np.abs(np.stack(apart))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="to try the script on a CPU")
    arguments = parser.parse_args()
    fields = QWEN3_30B_A3B | {"num_hidden_layers": arguments.layers} | (TINY if arguments.tiny else {})
    family, config = resolve_model(fields)
    build = nnx.jit(lambda: family.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    model = build()
    sizes = (4, 32, 16) if arguments.tiny else (256, 512, 128)
    print(f"{jax.devices()[0].device_kind}, {arguments.layers} layers, {sizes[0]} requests of {sizes[1]} + {sizes[2]}")
    throughput(model, serves=False, asks=False, sizes=sizes)
    throughput(model, serves=True, asks=False, sizes=sizes)
    outputs = throughput(model, serves=True, asks=True, sizes=sizes)
    for replays in (False, True):
        apart = differences(model, outputs, replays=replays)
        whose = "the sampler's experts" if replays else "the trainer's own experts"
        high = f"99% {np.quantile(apart, 0.99):.2e}, max {apart.max():.2e}"
        print(f"{whose}: mean {apart.mean():.2e}, {high}", flush=True)


if __name__ == "__main__":
    main()
