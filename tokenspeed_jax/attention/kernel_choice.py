"""Which attention kernels an engine will run, and why not the fastest: known at start, before anything compiles."""

from collections.abc import Iterable, Mapping

from tokenspeed_jax.cache.binding import LayerBinding
from tokenspeed_jax.models.attention import AttentionSpec
from tokenspeed_jax.pallas_kernels import decode_attention, prefill_attention


def mosaic_refusals(
    layers: Iterable[AttentionSpec], bindings: Iterable[LayerBinding], page_sizes: Mapping[str, int], dtype: str
) -> dict[str, str]:
    """Why the Mosaic GPU kernels cannot serve some layer, by operation; empty when they serve all.

    Args:
        layers, bindings: the model's attention layers and where their caches are, in order.
        page_sizes: tokens of one kernel page, per cache group.
        dtype: dtype of activations and cache.
    """
    refusals = {}
    for layer, binding in zip(layers, bindings, strict=True):
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
