"""Download of a checkpoint by its Hugging Face hub id."""

from pathlib import Path

from tokenspeed_jax.errors import CheckpointError

# Weights in other formats, and copies of the same weights under other names, stay where they are.
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["consolidated*", "original/*", "onnx/*"]


def download(hub_id: str, *, revision: str | None, progress: bool) -> Path:
    """Fetches a checkpoint into the hub's own cache and returns its folder.

    A file that is there already is not fetched again; without a network the cached copy serves.

    Args:
        hub_id: "owner/name".
        revision: branch, tag or commit; None for the default branch.
        progress: show progress bars.

    Raises:
        CheckpointError: no such checkpoint, no permission, or no network and no cached copy.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if progress else disable_progress_bars)()
    try:
        folder = huggingface_hub.snapshot_download(
            hub_id, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except Exception as error:  # the client and its transport raise many unrelated types
        raise CheckpointError(
            f"{hub_id!r} is no folder or file here, and fetching it from the Hugging Face hub failed: {error}"
        ) from error
    return Path(folder)
