"""The door to Triton kernels from JAX: jax-triton, an optional dependency (extra `triton`), imported when first used.

A kernel's sizes and strides must be `tl.constexpr`, which costs nothing where shapes are static. An integer passed as
an ordinary argument reaches the compiler without the hint that it divides by 16, which torch's launcher derives from
its value and jax-triton does not: its loads then move 2 bytes at a time, and none is copied ahead asynchronously.
"""

import functools
import importlib.util
from typing import Any

import jax

MODULES = ("triton", "jax_triton")


@functools.cache
def triton_missing() -> str | None:
    """Why no Triton kernel can be called from JAX in this process; None when it can. Imports nothing."""
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            return f"the package {name.replace('_', '-')} is not installed (extra `triton`)"
    return None


@functools.cache
def jax_triton() -> Any:
    """The module, made to work with Triton 3.6 beside later versions."""
    from triton.backends.nvidia import driver  # pyright: ignore[reportMissingImports]

    # jax-triton 0.4 takes this name, which Triton has from 3.7 on, for a sign of an NVIDIA GPU; it stands for a rounding
    # of copied tiles that no kernel here asks for.
    if not hasattr(driver, "TMA_TF32"):
        driver.TMA_TF32 = -1
    import jax_triton  # pyright: ignore[reportMissingImports]
    from jax_triton import triton_lib  # pyright: ignore[reportMissingImports]

    # It also wants every copied tile to say that it is no image's, which Triton 3.6 has not got to.
    metadata = triton_lib.TensorDescMeta
    metadata.__required_keys__ = metadata.__required_keys__ - {"is_im2col"}
    return jax_triton


def triton_call(*arguments: Any, **options: Any) -> Any:
    """`jax_triton.triton_call`."""
    return jax_triton().triton_call(*arguments, **options)


def tiles(x: jax.Array, block: tuple[int, int]) -> Any:
    """A matrix as the copy engine (TMA) reads it, in blocks of this shape from any row on; zeros beyond its end."""
    return jax_triton().TensorDescriptor.from_array(x, block)
