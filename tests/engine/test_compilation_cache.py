"""Compiled programs are kept between starts, and a process that did not ask for it is left as it was."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from tokenspeed_jax import ConfigError
from tokenspeed_jax.engine.compilation_cache import OFF, default_cache_folder, use_compilation_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def no_folder() -> Iterator[None]:
    """JAX keeps nothing at first, and afterwards what it kept before."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def start(family: str, folder: Path) -> dict[str, Any]:
    script = str(Path(__file__).with_name("start_once.py"))
    done = subprocess.run(
        [sys.executable, script, family, str(folder)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    # The states of these layers are zeroed before use, which is a program of its own.
    first = start("mamba2", tmp_path / "programs")
    assert first["from_cache"] == 0
    assert first["compiled"] >= first["programs"] > 10
    second = start("mamba2", tmp_path / "programs")
    assert second["compiled"] == 0
    assert second["from_cache"] == second["programs"] == first["programs"]
    assert second["token_ids"] == first["token_ids"]
    # After the start nothing compiles, in either process, cached or not.
    assert [first["after_start"], second["after_start"]] == [0, 0]
    assert [first["compilations_after_warmup"], second["compilations_after_warmup"]] == [0, 0]
    assert (tmp_path / "programs").stat().st_mode & 0o077 == 0


@pytest.mark.usefixtures("no_folder")
@pytest.mark.parametrize("folder", [None, OFF])
def test_an_engine_that_is_given_no_folder_leaves_jax_as_it_is(folder: str | None) -> None:
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    use_compilation_cache(folder)
    assert {name: getattr(jax.config, name) for name in SETTINGS} == before


@pytest.mark.usefixtures("no_folder")
def test_a_given_folder_replaces_that_of_the_process_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    with caplog.at_level(logging.WARNING, "tokenspeed_jax"):
        use_compilation_cache(str(tmp_path / "ours"))
    assert str(tmp_path / "theirs") in caplog.text
    jax.jit(lambda x: x * 3.5 + 2)(1.25).block_until_ready()
    assert list((tmp_path / "ours").iterdir())
    assert not (tmp_path / "theirs").exists()


@pytest.mark.usefixtures("no_folder")
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file") as caught:
        use_compilation_cache(str(tmp_path / "file" / "programs"))
    assert caught.value.field == "compilation_cache_dir"


@pytest.mark.usefixtures("no_folder")
def test_the_folder_of_a_server_is_the_users_or_that_of_jax_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_cache_folder() == str(tmp_path / ".cache" / "tokenspeed_jax" / "compiled")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "file")
    assert default_cache_folder() == OFF
    assert "not kept" in caplog.text
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
    assert default_cache_folder() == OFF
