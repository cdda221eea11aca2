"""A checkpoint: configuration, tensors and tokenizer, from a folder, a GGUF file or the hub."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from tokenspeed_jax.errors import CheckpointError, ConfigError
from tokenspeed_jax.weights import hub
from tokenspeed_jax.weights.safetensors_source import INDEX_FILE, SINGLE_FILE, SafetensorsSource, weight_files
from tokenspeed_jax.weights.tensor_source import TensorSource

if TYPE_CHECKING:
    from tokenspeed_jax.text.tokenizer import Tokenizer

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SERVED_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What a checkpoint says of its model, without the weights.

    Attributes:
        name: as it was opened.
        hf_config: `config.json`.
    """

    name: str
    hf_config: dict[str, Any]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that the weights were saved in, as `config.json` says; of its text part where it has parts."""
        parts = (self.hf_config, self.hf_config.get("text_config") or {})
        names = (part.get(field) for part in parts for field in ("dtype", "torch_dtype"))
        name = next(filter(None, names), "float32")
        if name not in _SERVED_DTYPES:
            raise CheckpointError(f"{self.name}: dtype {name!r} is not supported (served: {', '.join(_SERVED_DTYPES)})")
        return jnp.dtype(name)


@dataclasses.dataclass(frozen=True)
class Checkpoint(CheckpointConfig):
    """An opened checkpoint; its tensors are read when asked for.

    Attributes:
        generation_config: `generation_config.json`, empty without one.
        tensors: under their Hugging Face names, in Hugging Face's layout.
    """

    generation_config: dict[str, Any]
    tensors: TensorSource
    make_tokenizer: Callable[[], "Tokenizer"]

    def tokenizer(self) -> "Tokenizer":
        """Builds the tokenizer; raises `CheckpointError` when it is of a kind that is not supported."""
        return self.make_tokenizer()


def open_checkpoint(model: str, *, revision: str | None = None, progress: bool = True) -> Checkpoint:
    """Opens a checkpoint; reads its configuration and the names of its tensors, not their values.

    Args:
        model: a folder, a `.gguf` file, or a hub id "owner/name", which is fetched.
        revision: branch, tag or commit of a hub id.
        progress: show progress bars of a download.

    Raises:
        CheckpointError: nothing is there, or files are missing or malformed; the message names them.
        ConfigError: a revision of something else than a hub id.
    """
    path = _local(model, revision)
    if path is None:
        return _open_folder(hub.download(model, revision=revision, progress=progress), model)
    if path.is_dir():
        return _open_folder(path, model)
    from tokenspeed_jax.weights.gguf_checkpoint import open_gguf

    return open_gguf(path, model)


def open_weights(folder: str, config: CheckpointConfig) -> Checkpoint:
    """Opens the safetensors files of a folder as weights of a model that is known already, as a trainer writes them.

    Args:
        config: of the model. The folder's own `config.json` is not looked at, nor is anything else but the tensors.

    Raises:
        CheckpointError: no such folder, no safetensors files in it, or malformed ones; the message names them.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    files = weight_files(path)
    if not files:
        raise CheckpointError(f"folder {folder} lacks {SINGLE_FILE} (or {INDEX_FILE} and its files)")

    def make_tokenizer() -> "Tokenizer":
        raise CheckpointError(f"{folder} was opened for its weights alone")

    return Checkpoint(folder, config.hf_config, {}, SafetensorsSource(files), make_tokenizer)


def open_config(model: str, *, revision: str | None = None, progress: bool = True) -> CheckpointConfig:
    """Reads a checkpoint's configuration alone: of a hub id, nothing but `config.json` is fetched.

    Args:
        model, revision, progress: as in `open_checkpoint`.

    Raises:
        CheckpointError: nothing is there, or `config.json` is missing or malformed.
        ConfigError: a revision of something else than a hub id.
    """
    path = _local(model, revision)
    if path is not None and path.suffix == ".gguf" and path.is_file():
        return open_checkpoint(model)
    if path is None:
        path = hub.download(model, revision=revision, progress=progress, wanted=hub.CONFIG_ONLY)
    file = path / "config.json"
    if not file.exists():
        raise CheckpointError(f"checkpoint folder {model} lacks config.json")
    return CheckpointConfig(model, _read_object(file))


def _local(model: str, revision: str | None) -> Path | None:
    """The folder or GGUF file that `model` is; None for a hub id. Raises `CheckpointError` when it is none of these."""
    path = Path(model).expanduser()
    if path.exists() and revision is not None:
        raise ConfigError(f"revision {revision} has no effect: {model} is no hub id", field="revision")
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise CheckpointError(f"{model}: no such file")
        return path
    if path.exists():
        raise CheckpointError(f"{model} is neither a checkpoint folder nor a .gguf file")
    if _HUB_ID.fullmatch(model) is None:
        raise CheckpointError(f"{model}: no such folder, and not a hub id of the form owner/name")
    return None


def _open_folder(folder: Path, name: str) -> Checkpoint:
    files = weight_files(folder)
    missing = [file for file in ("config.json", "tokenizer.json") if not (folder / file).exists()]
    if not files:
        missing.append(f"{SINGLE_FILE} (or {INDEX_FILE} and its files)")
    if missing:
        raise CheckpointError(f"checkpoint folder {name} lacks {', '.join(missing)}")
    hf_config = _read_object(folder / "config.json")
    generation = folder / "generation_config.json"
    generation_config = _read_object(generation) if generation.exists() else {}

    def make_tokenizer() -> "Tokenizer":
        from tokenspeed_jax.text.tokenizer import Tokenizer, TokenizerFiles

        return Tokenizer(TokenizerFiles.read(folder), hf_config=hf_config, generation_config=generation_config)

    return Checkpoint(name, hf_config, generation_config, SafetensorsSource(files), make_tokenizer)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return value
