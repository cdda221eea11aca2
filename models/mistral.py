"""Mistral 7B and its dense descendants: Llama with a sliding window. Hugging Face `MistralForCausalLM`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from tokenspeed_jax.models.decoder import DecoderConfig, decoder_fields
from tokenspeed_jax.models.hf_config import HfConfig
from tokenspeed_jax.models.llama import Llama
from tokenspeed_jax.models.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Every layer sees the same window, or everything when `sliding_window` is null (from version 0.2 on)."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        config = HfConfig(hf)
        config.refuse_unless("hidden_act", "silu", "silu")
        fields = decoder_fields(config, kv_heads=8)
        layers = fields["num_layers"]
        return cls(
            **fields,
            attention_bias=False,
            windows=(config.optional_integer("sliding_window", default=4096),) * layers,
            ropes=(Rope.from_hf(config, fields["head_dim"]),) * layers,
        )


class Mistral(Llama):
    """The whole model."""
