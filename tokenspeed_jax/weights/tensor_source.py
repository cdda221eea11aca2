"""Where a checkpoint's tensors are read from."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class TensorSource(Protocol):
    """Tensors under their Hugging Face names, read one at a time."""

    def names(self) -> Iterable[str]:
        """All tensors there are."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as `read` returns it."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """Dtype as `read` returns it; bfloat16 is `ml_dtypes.bfloat16`."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The values; they may be a read-only view of a mapped file."""
        ...
