"""The registry of kernel page sizes: how many tokens one page of each attention kernel spans.

A property of the kernel, never derived from `prefix_granularity`. A cache block of g tokens is g / p kernel pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.spec import CacheGroupSpec


@dataclass(frozen=True)
class KernelPageSizes:
    """Page sizes, in tokens, that a kernel family supports, and the one it prefers."""

    default: int
    supported: tuple[int, ...]


KERNEL_PAGE_SIZES: dict[str, KernelPageSizes] = {
    "mha": KernelPageSizes(default=64, supported=(16, 32, 64, 128)),
    "mla": KernelPageSizes(default=64, supported=(16, 32, 64)),
}
"""Kernel family -> its page sizes, one line per family."""


def kernel_page_size(kernel: str, block_granularity: int, override: int | None = None) -> int:
    """The page size a kernel family uses over blocks of `block_granularity` tokens.

    Args:
        override: the user's `kernel_page_size`; None takes the registry's default.

    Raises:
        ConfigError: the family does not support the size, or it does not divide the blocks; says what to change.
    """
    sizes = KERNEL_PAGE_SIZES[kernel]
    page_size = sizes.default if override is None else override
    supported = ", ".join(map(str, sizes.supported))
    if page_size not in sizes.supported:
        raise ConfigError(
            f"kernel_page_size must be one of {supported} for the {kernel} kernels, got {page_size}",
            field="kernel_page_size",
        )
    if block_granularity % page_size:
        fitting = [str(size) for size in sizes.supported if block_granularity % size == 0]
        smaller = f"set kernel_page_size to {' or '.join(fitting)}, or " if fitting else ""
        raise ConfigError(
            f"kernel_page_size {page_size} of the {kernel} kernels does not divide the {block_granularity} tokens of a "
            f"cache block: {smaller}set prefix_granularity to a multiple of {page_size}",
            field="kernel_page_size",
        )
    return page_size


def history_kernel_page_sizes(
    specs: Sequence[CacheGroupSpec], kernels: Mapping[str, str], override: int | None = None
) -> dict[str, int]:
    """Page size of every history group, for the kernel family that reads it; errors as `kernel_page_size`."""
    return {
        spec.group_id: kernel_page_size(kernels[spec.group_id], spec.block_granularity, override)
        for spec in specs
        if spec.family == "history"
    }
