"""A tiny model with recurrent, sliding and full attention layers together, which no served family has all of.

Its weights are random with a fixed seed, and its golden is the plain path: greedy decoding without any cache.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tokenspeed_jax.models.gated_delta_net import DeltaNetShape
from tokenspeed_jax.models.hf_config import FULL_ATTENTION, LINEAR_ATTENTION
from tokenspeed_jax.models.plain_step import PlainStep
from tokenspeed_jax.models.qwen3_5 import Qwen3_5, Qwen3_5Config
from tokenspeed_jax.models.rope import Rope

THREE_KINDS = "three_kinds"
"""Its name among the families of tests/families.py."""

_PROMPT_LENGTHS = (7, 64, 150)
_NEW_TOKENS = 24
_PADDED = 192

# What a layer of attention sees, or None for a recurrent one.
_WINDOW, _ALL, _RECURRENT = 32, "all", None
_LAYERS = (_RECURRENT, _RECURRENT, _WINDOW, _RECURRENT, _ALL, _WINDOW, _RECURRENT, _ALL)

CONFIG = Qwen3_5Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=len(_LAYERS),
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    attention_bias=False,
    windows=tuple(layer if isinstance(layer, int) else None for layer in _LAYERS),
    ropes=(Rope(10_000.0, 16),) * len(_LAYERS),
    kinds=tuple(LINEAR_ATTENTION if layer is _RECURRENT else FULL_ATTENTION for layer in _LAYERS),
    delta_net=DeltaNetShape(key_heads=2, value_heads=4, key_dim=16, value_dim=16, convolution_width=4),
)


def three_kinds_model() -> Qwen3_5:
    """A fresh copy, float32, on the default device."""
    model = Qwen3_5(CONFIG, dtype=jnp.float32, rngs=nnx.Rngs(7))
    graph, state = nnx.split(model)
    # Matrices are drawn for models of thousands of channels; at this width they would hardly mix anything.
    return nnx.merge(graph, jax.tree.map(lambda x: 4 * x if x.ndim > 1 else x, state))


@functools.cache
def three_kinds_golden() -> tuple[dict[str, Any], ...]:
    """Prompts, greedy outputs and the five most likely tokens at each, as tests/golden/tiny/<family>.json has them."""
    model = three_kinds_model()

    @nnx.jit
    def following(model: Qwen3_5, token_ids: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.arange(_PADDED)
        step = PlainStep((positions >= length).astype(jnp.int32), positions, num_segments=2)
        hidden = model(token_ids, positions, step)
        scores = jax.nn.log_softmax(model.logits(hidden[length - 1][None])[0])
        return jax.lax.top_k(scores, 5)

    prompts = []
    for seed, length in enumerate(_PROMPT_LENGTHS):
        tokens = jax.random.randint(jax.random.key(seed), (length,), 3, 500).tolist()
        prompt, tops = list(tokens), []
        for _ in range(_NEW_TOKENS):
            padded = jnp.asarray(tokens + [0] * (_PADDED - len(tokens)))
            values, ids = following(model, padded, jnp.asarray(len(tokens)))
            tops.append(list(zip(ids.tolist(), values.tolist(), strict=True)))
            tokens.append(tops[-1][0][0])
        prompts.append({"prompt_ids": prompt, "output_ids": tokens[length:], "output_top5": tops})
    return tuple(prompts)
