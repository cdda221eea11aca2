"""The architectures that are served, and what the engine asks of a model."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from tokenspeed_jax.models.attention import AttentionStep, LayerSpec
from tokenspeed_jax.models.deepseek_v3 import DeepseekV3, DeepseekV3Config
from tokenspeed_jax.models.falcon_mamba import FalconMamba, FalconMambaConfig
from tokenspeed_jax.models.gemma3 import Gemma3, Gemma3Config
from tokenspeed_jax.models.gpt_oss import MXFP4, GptOss, GptOssConfig
from tokenspeed_jax.models.hf_config import UnsupportedConfig
from tokenspeed_jax.models.kimi_linear import KimiLinear, KimiLinearConfig
from tokenspeed_jax.models.lfm2 import Lfm2, Lfm2Config
from tokenspeed_jax.models.llama import Llama, LlamaConfig
from tokenspeed_jax.models.mamba2 import Mamba2, Mamba2Config
from tokenspeed_jax.models.minimax import MiniMax, MiniMaxConfig
from tokenspeed_jax.models.minimax_m2 import MiniMaxM2, MiniMaxM2Config
from tokenspeed_jax.models.mistral import Mistral, MistralConfig
from tokenspeed_jax.models.olmo3 import Olmo3, Olmo3Config
from tokenspeed_jax.models.qwen3 import Qwen3, Qwen3Config
from tokenspeed_jax.models.qwen3_5 import Qwen3_5, Qwen3_5Config
from tokenspeed_jax.models.qwen3_5_moe import Qwen3_5MoE, Qwen3_5MoEConfig
from tokenspeed_jax.models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from tokenspeed_jax.models.qwen3_next import Qwen3Next, Qwen3NextConfig
from tokenspeed_jax.models.weight_map import WeightRule


class ModelConfig(Protocol):
    """What the engine reads of a configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def tie_word_embeddings(self) -> bool: ...
    @property
    def cache_family(self) -> str: ...

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Reads a `config.json`; raises `UnsupportedConfig` naming the field that is not served."""
        ...

    def attention_layers(self) -> tuple[LayerSpec, ...]:
        """What each layer's attention, or recurrence, computes."""
        ...


class CausalLM(Protocol):
    """A model that scores the next token; an `nnx.Module`."""

    config: Any

    def __call__(
        self,
        token_ids: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        step: AttentionStep,
        *,
        remat: bool = False,
    ) -> Float[Array, "tokens hidden"]:
        """Hidden states after the final norm, in the model's dtype.

        Args:
            remat: for gradients, keep what goes from layer to layer alone; needs a `PlainStep`.
        """
        ...

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocab"]:
        """Scores in float32, soft cap included."""
        ...


@dataclasses.dataclass(frozen=True)
class ModelFamily:
    """One architecture: its configuration and its module.

    Attributes:
        quantizations: values of `quantization_config.quant_method` that its weight map serves.
    """

    config: type[Any]
    model: type[Any]
    quantizations: tuple[str, ...] = ()

    def build(self, config: ModelConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> Any:
        """A model with random parameters in `dtype`, on the default device; works under `nnx.eval_shape` and `jit`."""
        return self.model(config, dtype=dtype, rngs=rngs)

    def weight_map(self, config: ModelConfig) -> tuple[WeightRule, ...]:
        """Where each parameter's values stand in a Hugging Face checkpoint."""
        return self.model.weight_map(config)

    def ignored_tensors(self, config: ModelConfig) -> tuple[str, ...]:
        """Beginnings of names of tensors that a checkpoint may have and the model does not compute with."""
        return getattr(self.model, "ignored_tensors", lambda _: ())(config)


MODEL_FAMILIES: dict[str, ModelFamily] = {
    "DeepseekV3ForCausalLM": ModelFamily(DeepseekV3Config, DeepseekV3),
    "FalconMambaForCausalLM": ModelFamily(FalconMambaConfig, FalconMamba),
    "Gemma3ForCausalLM": ModelFamily(Gemma3Config, Gemma3),
    "GptOssForCausalLM": ModelFamily(GptOssConfig, GptOss, quantizations=(MXFP4,)),
    "KimiLinearForCausalLM": ModelFamily(KimiLinearConfig, KimiLinear),
    "Lfm2ForCausalLM": ModelFamily(Lfm2Config, Lfm2),
    "LlamaForCausalLM": ModelFamily(LlamaConfig, Llama),
    "Mamba2ForCausalLM": ModelFamily(Mamba2Config, Mamba2),
    "MiniMaxForCausalLM": ModelFamily(MiniMaxConfig, MiniMax),
    "MiniMaxM2ForCausalLM": ModelFamily(MiniMaxM2Config, MiniMaxM2),
    "MistralForCausalLM": ModelFamily(MistralConfig, Mistral),
    "Olmo3ForCausalLM": ModelFamily(Olmo3Config, Olmo3),
    "Qwen3_5ForCausalLM": ModelFamily(Qwen3_5Config, Qwen3_5),
    "Qwen3_5ForConditionalGeneration": ModelFamily(Qwen3_5Config, Qwen3_5),
    "Qwen3_5MoeForCausalLM": ModelFamily(Qwen3_5MoEConfig, Qwen3_5MoE),
    "Qwen3_5MoeForConditionalGeneration": ModelFamily(Qwen3_5MoEConfig, Qwen3_5MoE),
    "Qwen3ForCausalLM": ModelFamily(Qwen3Config, Qwen3),
    "Qwen3MoeForCausalLM": ModelFamily(Qwen3MoEConfig, Qwen3MoE),
    "Qwen3NextForCausalLM": ModelFamily(Qwen3NextConfig, Qwen3Next),
}


def resolve_model(hf: Mapping[str, Any]) -> tuple[ModelFamily, ModelConfig]:
    """The family that a `config.json` names, and its configuration.

    Raises:
        UnsupportedConfig: an unknown architecture, or a quantisation or a field that is not served for it.
    """
    supported = ", ".join(sorted(MODEL_FAMILIES))
    names = hf.get("architectures") or []
    if not names:
        raise UnsupportedConfig(f"config.json has no architectures (supported: {supported})")
    family = next((MODEL_FAMILIES[name] for name in names if name in MODEL_FAMILIES), None)
    if family is None:
        raise UnsupportedConfig(f"architecture {', '.join(map(repr, names))} is not supported (supported: {supported})")
    quantization = hf.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        if method not in family.quantizations:
            served = ", ".join(map(repr, family.quantizations)) or "none"
            raise UnsupportedConfig(
                f"config.json: quantization_config.quant_method = {method!r} is not supported "
                f"(served for this architecture: {served})"
            )
    return family, family.config.from_hf(hf)
