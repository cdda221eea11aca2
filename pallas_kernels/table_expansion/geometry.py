"""`TableGeometry`, what a cache group's block table means, and `ExpandedTables`, what becomes of all of them."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Int


@dataclasses.dataclass(frozen=True)
class TableGeometry:
    """How the blocks of one cache group are cut into kernel pages.

    Attributes:
        pages_per_block: kernel pages of a block; page ids of block b begin at b * pages_per_block.
        page_size: tokens of a kernel page.

    Raises:
        ValueError: a count that is not positive.
    """

    pages_per_block: int
    page_size: int

    def __post_init__(self) -> None:
        if self.pages_per_block <= 0 or self.page_size <= 0:
            raise ValueError(f"pages_per_block and page_size must be positive, got {self}")

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.pages_per_block * self.page_size


class ExpandedTables(NamedTuple):
    """Per cache group, the page table of every row and the slot of every token of the step."""

    page_tables: tuple[Int[Array, "rows pages"], ...]
    slots: tuple[Int[Array, " tokens"], ...]
