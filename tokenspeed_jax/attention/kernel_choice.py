"""Which kernels of attention and recurrence an engine will run, and why not the fastest; known before it compiles."""

from collections.abc import Iterable, Mapping

from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, LayerSpec, RecurrentSpec
from tokenspeed_jax.pallas_kernels import (
    decode_attention,
    gated_delta_rule,
    latent_attention,
    prefill_attention,
    recurrences,
)


def kernel_families(layers: Iterable[LayerSpec], bindings: Iterable[LayerBinding]) -> dict[str, str]:
    """Kernel family that reads each history group's pages, a key of `KERNEL_PAGE_SIZES`.

    Raises:
        ValueError: layers of one group need different families.
    """
    families: dict[str, str] = {}
    for layer, binding in zip(layers, bindings, strict=True):
        if not isinstance(layer, AttentionSpec | LatentAttentionSpec):
            continue
        family = "mha" if isinstance(layer, AttentionSpec) else "mla"
        if families.setdefault(binding.group_id, family) != family:
            raise ValueError(f"cache group {binding.group_id!r} is read by kernels of two families")
    return families


def mosaic_refusals(
    layers: Iterable[LayerSpec], bindings: Iterable[LayerBinding], page_sizes: Mapping[str, int], dtype: str
) -> dict[str, str]:
    """Why the Mosaic GPU kernels cannot serve some layer, by operation; empty when they serve all.

    Args:
        layers, bindings: the model's layers with caches and where their caches are, in order.
        page_sizes: tokens of one kernel page, per cache group.
        dtype: dtype of activations and cache.
    """
    refusals: dict[str, str] = {}
    for layer, binding in zip(layers, bindings, strict=True):
        for operation, refusal in _layer_refusals(layer, page_sizes.get(binding.group_id, 0), dtype).items():
            if refusal is not None:
                refusals[operation] = f"layer {layer.layer_id}: {refusal}"
    return refusals


def triton_refusal(layers: Iterable[LayerSpec], dtype: str) -> str | None:
    """Why some layer's delta rule with a gate a channel does not prefill in Triton, the fastest; None when all do.

    Layers of any other kind have no kernel in Triton that is their fastest, and no reason here.

    Args:
        dtype: of activations.
    """
    for layer in layers:
        match layer:
            case RecurrentSpec(state_shape=(_, value_dim, key_dim), channel_gates=True):
                refusal = gated_delta_rule.triton_refusal(key_dim=key_dim, value_dim=value_dim, dtype=dtype)
                if refusal is not None:
                    return f"layer {layer.layer_id}: {refusal}"
    return None


def _layer_refusals(layer: LayerSpec, tokens_per_page: int, dtype: str) -> dict[str, str | None]:
    match layer:
        case RecurrentSpec(state_shape=tuple() as state_shape):
            return {"recurrence": recurrences.mosaic_refusal(state_shape, dtype)}
        case RecurrentSpec():  # a convolution only
            return {}
        case AttentionSpec():
            shape = {"num_heads": layer.num_heads, "num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
            modules = {"decode": decode_attention, "prefill": prefill_attention}
            return {
                operation: module.mosaic_refusal(**shape, tokens_per_page=tokens_per_page, dtype=dtype, kv_dtype=dtype)
                for operation, module in modules.items()
            }
        case LatentAttentionSpec():
            decode = latent_attention.decode_mosaic_refusal(
                num_heads=layer.num_heads,
                latent_dim=layer.latent_dim,
                rope_dim=layer.rope_dim,
                tokens_per_page=tokens_per_page,
                dtype=dtype,
                cache_dtype=dtype,
            )
            prefill = latent_attention.prefill_mosaic_refusal(
                nope_dim=layer.nope_dim,
                rope_dim=layer.rope_dim,
                value_dim=layer.value_dim,
                tokens_per_page=tokens_per_page,
                dtype=dtype,
                cache_dtype=dtype,
            )
            return {"latent decode": decode, "latent prefill": prefill}
