"""From a layer's fused projections to attention's queries and cached keys and values: norm, rotation, cache write."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tokenspeed_jax.pallas_kernels.attention_prologue.mosaic import attention_prologue_mosaic, prologue_shape_refusal
from tokenspeed_jax.pallas_kernels.attention_prologue.reference import AttentionPrologue, attention_prologue_reference
from tokenspeed_jax.pallas_kernels.implementations import (
    Implementation,
    check_implementation,
    choose_implementation,
    hopper_refusal,
)
from tokenspeed_jax.pallas_kernels.pages import PageView

__all__ = ["AttentionPrologue", "attention_prologue", "mosaic_refusal"]


def mosaic_refusal(
    *, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int | None, dtype: str, kv_dtype: str
) -> str | None:
    """Why the kernel for Hopper GPUs cannot serve this geometry on the default device; None when it can.

    Args:
        rotary_dim: channels of a head that turn; None for none.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16"
    if jnp.dtype(kv_dtype) != jnp.dtype(dtype):
        return f"pages of {kv_dtype} differ from projections of {dtype}"
    return prologue_shape_refusal(num_heads, num_kv_heads, head_dim, rotary_dim) or hopper_refusal()


def attention_prologue(
    projected: Float[Array, "tokens columns"],
    k: PageView,
    v: PageView,
    slots: Int[Array, " tokens"],
    prologue: AttentionPrologue,
    *,
    num_heads: int,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "tokens heads dim"], PageView, PageView]:
    """Queries ready for attention, and the pages after each token's key and value were stored at its slot, in place.

    Norms and rotation are computed in float32 and rounded to the projections' dtype where the model rounds.

    Args:
        projected: a token's query heads, then its key heads, then its value heads; columns behind them are not read.
        k, v: pages of one shape and dtype. Where `v.plane is k.plane`, both are fields of one plane.
        slots: page id * tokens per page + offset; slots within the null page, and negative ones, store nothing. No
            two live slots are the same.
        prologue: norm and rotation of queries and keys.
        implementation: None takes the fastest that serves the call. The plain form is one, named both `reference`
            and `xla`.

    Returns:
        Queries in the projections' dtype; the pages of k and of v.

    Raises:
        ValueError: shapes that do not fit; an implementation that is unknown or, with the reason, cannot serve.
    """
    check_implementation(implementation)
    _check_shapes(projected, k, v, slots, prologue, num_heads)
    _, num_kv_heads, head_dim = k.page_shape
    refusal = mosaic_refusal(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=None if prologue.rotation is None else 2 * prologue.rotation.cos.shape[1],
        dtype=projected.dtype.name,
        kv_dtype=k.dtype,
    )
    if not projected.size or projected.shape[1] % head_dim:
        refusal = f"projections of shape {projected.shape} are empty, or no whole number of heads"
    shared_plane = v.plane is k.plane
    with jax.named_scope("attention_prologue"):
        if choose_implementation(implementation, refusal) == "mosaic":
            norms = (prologue.q_norm, prologue.k_norm)
            return attention_prologue_mosaic(
                projected,
                k,
                v,
                slots.astype(jnp.int32),
                tuple(None if norm is None else norm.weight for norm in norms),
                prologue.rotation,
                num_heads=num_heads,
                rules=tuple(None if norm is None else norm.rule for norm in norms),
                shared_plane=shared_plane,
            )
        return attention_prologue_reference(projected, k, v, slots, prologue, num_heads, shared_plane)


def _check_shapes(
    projected: jax.Array, k: PageView, v: PageView, slots: jax.Array, prologue: AttentionPrologue, num_heads: int
) -> None:
    """Raises ValueError where projections, pages, norms and rotation do not fit together."""
    if (k.page_shape, k.dtype) != (v.page_shape, v.dtype):
        raise ValueError(f"pages of k {k.dtype}{k.page_shape} and of v {v.dtype}{v.page_shape} differ")
    _, kv_heads, dim = k.page_shape
    needed = (num_heads + 2 * kv_heads) * dim
    if projected.ndim != 2 or projected.shape[1] < needed:
        raise ValueError(f"projections have shape {projected.shape}, the heads need [tokens, {needed}]")
    tokens = projected.shape[0]
    if slots.shape != (tokens,) or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be {tokens} integers, got {slots.dtype}{list(slots.shape)}")
    for name, norm in (("q_norm", prologue.q_norm), ("k_norm", prologue.k_norm)):
        if norm is not None and norm.weight.shape != (dim,):
            raise ValueError(f"{name} has weights of shape {norm.weight.shape}, a head has {dim} channels")
    if prologue.rotation is not None:
        cos, sin = prologue.rotation
        if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != tokens or 2 * cos.shape[1] > dim:
            raise ValueError(
                f"a rotation of {cos.shape} and {sin.shape} does not fit {tokens} tokens of {dim} channels"
            )
