"""The engine on a GPU: recorded outputs in float32, and steps that update the arena in place."""

import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tokenspeed_jax import Engine, EngineConfig, SamplingParams
from tokenspeed_jax.models.registry import MODEL_FAMILIES

from ..families import ALL

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True, top_logprobs=5)


@pytest.mark.parametrize("family", ALL)
def test_tiny_goldens_hold_in_float32(family: str) -> None:
    prompts = json.loads((GOLDEN / f"{family}.json").read_text())["prompts"]
    config = EngineConfig(
        model=str(GOLDEN / family),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=16 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:
        for _ in range(2):
            outputs = engine.generate([prompt["prompt_ids"] for prompt in prompts], GREEDY)
            for output, golden in zip(outputs, prompts, strict=True):
                sample = output.samples[0]
                assert sample.token_ids == golden["output_ids"]
                for top, expected in zip(sample.top_logprobs or (), golden["output_top5"], strict=True):
                    assert [top[token] for token, _ in expected] == pytest.approx(
                        [value for _, value in expected], abs=2e-3
                    )
        assert engine.stats().cached_tokens > 0
        assert engine._assembly.programs.model.arena.null_parent_is_zero()


# Four layers each, of shapes that the Mosaic kernels serve: what differs from the tiny checkpoint of the family.
WIDE: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128},
    "qwen3_next": {
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "kimi_linear": {
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": 8,
            "short_conv_kernel_size": 4,
        },
    },
}
EVERYWHERE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}


def bf16_engine(name: str, *, warmup: bool) -> Engine:
    """An engine of a wide model with random weights."""
    tiny = json.loads((GOLDEN / name / "config.json").read_text())
    family = MODEL_FAMILIES[tiny["architectures"][0]]
    config = family.config.from_hf(tiny | EVERYWHERE | WIDE[name])
    model = family.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    options = EngineConfig(
        model="random",
        max_model_len=2048,
        max_num_seqs=4,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=2 << 30,
        warmup=warmup,
        disable_progress_bars=True,
    )
    return Engine.from_model(model, options)


@pytest.mark.parametrize("name", WIDE)
def test_steps_alias_the_arena_and_copy_no_plane(name: str) -> None:
    with bf16_engine(name, warmup=True) as engine:
        programs = engine._assembly.programs
        arena = programs.model.arena
        plane_bytes = {plane.nbytes for plane in arena.planes.values()}
        for bucket, compiled in programs._steps.items():
            memory = compiled.memory_analysis()
            assert memory.alias_size_in_bytes >= arena.plan.arena_bytes, bucket
            assert memory.temp_size_in_bytes < min(plane_bytes), bucket
            for dtype, shape in re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:copy|copy-start)\(", compiled.as_text()):
                width = {"u8": 1, "bf16": 2}.get(dtype, 4)
                assert math.prod(map(int, shape.split(","))) * width not in plane_bytes, (bucket, dtype, shape)


@pytest.mark.parametrize("name", WIDE)
def test_bfloat16_serving_stays_close_to_plain_scoring(name: str) -> None:
    prompts = [
        jax.random.randint(jax.random.key(seed), (length,), 0, 32000).tolist()
        for seed, length in enumerate((40, 65, 103))
    ]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=True)
    with bf16_engine(name, warmup=False) as engine:
        for output in [*engine.generate(prompts, params), *engine.generate(prompts, params)]:
            sample = output.samples[0]
            scores = engine.score([*output.prompt_token_ids, *sample.token_ids])[-24:]
            differences = sorted(abs(a - b) for a, b in zip(scores, sample.logprobs or (), strict=True))
            assert differences[12] < 0.1


def test_the_arena_takes_what_the_device_leaves() -> None:
    limit = (jax.devices()[0].memory_stats() or {})["bytes_limit"]
    config = EngineConfig(
        model=str(GOLDEN / "llama"),
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.3,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine(config) as engine:
        report = engine.memory_report
        used = report.weights + report.arena + report.device_state + report.workspace
        assert 0.28 * limit < used <= 0.3 * limit
        assert report.free is not None
        assert report.free > 0.6 * limit
        print(report)
        assert len(engine.generate([5, 6, 7], GREEDY)[0].samples[0].token_ids) == 24
