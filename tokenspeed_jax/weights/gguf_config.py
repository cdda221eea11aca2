"""A `config.json` from GGUF metadata."""

from typing import Any

import numpy as np

from tokenspeed_jax.errors import CheckpointError
from tokenspeed_jax.models.rope import Llama3Scaling, Rope
from tokenspeed_jax.weights.gguf_file import GgufFile

ARCHITECTURES = ("gemma3", "llama")
ROPE_FACTORS = "rope_freqs.weight"  # a tensor, but part of the configuration
# What llama.cpp writes no field for.
_GEMMA_PERIOD = 6  # every sixth layer sees everything
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The `config.json` that the file's model would have.

    Raises:
        CheckpointError: an architecture or a feature that is not supported, or a field that is missing.
    """
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported (supported: {', '.join(ARCHITECTURES)})"
        )
    fields = _Fields(file, architecture)
    config = _shared(fields)
    return config | (_gemma3(fields, config) if architecture == "gemma3" else _llama(fields, config))


class _Fields:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        # Stored as float32; the shortest decimal that is the same float32 is what the original file said.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.file.path} has no {self.architecture}.{key}")
        if isinstance(value, list):
            raise CheckpointError(
                f"{self.file.path}: {self.architecture}.{key} differs by layer, which is not supported"
            )
        return value


def _shared(fields: _Fields) -> dict[str, Any]:
    metadata, tensors = fields.file.metadata, fields.file.tensors
    if "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"{fields.file.path} has no tokenizer.ggml.tokens")
    if fields.get("expert_count"):
        raise CheckpointError(
            f"{fields.file.path}: {fields.architecture}.expert_count = {fields.get('expert_count')}: "
            "mixtures of experts are not supported"
        )
    heads = fields.need("attention.head_count")
    config = {
        "torch_dtype": "bfloat16",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "hidden_size": fields.need("embedding_length"),
        "intermediate_size": fields.need("feed_forward_length"),
        "max_position_embeddings": fields.need("context_length"),
        "num_attention_heads": heads,
        "num_hidden_layers": fields.need("block_count"),
        "num_key_value_heads": heads
        if fields.get("attention.head_count_kv") is None
        else fields.need("attention.head_count_kv"),
        "rms_norm_eps": fields.need("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if eos := list(dict.fromkeys(token_id for token_id in ends if token_id is not None)):
        config["eos_token_id"] = eos
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = bos
    return config


def _llama(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = fields.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    if (rotary := fields.get("rope.dimension_count", head_dim)) != head_dim:
        raise CheckpointError(
            f"{fields.file.path}: llama.rope.dimension_count {rotary} is not the head dimension {head_dim}"
        )
    theta = fields.get("rope.freq_base", 10_000.0)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": head_dim,
        "rope_theta": theta,
        "rope_scaling": _llama3_scaling(fields, theta, head_dim) or _scaling(fields),
    }


def _gemma3(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], fields.need("attention.key_length")
    pattern = fields.get("attention.sliding_window_pattern", _GEMMA_PERIOD)
    sliding = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(layers)]
    # The 27B model alone divides scores by the square root of hidden size over heads.
    query_scalar = config["hidden_size"] // config["num_attention_heads"] if layers == _GEMMA_27B_LAYERS else head_dim
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": head_dim,
        "query_pre_attn_scalar": query_scalar,
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "sliding_window": fields.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in sliding],
        "rope_theta": fields.need("rope.freq_base"),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", _GEMMA_LOCAL_THETA),
        "rope_scaling": _scaling(fields),
    }


def _scaling(fields: _Fields) -> dict[str, Any] | None:
    factor = fields.get("rope.scaling.factor")
    kind = fields.get("rope.scaling.type", "none" if factor is None else "linear")
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": fields.need("rope.scaling.factor")}
        case "yarn":
            original = fields.need("rope.scaling.original_context_length")
            scaling = {"rope_type": "yarn", "original_max_position_embeddings": original}
            return scaling | {"factor": fields.need("rope.scaling.factor")}
    raise CheckpointError(
        f"{fields.file.path}: {fields.architecture}.rope.scaling.type {kind!r} is not supported "
        "(served: none, linear, yarn)"
    )


def _llama3_scaling(fields: _Fields, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3.1's scaling, which llama.cpp stores as the divisor of each frequency and not as its parameters."""
    tensor = fields.file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    divisors = fields.file.dequantized(tensor, 0, 1)[0]
    factor = float(divisors.max())
    plain = Rope(theta, head_dim)
    scaled = Rope(theta, head_dim, Llama3Scaling(factor, _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT))
    if divisors.shape != (head_dim // 2,) or not np.allclose(
        plain.frequencies() / divisors, scaled.frequencies(), rtol=1e-4, atol=0
    ):
        raise CheckpointError(
            f"{fields.file.path}: {ROPE_FACTORS} is not Llama 3.1's scaling, and no other is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
