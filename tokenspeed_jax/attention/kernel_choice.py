"""Which attention kernels an engine will run, and why not the fastest: known at start, before anything compiles."""

from collections.abc import Iterable, Mapping

from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.models.attention import AttentionSpec, LatentAttentionSpec, LayerSpec
from tokenspeed_jax.pallas_kernels import decode_attention, prefill_attention


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
        layers, bindings: the model's attention layers and where their caches are, in order.
        page_sizes: tokens of one kernel page, per cache group.
        dtype: dtype of activations and cache.
    """
    refusals = {}
    for layer, binding in zip(layers, bindings, strict=True):
        if not isinstance(layer, AttentionSpec):
            continue
        for operation, module in (("decode", decode_attention), ("prefill", prefill_attention)):
            refusal = module.mosaic_refusal(
                num_heads=layer.num_heads,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                tokens_per_page=page_sizes[binding.group_id],
                dtype=dtype,
                kv_dtype=dtype,
            )
            if refusal is not None:
                refusals[operation] = f"layer {layer.layer_id}: {refusal}"
    return refusals
