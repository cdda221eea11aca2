"""The door to Triton kernels from JAX: jax-triton, an optional dependency (extra `triton`), imported when first used.

A kernel's sizes and strides must be `tl.constexpr`, which costs nothing where shapes are static. An integer passed as
an ordinary argument reaches the compiler without the hint that it divides by 16, which torch's launcher derives from
its value and jax-triton does not: its loads then move 2 bytes at a time, and none is copied ahead asynchronously.
"""

import functools
import importlib.metadata
import importlib.util
import re
from typing import Any

import jax

MODULES = ("triton", "jax_triton")
OLDEST, BEYOND = (3, 6), (3, 9)  # Triton 3.9 emits PTX 9.4, which the assembler of CUDA 13.0 does not take


@functools.cache
def triton_missing() -> str | None:
    """Why no Triton kernel can be called from JAX in this process; None when it can. Imports nothing."""
    for name in MODULES:
        if importlib.util.find_spec(name) is None:
            return f"the package {name.replace('_', '-')} is not installed (extra `triton`)"
    try:
        return version_refusal(importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return "the version of Triton is unknown, its package has no metadata"


def version_refusal(version: str) -> str | None:
    """Why this version of Triton does not do; None when it does."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if OLDEST <= numbers < BEYOND:
        return None
    return f"Triton {version} is not from {OLDEST[0]}.{OLDEST[1]} on and before {BEYOND[0]}.{BEYOND[1]}"


@functools.cache
def jax_triton() -> Any:
    """The module, made to work with Triton 3.6 beside later versions."""
    from triton.backends.nvidia import driver  # pyright: ignore[reportMissingImports]

    # jax-triton 0.4 takes this name, which Triton has from 3.7 on, for a sign of an NVIDIA GPU; it stands for a
    # rounding of copied tiles that no kernel here asks for.
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
