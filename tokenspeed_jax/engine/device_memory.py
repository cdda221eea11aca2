"""Tells a device that has run out of memory from all else that can go wrong on it."""

import contextlib
from collections.abc import Iterator

from tokenspeed_jax.errors import OutOfDeviceMemory

_MARK = "RESOURCE_EXHAUSTED"
_LONGEST = 500


def out_of_memory(error: BaseException) -> str | None:
    """What the device said when it had no memory left; None when `error` is about something else."""
    # JAX has one type for all that XLA reports; the kind stands in the text.
    text = str(error)
    return text[:_LONGEST] if _MARK in text else None


@contextlib.contextmanager
def explained(activity: str) -> Iterator[None]:
    """Raises `OutOfDeviceMemory` with what to change, in place of the device's own error."""
    try:
        yield
    except Exception as error:
        if (said := out_of_memory(error)) is None:
            raise
        raise OutOfDeviceMemory(
            f"out of device memory while {activity}; lower --gpu-memory-utilization (or --kv-cache-memory-bytes), "
            f"--max-num-seqs or --max-num-batched-tokens, or end what else uses the device: {said}"
        ) from error
