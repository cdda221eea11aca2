"""The sampler's log-probabilities are those of the trainer's forward pass on the same tokens, in bfloat16 too."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tokenspeed_jax import Engine, EngineConfig, SamplingParams
from tokenspeed_jax.models.registry import resolve_model
from tokenspeed_jax.rollout import token_log_probabilities
from tokenspeed_jax.weights import load_model, open_checkpoint

PROMPTS = [np.random.default_rng(seed).integers(3, 500, 40).tolist() for seed in range(4)]
SAMPLED = SamplingParams(max_tokens=24, temperature=0.7, ignore_eos=True, logprobs=True, seed=1)

forward = nnx.jit(token_log_probabilities)


def differences(model, temperature: float) -> np.ndarray:
    """|sampler - trainer| of every sampled token, at the sampler's temperature."""
    config = EngineConfig(
        model="trained",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_cache_memory_bytes=4 << 20,
        warmup=False,
        disable_progress_bars=True,
    )
    with Engine.from_model(model, config) as engine:
        outputs = engine.generate(PROMPTS, dataclasses.replace(SAMPLED, temperature=temperature))
    tokens = jnp.asarray([[*output.prompt_token_ids, *output.samples[0].token_ids] for output in outputs])
    ours = np.asarray(forward(model, tokens, temperature=temperature))[:, 40:]
    theirs = np.array([output.samples[0].sampling_logprobs for output in outputs])
    assert theirs.std() > 0.5
    return np.abs(ours - theirs)


def test_experts_behind_sliding_and_full_attention_in_bfloat16(tiny_checkpoint) -> None:
    """One small model for all of it, since every model compiles its own steps; the long test has whole families."""
    resolved, config = resolve_model(open_checkpoint(str(tiny_checkpoint("qwen3_moe"))).hf_config)
    config = dataclasses.replace(config, num_layers=2, windows=(24, None), ropes=config.ropes[:2])
    model = resolved.build(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(1))
    for _, parameter in nnx.to_flat_state(nnx.state(model)):
        # Matrices are drawn for models of thousands of channels; at this width they would hardly mix anything.
        if parameter.ndim > 1:
            parameter[...] = 6 * parameter[...]
    assert differences(model, 0.7).mean() <= 0.01


# With --xla_allow_excess_precision=false it is 0.006: XLA leaves out other roundings in steps than in a plain forward.
TOO_FAR = pytest.mark.xfail(reason="0.0115, not 0.01, as XLA rounds by default", strict=True)
GEMMA = pytest.param("gemma3", "bfloat16", marks=TOO_FAR)
FAMILIES = ("llama", "qwen3_5", "qwen3_moe")


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")), ("gemma3", "float32"), GEMMA],
)
def test_a_dense_a_sliding_a_delta_net_and_an_expert_family(family: str, dtype: str, tiny_checkpoint) -> None:
    model = load_model(open_checkpoint(str(tiny_checkpoint(family))), dtype=jnp.dtype(dtype), progress=False)
    assert differences(model, 1.0).mean() <= (1e-5 if dtype == "float32" else 0.01)
