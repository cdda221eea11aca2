"""Which implementation of a kernel serves a call, and why a faster one does not."""

from collections.abc import Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from tokenspeed_jax.pallas_kernels.pages import PageView

Implementation = Literal["reference", "xla", "mosaic", "triton"]

FASTEST_FIRST: tuple[Implementation, ...] = ("mosaic", "xla")
"""What a call that names no implementation takes, the first that serves it. An operation for which measurements say
otherwise has an order of its own."""
NO_TRITON = "there is no Triton kernel for this operation"

MOSAIC_HEAD_DIMS = (64, 128, 256)
MOSAIC_TOKENS_PER_PAGE = 64
HOPPER_COMPUTE_CAPABILITY = "9.0"


def check_implementation(implementation: Implementation | None) -> None:
    """Raises ValueError for a name that no kernel has."""
    names = get_args(Implementation)
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation must be None or one of {names}, got {implementation!r}")


def check_pages(q: jax.Array, k: PageView, v: PageView) -> None:
    """Raises ValueError where the queries and the pages do not fit together."""
    if q.ndim != 3:
        raise ValueError(f"q must be [tokens, heads, head dim], got shape {q.shape}")
    if (k.page_shape, k.dtype) != (v.page_shape, v.dtype):
        raise ValueError(f"pages of k {k.dtype}{k.page_shape} and of v {v.dtype}{v.page_shape} differ")
    _, kv_heads, dim = k.page_shape
    if q.shape[2] != dim:
        raise ValueError(f"q has head dim {q.shape[2]}, the pages have {dim}")
    if q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of the pages' {kv_heads} KV heads")


def check_vectors(page_table: jax.Array, vectors: Mapping[str, tuple[jax.Array, int]]) -> None:
    """Raises ValueError for an index argument of the wrong shape or type; `vectors` maps names to (array, length)."""
    if page_table.ndim != 2 or not jnp.issubdtype(page_table.dtype, jnp.integer):
        raise ValueError(f"page_table must be a matrix of integers, got {page_table.dtype}{list(page_table.shape)}")
    for name, (vector, length) in vectors.items():
        if vector.shape != (length,) or not jnp.issubdtype(vector.dtype, jnp.integer):
            raise ValueError(f"{name} must be {length} integers, got {vector.dtype}{list(vector.shape)}")


def check_sinks(sinks: jax.Array | None, num_heads: int) -> None:
    """Raises ValueError unless there is one logit per query head, or none at all."""
    if sinks is not None and (sinks.shape != (num_heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating)):
        raise ValueError(f"sinks must be {num_heads} floats, one per head, got {sinks.dtype}{list(sinks.shape)}")


def choose_implementation(
    asked: Implementation | None,
    refusal: str | None,
    *,
    triton_refusal: str | None = NO_TRITON,
    order: tuple[Implementation, ...] = FASTEST_FIRST,
) -> Implementation:
    """The implementation that was asked for, else the first of `order` that serves the call.

    Args:
        refusal: why Mosaic cannot serve the call; None when it can.
        triton_refusal: the same of Triton.

    Raises:
        ValueError: the one that was asked for refuses.
    """
    refusals = {"mosaic": refusal, "triton": triton_refusal}
    if asked is None:
        return next(name for name in order if refusals.get(name) is None)
    if reason := refusals.get(asked):
        raise ValueError(f"implementation {asked!r} cannot serve this call: {reason}")
    return asked


def hopper_refusal() -> str | None:
    """Why kernels for a Hopper GPU cannot run on the default device; None when they can."""
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return f"the default device is a {device.platform}, not a Hopper GPU"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != HOPPER_COMPUTE_CAPABILITY:
        return f"the GPU has compute capability {capability}, the kernel is written for {HOPPER_COMPUTE_CAPABILITY}"
    return None


def shape_refusal(
    *, num_heads: int, num_kv_heads: int, head_dim: int, tokens_per_page: int, dtype: str, kv_dtype: str
) -> str | None:
    """Why the Mosaic kernels cannot serve this geometry on any GPU; None when they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is neither bfloat16 nor float16, which the matrix units take"
    if jnp.dtype(kv_dtype) != jnp.dtype(dtype):
        return f"pages of {kv_dtype} differ from queries of {dtype}"
    if head_dim not in MOSAIC_HEAD_DIMS:
        return f"head dim {head_dim} is none of {MOSAIC_HEAD_DIMS}"
    if tokens_per_page != MOSAIC_TOKENS_PER_PAGE:
        return f"pages hold {tokens_per_page} tokens, the kernel takes {MOSAIC_TOKENS_PER_PAGE}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads are no multiple of {num_kv_heads} KV heads"
    return None
