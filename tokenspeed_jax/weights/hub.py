"""Download of a checkpoint by its Hugging Face hub id."""

from collections.abc import Sequence
from pathlib import Path

from tokenspeed_jax.errors import CheckpointError

# Weights in other formats, and copies of the same weights under other names, stay where they are.
WHOLE = ("*.json", "*.jinja", "*.safetensors")
CONFIG_ONLY = ("config.json",)
_UNWANTED = ["consolidated*", "original/*", "onnx/*"]


def download(hub_id: str, *, revision: str | None, progress: bool, wanted: Sequence[str] = WHOLE) -> Path:
    """Fetches a checkpoint into the hub's own cache and returns its folder.

    A file that is there already is not fetched again; without a network the cached copy serves.

    Args:
        hub_id: "owner/name".
        revision: branch, tag or commit; None for the default branch.
        progress: show progress bars.
        wanted: patterns of the files that are fetched.

    Raises:
        CheckpointError: no such checkpoint, no permission, or no network and no cached copy.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=list(wanted), ignore_patterns=_UNWANTED
        )
    except Exception as error:  # the client and its transport raise many unrelated types
        raise CheckpointError(
            f"{hub_id!r} is no folder or file here, and fetching it from the Hugging Face hub failed: {error}"
        ) from error
    return Path(folder)
