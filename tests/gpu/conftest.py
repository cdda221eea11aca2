"""Everything in this folder needs an NVIDIA GPU that JAX can use; without one it is skipped with the reason."""

from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).parent


def gpu_missing() -> str | None:
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        return f"needs an NVIDIA GPU that JAX can use: {str(error).splitlines()[0]}"
    return None if device.platform == "gpu" else f"needs an NVIDIA GPU, found {device.platform}"


def pytest_collection_modifyitems(items):
    own = [item for item in items if FOLDER in item.path.parents]
    reason = gpu_missing() if own else None
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
