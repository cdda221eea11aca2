"""Parameters of Tunix's own models as a checkpoint of Hugging Face's has them, which `Engine.update_weights` takes."""

import re
from collections.abc import Callable, Mapping

import jax
from flax import nnx

from tokenspeed_jax.errors import WeightUpdateError


def _unchanged(array: jax.Array) -> jax.Array:
    return array


def _transposed(array: jax.Array) -> jax.Array:
    return array.T


def _from_hidden(array: jax.Array) -> jax.Array:
    """[hidden, heads, dim] to [heads * dim, hidden]."""
    return array.reshape(array.shape[0], -1).T


def _to_hidden(array: jax.Array) -> jax.Array:
    """[heads, dim, hidden] to [hidden, heads * dim]."""
    return array.reshape(-1, array.shape[-1]).T


_RULES: tuple[tuple[str, str, Callable[[jax.Array], jax.Array]], ...] = (
    (r"embedder\.input_embedding", r"model.embed_tokens.weight", _unchanged),
    (r"final_norm\.w", r"model.norm.weight", _unchanged),
    (r"lm_head\.w", r"lm_head.weight", _transposed),
    (r"layers\.(\d+)\.((?:input|post_attention)_layernorm)\.w", r"model.layers.\1.\2.weight", _unchanged),
    (r"layers\.(\d+)\.attn\.([qk]_norm)\.w", r"model.layers.\1.self_attn.\2.weight", _unchanged),
    (r"layers\.(\d+)\.attn\.([qkv]_proj)\.w", r"model.layers.\1.self_attn.\2.weight", _from_hidden),
    (r"layers\.(\d+)\.attn\.o_proj\.w", r"model.layers.\1.self_attn.o_proj.weight", _to_hidden),
    (r"layers\.(\d+)\.mlp\.((?:gate|up|down)_proj)\.kernel", r"model.layers.\1.mlp.\2.weight", _transposed),
)
"""Of Tunix's Llama 3 and dense Qwen 3: their name, Hugging Face's, and what makes the one's layout of the other's."""


def hf_tensors(parameters: nnx.State) -> dict[str, jax.Array]:
    """Parameters of Tunix's Llama 3 or dense Qwen 3, as a checkpoint of Hugging Face's has them.

    Matrices are copied, since their layout is another: for as long as the result lives, the device holds them twice.

    Raises:
        WeightUpdateError: a parameter that neither of these has; it is named.
    """
    named = {
        ".".join(map(str, path)): variable[...] if isinstance(variable, nnx.Variable) else variable
        for path, variable in nnx.to_flat_state(parameters)
    }
    return _converted(named)


def _converted(parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    tensors = {}
    for name, array in parameters.items():
        for pattern, template, convert in _RULES:
            if found := re.fullmatch(pattern, name):
                tensors[found.expand(template)] = convert(array)
                break
        else:
            raise WeightUpdateError(
                f"parameter {name} is none of Tunix's Llama 3 or dense Qwen 3; give TokenSpeedRollout to_engine, which "
                "names parameters as Hugging Face does",
                parameter=name,
            )
    return tensors
