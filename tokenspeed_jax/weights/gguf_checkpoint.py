"""A GGUF file as a checkpoint: Hugging Face's configuration, tensor names and row order, from llama.cpp's.

Weights are dequantised in float32 and rounded to bfloat16, so that they are the same numbers as those of a bfloat16
folder made from the file.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from tokenspeed_jax.weights.checkpoint import Checkpoint
from tokenspeed_jax.weights.gguf_config import ROPE_FACTORS, gguf_config
from tokenspeed_jax.weights.gguf_file import GgufFile, GgufTensor

if TYPE_CHECKING:
    from tokenspeed_jax.text.tokenizer import Tokenizer

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_ROWS_AT_ONCE = 8192  # an embedding of 262,144 rows would take most of a gigabyte as float32

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = {
    "llama": _LLAMA_LAYER,
    "gemma3": {
        **_LLAMA_LAYER,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def open_gguf(path: Path, name: str) -> Checkpoint:
    """Opens a GGUF file; raises `CheckpointError` for an architecture or a feature that is not supported."""
    file = GgufFile(path)
    config = gguf_config(file)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}

    def make_tokenizer() -> "Tokenizer":
        from tokenspeed_jax.text.tokenizer import Tokenizer
        from tokenspeed_jax.weights.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(gguf_tokenizer(file.metadata), hf_config=config, generation_config=generation)

    return Checkpoint(name, config, generation, GgufSource(file), make_tokenizer)


class GgufSource:
    """The tensors of a GGUF file in Hugging Face's names and row order, as bfloat16."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._architecture = file.metadata["general.architecture"]
        heads = file.metadata[f"{self._architecture}.attention.head_count"]
        kv_heads = file.metadata.get(f"{self._architecture}.attention.head_count_kv", heads)
        self._rotary_heads = {"attn_q": heads, "attn_k": kv_heads} if self._architecture == "llama" else {}
        self._tensors: dict[str, GgufTensor] = {
            hugging_face_name(tensor.name, self._architecture): tensor
            for tensor in file.tensors.values()
            if tensor.name != ROPE_FACTORS
        }

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> np.dtype:
        del name
        return _BFLOAT16

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        out = np.empty((tensor.rows, tensor.shape[-1]), _BFLOAT16)
        # llama.cpp stores Gemma's norm weights with the one added that the model adds itself.
        shift = np.float32(1.0 if self._architecture == "gemma3" and "norm" in tensor.name else 0.0)
        for first in range(0, tensor.rows, _ROWS_AT_ONCE):
            last = min(first + _ROWS_AT_ONCE, tensor.rows)
            out[first:last] = self._file.dequantized(tensor, first, last) - shift
        out = out.reshape(tensor.shape)
        heads = self._rotary_heads.get(_layer_part(tensor.name))
        return out if heads is None else half_pairing(out, heads)


def half_pairing(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of a query or key projection from neighbouring rotary pairs to half pairs.

    llama.cpp rotates rows 2i and 2i+1 of a head of d rows together; Hugging Face rotates i and i + d/2.
    """
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _layer_part(name: str) -> str:
    """ "attn_q" of "blk.3.attn_q.weight"; "" for a tensor outside the layers."""
    parts = name.split(".")
    return parts[2] if len(parts) == 4 and parts[0] == "blk" else ""


def hugging_face_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor; one that is not known keeps its name, and no model will ask for it."""
    match name.split("."):
        case [part, kind] if part in _TOP_LEVEL:
            return f"{_TOP_LEVEL[part]}.{kind}"
        case ["blk", layer, part, kind] if part in _LAYER[architecture]:
            return f"model.layers.{layer}.{_LAYER[architecture][part]}.{kind}"
    return name
