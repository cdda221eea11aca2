"""What one layer of a model stores, whatever the recipe, and `LayerRecipe`, the base of recipes made of layers."""

from collections.abc import Sequence
from typing import override

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, LayerSpec, RecurrentSpec
from tokenspeed_jax.recipes.base import NO_PADDING_LIMIT, CacheRecipe, SchedulerLimits
from tokenspeed_jax.recipes.spec import CacheFieldSpec, require_positive_int

KV_DTYPES = ("bfloat16", "float16", "float32")


def check_layers(layers: Sequence[LayerSpec], kv_dtype: str) -> None:
    """Raises where layers are missing or out of order, or the dtype is none a cache may have."""
    if not layers:
        raise ValueError("the model declares no attention layer")
    for position, layer in enumerate(layers):
        if layer.layer_id != position:
            raise ValueError(f"attention layer {position} declares layer_id {layer.layer_id}")
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"the cache's dtype must be one of {', '.join(KV_DTYPES)}, got {kv_dtype!r}", field="dtype")


def window_of(layer: LayerSpec) -> int | None:
    """Tokens that the layer's group retains; None for all."""
    return layer.sliding_window if isinstance(layer, AttentionSpec) else None


def storage_label(layer: LayerSpec) -> str:
    """The layer's storage label (cache-runtime.md 3)."""
    if isinstance(layer, RecurrentSpec):
        return "linear_attention"
    return "full_attention" if window_of(layer) is None else "sliding_attention"


def kv_head_count(layer: LayerSpec) -> int:
    """Heads that the layer's history rows are cut into; one for a latent, none for a recurrent layer."""
    match layer:
        case AttentionSpec():
            return layer.num_kv_heads
        case LatentAttentionSpec():
            return 1
    return 0


def history_fields(
    layer: AttentionSpec | LatentAttentionSpec, rows: int, dtype: str, planes: Sequence[str]
) -> tuple[CacheFieldSpec, ...]:
    """Keys and values, each on its own plane of the two given, or the latents on the first.

    Args:
        rows: tokens of one block.
    """
    if isinstance(layer, LatentAttentionSpec):
        shape = (rows, 1, layer.latent_dim + layer.rope_dim)
        return (CacheFieldSpec(f"layer.{layer.layer_id}.latent_kv", planes[0], shape, dtype),)
    shape = (rows, layer.num_kv_heads, layer.head_dim)
    return tuple(
        CacheFieldSpec(f"layer.{layer.layer_id}.{name}", plane, shape, dtype)
        for name, plane in zip("kv", planes, strict=True)
    )


class LayerRecipe(CacheRecipe):
    """A recipe over the layers that a model declares; what they store together is the family's.

    Args:
        layers: the model's layers, layer ids 0, 1, 2, ... in order.
        kv_dtype: element type of keys, values and latents.
        prefix_granularity: P, tokens; also the block granularity of every history group.
        checkpoint_granularity: G, tokens between two state blocks of a request; divides P. None takes P.
    """

    max_padding_fraction = NO_PADDING_LIMIT

    def __init__(
        self,
        layers: tuple[LayerSpec, ...],
        *,
        kv_dtype: str,
        prefix_granularity: int,
        checkpoint_granularity: int | None = None,
        budget_bytes: int,
        token_limit: int | None = None,
        limits: SchedulerLimits,
    ) -> None:
        super().__init__(budget_bytes=budget_bytes, token_limit=token_limit, limits=limits)
        check_layers(layers, kv_dtype)
        self.layers = layers
        self.kv_dtype = kv_dtype
        self.checkpoint_granularity = checkpoint_granularity
        self._prefix_granularity = require_positive_int("prefix_granularity", prefix_granularity)

    @property
    @override
    def prefix_granularity(self) -> int:
        return self._prefix_granularity

    @property
    @override
    def layer_types(self) -> tuple[str, ...]:
        return tuple(storage_label(layer) for layer in self.layers)

    @property
    @override
    def layer_kv_head_counts(self) -> tuple[int, ...]:
        return tuple(kv_head_count(layer) for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer's group retains; None for all."""
        return tuple(window_of(layer) for layer in self.layers)
