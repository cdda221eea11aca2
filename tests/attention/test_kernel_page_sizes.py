"""Kernel page sizes come from the registry or the user, never from P."""

import pytest

from tokenspeed_jax.attention.kernel_page_sizes import KERNEL_PAGE_SIZES, history_kernel_page_sizes, kernel_page_size
from tokenspeed_jax.errors import ConfigError
from tokenspeed_jax.recipes.spec import CacheGroupSpec


def test_default_of_ordinary_attention_is_64_whatever_the_blocks_span() -> None:
    assert [kernel_page_size("mha", g) for g in (64, 128, 192, 256)] == [64] * 4


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_an_override_is_taken_as_it_is(page_size: int) -> None:
    assert kernel_page_size("mha", 128, page_size) == page_size


def test_a_size_that_does_not_divide_says_what_to_change() -> None:
    with pytest.raises(
        ConfigError, match="set kernel_page_size to 16 or 32, or set prefix_granularity to a multiple of 64"
    ):
        kernel_page_size("mha", 32)
    with pytest.raises(ConfigError, match=r"does not divide the 24 tokens of a cache block: set prefix_granularity"):
        kernel_page_size("mha", 24)


def test_an_unsupported_size_names_the_supported_ones() -> None:
    with pytest.raises(ConfigError, match="one of 16, 32, 64, 128 for the mha kernels, got 8") as refusal:
        kernel_page_size("mha", 64, 8)
    assert refusal.value.field == "kernel_page_size"


def test_every_registered_default_is_supported() -> None:
    assert all(sizes.default in sizes.supported for sizes in KERNEL_PAGE_SIZES.values())


def test_only_history_groups_have_pages() -> None:
    full = CacheGroupSpec("full", "history", "full_history", False, rows_per_page=64, entry_stride_tokens=2)
    state = CacheGroupSpec("state", "state", "full_history", False, checkpoint_granularity=128)
    assert history_kernel_page_sizes((full, state), {"full": "mha"}, 128) == {"full": 128}
